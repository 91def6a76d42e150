"""Runs, their score and energy, and the progress of a live one."""
