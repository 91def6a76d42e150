"""Results in a row: ranked, their scaling and the trend over the rounds, one's own among the published ones."""
