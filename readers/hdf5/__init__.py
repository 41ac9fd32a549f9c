"""HDF5 files: contiguous and chunked datasets as byte ranges, other datasets through h5py."""
