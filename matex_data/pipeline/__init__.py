"""Read-ahead of windows of samples, and the batches of arrays or tensors made from them."""
