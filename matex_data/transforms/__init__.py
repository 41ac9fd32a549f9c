"""Transforms of samples: missing numbers, sliding windows, stacked fields; and statistics of them."""
