"""Dask on the GPUs of a batch cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .cluster import GPUJobQueueCluster as GPUJobQueueCluster
    from .cluster import GPULocalCluster as GPULocalCluster
    from .cluster import GPULSFCluster as GPULSFCluster
    from .cluster import GPUPBSCluster as GPUPBSCluster
    from .cluster import GPUSGECluster as GPUSGECluster
    from .cluster import GPUSLURMCluster as GPUSLURMCluster
    from .connection import connect as connect

__all__ = [
    "GPUJobQueueCluster", "GPULSFCluster", "GPULocalCluster", "GPUPBSCluster", "GPUSGECluster", "GPUSLURMCluster",
    "__version__", "connect",
]  # fmt: skip

_LAZY = {"connect": "connection"}
_LAZY.update(dict.fromkeys((name for name in __all__ if name.endswith("Cluster")), "cluster"))


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: most commands need none of them."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
