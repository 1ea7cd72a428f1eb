"""`close` of a cluster of this process ends all that belongs to it, and prints nothing."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from distributed.comm import listen
from distributed.security import Security
from tornado.iostream import SSLIOStream

import gpujobs
from gpujobs.injob.network import end_handshakes_with

from ..support.processes import patience

QUIET: dict[str, Any] = {"n_workers": 0, "network": {"dashboard": "off"}, "quiet": True}


def test_a_connection_in_its_handshake_ends_with_the_cluster_and_nothing_is_logged(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Processes of a job have such connections when the cluster cancels it: they unregister."""
    with gpujobs.GPULocalCluster(gpus_per_job=0, silence_logs=False, **QUIET) as cluster:
        address = urlsplit(cluster.scheduler_address)
        with socket.create_connection((address.hostname, address.port), patience(60)) as connection:
            cluster.get_client()  # a later connection: the first one is accepted
            caplog.clear()
            cluster.close()
            assert connection.recv(1) == b""
    warnings = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert not warnings, warnings


def test_a_connection_that_is_accepted_when_its_listener_stops_is_closed() -> None:
    async def story() -> None:
        security = Security.temporary()
        options = security.get_listen_args("scheduler")
        listener = await listen("tls://127.0.0.1:0", print, **options)
        end_handshakes_with([listener])
        listener.stop()
        near, far = socket.socketpair()
        tls = options["ssl_context"].wrap_socket(
            near, server_side=True, do_handshake_on_connect=False
        )
        with far:
            await listener._handle_stream(SSLIOStream(tls), ("127.0.0.1", 1))
            far.settimeout(patience(60))
            assert far.recv(1) == b""

    asyncio.run(story())


def test_a_closed_cluster_adapts_no_group(home: Path) -> None:
    groups = {name: {"gpus": 0, "workers": {"memory": "1GiB"}} for name in ("first", "second")}
    with gpujobs.GPULocalCluster(groups=groups, **QUIET) as cluster:
        adaptive = [cluster.adapt(group=name, minimum=0, maximum=1) for name in groups]
        assert all(one.state in ("starting", "running") for one in adaptive)
        cluster.close()
        assert [one.state for one in adaptive] == ["stopped", "stopped"]
