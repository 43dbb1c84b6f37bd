"""The older generations: ORT 1.3 to 1.15, and HDF5 read in place."""
