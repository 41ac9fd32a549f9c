"""Scientific data into synchronous data-parallel training, on every rank, at the speed of the storage."""
