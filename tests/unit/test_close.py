"""`close` of a cluster of this process ends all that belongs to it, and prints nothing."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import gpujobs

from ..support.processes import patience

OPTIONS: dict[str, Any] = {
    "n_workers": 0, "gpus_per_job": 0, "network": {"dashboard": "off"}, "quiet": True, "silence_logs": False,
}  # fmt: skip


def test_a_connection_in_its_handshake_ends_with_the_cluster_and_nothing_is_logged(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Processes of a job have such connections when the cluster cancels it: they unregister."""
    with gpujobs.GPULocalCluster(**OPTIONS) as cluster:
        address = urlsplit(cluster.scheduler_address)
        with socket.create_connection((address.hostname, address.port), patience(60)) as connection:
            cluster.get_client()  # a later connection: the first one is accepted
            caplog.clear()
            cluster.close()
            assert connection.recv(1) == b""
    warnings = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert not warnings, warnings


def test_a_closed_cluster_does_not_adapt(home: Path) -> None:
    with gpujobs.GPULocalCluster(**OPTIONS) as cluster:
        adaptive = cluster.adapt(minimum=0, maximum=1, interval="1h")
        assert adaptive.state in ("starting", "running")
        cluster.close()
        assert adaptive.state == "stopped"
