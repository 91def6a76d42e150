"""Records, shards and batches: from prepared files to the varlen batch of the model."""
