"""Checkpoints, and resuming from them."""
