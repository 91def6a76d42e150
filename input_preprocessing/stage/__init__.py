"""Shared by all stages: command line, worker processes, output folders, manifest."""
