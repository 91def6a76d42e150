"""Review of MLPerf BERT results: do they count, what is the score, and the package to submit."""
