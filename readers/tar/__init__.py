"""Tar shards in the layout of WebDataset."""
