"""Read byte ranges of files into memory, collectively or by each rank alone."""
