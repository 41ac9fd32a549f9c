"""Windows of samples, read ahead by each rank, to batches of arrays or tensors."""
