"""Verification of prepared data sets."""
