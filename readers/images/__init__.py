"""Images: folders of files, tar shards, and stacks of pages in one TIFF file."""
