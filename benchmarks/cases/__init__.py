"""The cases: which readers are measured on which file, and the limits."""
