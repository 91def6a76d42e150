"""Logs and folders of runs, and the output of commands."""
