"""Below everything: settings, ranks, files, the end of a process."""
