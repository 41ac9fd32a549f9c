"""openPMD series in HDF5: series (where records lie) -> components (rows and units of one) -> reader."""
