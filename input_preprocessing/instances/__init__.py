"""Tokens to training instances, bit-identical to the reference."""
