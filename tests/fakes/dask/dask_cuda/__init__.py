"""Part of the stub of dask."""
