"""Assign samples to steps and ranks: pure functions of integers."""
