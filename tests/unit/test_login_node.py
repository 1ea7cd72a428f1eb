"""A dask scheduler in a process whose host lacks the site's network interface."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gpujobs import GPULocalCluster
from gpujobs.clusters.ledger import Ledger
from gpujobs.errors import InputError


def test_an_interface_that_this_host_lacks_is_refused_with_those_it_has(home: Path) -> None:
    with pytest.raises(InputError) as caught:
        GPULocalCluster(interface="nosuch0", gpus_per_job=0)
    message = str(caught.value)
    assert "this host has no network interface nosuch0; it has " in message
    assert all(name in message for _, name in socket.if_nameindex())
    assert 'hint: scheduler="job" runs the dask scheduler in a job' in message
    assert Ledger().all() == []
