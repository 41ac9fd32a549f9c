"""Self-check of training: shards of a batch against their union, throughout a run."""
