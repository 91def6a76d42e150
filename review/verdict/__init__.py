"""Whether a result is valid for submission, and what is wrong where it is not."""
