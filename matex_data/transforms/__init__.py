"""Transforms of samples: missing numbers, sequence windows, stacked fields; and statistics of them."""
