"""Preloaded by dask's processes: what must happen before they listen, and `dask_setup`."""

from __future__ import annotations

import os

from .loopback import confine_if_wanted
from .names import PROTOCOL
from .network import initialise_driver
from .ports import limit_if_wanted
from .registry import dask_setup

__all__ = ["dask_setup"]

# When dask imports this module: it calls `dask_setup` when its processes already listen.
limit_if_wanted()
confine_if_wanted()
if os.environ.get(PROTOCOL) == "ucxx":
    initialise_driver()
