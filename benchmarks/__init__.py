"""Measure how fast data is read, and compare with other readers of the same files: ``python -m benchmarks``."""
