"""Images: folders of files, shards, stacks; JPEG, PNG, TIFF, GIF, BMP, WebP and FITS."""
