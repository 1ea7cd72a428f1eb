"""Preloaded by dask's processes: what must happen before they listen, and `dask_setup`."""

from __future__ import annotations

import os
import sys

from .names import MODULES, PROTOCOL
from .network import confine_if_wanted, initialise_driver, limit_if_wanted
from .registry import dask_setup

__all__ = ["dask_setup"]

# When dask imports this module: it calls `dask_setup` when its processes already listen.
if (modules := os.environ.get(MODULES)) and modules not in sys.path:
    sys.path.append(modules)  # last: it hides no module of the environment
limit_if_wanted()
confine_if_wanted()
if os.environ.get(PROTOCOL) == "ucxx":
    initialise_driver()
