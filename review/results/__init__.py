"""Runs, their score and energy, and comparison with published accuracy curves."""
