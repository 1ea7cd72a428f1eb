"""Preloaded by dask's processes: what must happen before they listen, and `dask_setup`."""

from __future__ import annotations

import os
import sys

from .gpus import with_named_slices
from .names import MODULES, PROTOCOL, VISIBLE
from .network import initialise_driver, restrict_listeners
from .registry import dask_setup

__all__ = ["dask_setup"]

# When dask imports this module: it calls `dask_setup` when its processes already listen.
if (modules := os.environ.get(MODULES)) and modules not in sys.path:
    sys.path.append(modules)  # last: it hides no module of the environment
restrict_listeners()
if VISIBLE in os.environ:  # each process of dask asks NVML for the memory of its first GPU
    os.environ.update(with_named_slices(os.environ))
if os.environ.get(PROTOCOL) == "ucxx":
    initialise_driver()
