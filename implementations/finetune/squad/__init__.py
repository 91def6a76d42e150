"""SQuAD 1.1 and 2.0: files to token windows, token scores to answers, answers to exact match and
F1.
"""
