"""The certificate of a cluster for clients of this process that have its address only.

``Client(cluster)`` takes the certificate from the cluster, ``Client(cluster.scheduler_address)``
has none. Dask calls the function that its configuration names for such an address.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import dask.config
from distributed.deploy.cluster import Cluster
from distributed.security import Security

LOADER = "distributed.client.security-loader"
"""Key of dask's configuration: a function that returns the security for an address, or None."""
_clusters: weakref.WeakValueDictionary[int, Cluster] = weakref.WeakValueDictionary()
"""The clusters of this process, by their identity: two that are attached to one are equal."""


def offer(cluster: Cluster) -> None:
    """Let clients of this process connect to the address of ``cluster``, while it is open."""
    _clusters[id(cluster)] = cluster
    if dask.config.get(LOADER, None) is None:  # a user's own stays
        dask.config.set({LOADER: f"{__name__}.{security_for.__name__}"})


def security_for(info: Mapping[str, str]) -> Security | None:
    """Return the security of the cluster with this address; None: it is not one of this process.

    The configuration of dask's TLS would be for one cluster, and for all addresses.
    """
    for cluster in list(_clusters.values()):
        if cluster.scheduler_address == info["address"]:
            return cluster.security
    return None
