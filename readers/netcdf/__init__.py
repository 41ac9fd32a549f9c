"""netCDF files, classic and netCDF-4, decoded by the CF conventions."""
