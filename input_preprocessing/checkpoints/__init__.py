"""Conversion of TensorFlow and PyTorch checkpoints."""
