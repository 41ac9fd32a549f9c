"""Texts that are cut into records: borders of blocks, compression, events, and the search for them by all ranks."""
