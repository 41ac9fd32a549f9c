"""Variables over named dimensions, of netCDF and Zarr: their samples, CF conventions, labels and selections."""
