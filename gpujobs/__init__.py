"""Dask on the GPUs of a batch cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:
    from .clusters.connect import connect as connect
    from .clusters.handle import ClusterHandle as ClusterHandle
    from .clusters.handle import plan as plan
    from .clusters.handle import submit as submit
    from .deploy import GPUJobQueueCluster as GPUJobQueueCluster
    from .deploy import GPULocalCluster as GPULocalCluster
    from .deploy import GPULSFCluster as GPULSFCluster
    from .deploy import GPUPBSCluster as GPUPBSCluster
    from .deploy import GPUSGECluster as GPUSGECluster
    from .deploy import GPUSLURMCluster as GPUSLURMCluster
    from .deploy import here as here

__all__ = [
    "ClusterHandle",
    "GPUJobQueueCluster",
    "GPULSFCluster",
    "GPULocalCluster",
    "GPUPBSCluster",
    "GPUSGECluster",
    "GPUSLURMCluster",
    "__version__",
    "connect",
    "here",
    "plan",
    "submit",
]

_LAZY = {"connect": "clusters.connect", "here": "deploy"}
_LAZY.update(dict.fromkeys(("ClusterHandle", "plan", "submit"), "clusters.handle"))
_LAZY.update(dict.fromkeys((name for name in __all__ if name.endswith("Cluster")), "deploy"))


def __getattr__(name: str) -> object:
    """Import a public name on first use: most commands need none of them."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
