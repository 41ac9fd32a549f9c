"""Zarr stores of versions 2 and 3: groups of arrays, whose chunks lie in files of their own or in a zip file."""
