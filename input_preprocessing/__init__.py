"""Data preparation: one module a stage, from text to packed records."""
