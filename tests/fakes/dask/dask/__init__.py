"""Part of the stub of dask."""

from . import config as config
