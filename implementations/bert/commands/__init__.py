"""``python -m bert COMMAND``: what one does with trained weights, checkpoints and ranks."""
