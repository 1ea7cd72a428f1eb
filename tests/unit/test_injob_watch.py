"""Is the dask scheduler gone, or does it only not answer?"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpujobs.injob import workers
from gpujobs.injob.certificate import make_certificate
from gpujobs.injob.names import CERTIFICATE, KEY
from gpujobs.injob.network import Reach, dask_config, reach
from gpujobs.injob.workers import SchedulerWatch


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A process that is stopped: its kernel accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(workers, "_INTERVAL", 0.0)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "lease").touch()
    return tmp_path


def address_of(listener: socket.socket, protocol: str = "tcp") -> str:
    return f"{protocol}://127.0.0.1:{listener.getsockname()[1]}"


def attempts(found: SchedulerWatch, address: str, registered: bool) -> int:
    """Return how often a watch must look until it sees that the dask scheduler is gone; 9: never."""
    return next((n for n in range(1, 9) if found.is_gone(address, {}, registered=registered)), 9)


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds, time.time() - seconds))


def test_an_address_connects_only_answers_or_does_nothing(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpujobs.injob.network._CONNECT_TIMEOUT", 0.5)
    make_certificate(tmp_path)
    environ = dask_config(tmp_path, "tls")
    assert reach(address_of(listener), {}) is Reach.ANSWERS
    assert reach(address_of(listener, "tls"), environ) is Reach.CONNECTS
    address = address_of(listener, "tls")
    listener.close()
    assert reach(address, environ) is Reach.NOTHING
    assert reach("tls://", environ) is Reach.NOTHING


def test_a_connection_shows_the_certificate_of_the_cluster(
    tmp_path: Path, listener: socket.socket
) -> None:
    """Else the listener, which asks for it, would log an error at each look."""
    make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / CERTIFICATE, tmp_path / KEY)
    context.load_verify_locations(tmp_path / CERTIFICATE)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # nobody reads them
    shown: list[bool] = []

    def answer() -> None:
        with (
            suppress(ssl.SSLError),
            listener.accept()[0] as connection,
            context.wrap_socket(connection, server_side=True) as encrypted,
        ):
            shown.append(bool(encrypted.getpeercert()))

    listening = threading.Thread(target=answer)
    listening.start()
    assert reach(address_of(listener, "tls"), dask_config(tmp_path, "tls")) is Reach.ANSWERS
    listening.join()
    assert shown == [True]


def test_while_workers_start_the_address_decides(folder: Path, listener: socket.socket) -> None:
    found = SchedulerWatch(folder, 1, 1)
    assert attempts(found, address_of(listener), registered=False) == 9
    address = address_of(listener)
    listener.close()
    assert attempts(found, address, registered=False) == 3  # not at the first failure


@pytest.mark.parametrize("sign", ["lease", "head-1/heartbeat"])
def test_afterwards_a_sign_of_life_is_enough(
    folder: Path, listener: socket.socket, sign: str
) -> None:
    address = address_of(listener)
    if sign != "lease":
        (folder / "head-1").mkdir()
        (folder / sign).touch()
        age(folder / "lease", 1000)
    found = SchedulerWatch(folder, 1, 1)
    age(folder / sign, 1000)
    assert attempts(found, address, registered=True) == 9  # stopped, and its port is still there
    listener.close()
    (folder / sign).touch()
    assert attempts(found, address, registered=True) == 9
    age(folder / sign, 1000)
    assert attempts(found, address, registered=True) == 3
