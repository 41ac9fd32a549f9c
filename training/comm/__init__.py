"""Communicators of training, and the collectives on NumPy arrays."""
