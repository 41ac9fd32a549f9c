"""Models that are cut into consecutive stages, one on each rank, through which micro-batches flow."""
