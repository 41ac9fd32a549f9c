"""Folders of image files, tables of them, and single files: which ones they are, and how each rank reads its own."""
