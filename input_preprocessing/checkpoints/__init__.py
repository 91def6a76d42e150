"""Checkpoints of TensorFlow and PyTorch, converted to one another."""
