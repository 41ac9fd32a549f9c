"""Measures how fast data is read, beside other readers of the same files: ``python -m benchmarks``."""
