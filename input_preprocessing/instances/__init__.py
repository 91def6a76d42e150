"""Tokens to training instances, bit for bit the reference's."""
