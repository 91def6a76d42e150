"""Weights and states in files: read, written, sharded, as Hugging Face has them."""
