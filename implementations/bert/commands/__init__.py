"""``python -m bert COMMAND``: tools for trained weights, checkpoints and ranks."""
