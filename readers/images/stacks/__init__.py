"""Stacks: TIFF files whose planes are samples, read by the byte ranges of their strips and tiles."""
