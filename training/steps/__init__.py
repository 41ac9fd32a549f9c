"""Training and evaluation steps of one model on all ranks."""
