"""Shards that equal their union: rows and weights of the ranks, steps, losses, metrics and moving statistics."""
