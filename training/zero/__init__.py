"""Optimizers of parts of weights: those of layers that are cut, and sections that each rank alone updates (ZeRO)."""
