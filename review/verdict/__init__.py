"""Checks whether a result is valid for submission."""
