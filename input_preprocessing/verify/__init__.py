"""Whether a prepared data set is what it should be."""
