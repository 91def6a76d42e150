"""Records to training files: evaluation set, shuffled, packed and binned; records of other makers."""
