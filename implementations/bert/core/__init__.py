"""Foundations: settings, ranks, files, process exit."""
