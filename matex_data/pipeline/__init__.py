"""Windows of samples: planned, read, decoded, shuffled and cut into batches."""
