"""Weights and training states in files: our own, sharded, and Hugging Face's."""
