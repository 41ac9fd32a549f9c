"""Communicators of training, and collectives on NumPy arrays."""
