"""Records to training files: evaluation set, shuffled, packed and binned shards; import and
export.
"""
