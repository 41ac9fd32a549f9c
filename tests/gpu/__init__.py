"""A short script for a machine with GPUs, which has no place in ``make test``: ``make test-gpu``."""
