"""``open_dataset``: from paths or arrays to the index of all samples."""
