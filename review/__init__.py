"""Results review: read, check, compare, report and package MLPerf BERT results. Never imports torch."""
