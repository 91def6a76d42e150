"""GLUE tasks and any table of labelled sentences or pairs: TSV files to tokens, predictions to the task's metric."""
