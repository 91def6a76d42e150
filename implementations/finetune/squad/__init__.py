"""SQuAD 1.1 and 2.0: questions and contexts to windows of tokens, scores of tokens to answers, answers to F1."""
