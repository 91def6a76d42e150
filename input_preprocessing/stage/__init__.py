"""What every stage shares: command line, worker processes, output folders, manifest."""
