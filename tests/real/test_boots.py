"""A port that something takes between its choice and the start of the daemon costs one more boot."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..conftest import fresh_folder, unavailable
from ..support import sge, slurm, sshd
from ..support.processes import free_ports

Ports = Callable[[int], list[int]]


@pytest.fixture
def ports() -> Iterator[Ports]:
    """A choice of ports whose last one is taken, at the first time."""
    with socket.socket() as other:

        def chosen(count: int) -> list[int]:
            found = free_ports(count)
            if other.getsockname()[1] == 0:
                other.bind(("", found[-1]))
            return found

        yield chosen


def test_slurm_boots_although_the_port_of_a_node_is_taken(
    shared_folder: Path, ports: Ports, capfd: pytest.CaptureFixture[str]
) -> None:
    if why := slurm.missing():
        unavailable("slurm", why)
    folder = fresh_folder(shared_folder, "boots") / "slurm"
    with slurm.PrivateSlurm(folder, nodes=2, gpus=0, ports=ports).running() as running:
        assert running.ready()
    said = capfd.readouterr().out
    assert "boot 1 of 3: slurmd-node2 ended" in said
    assert "Address already in use" in said


@pytest.mark.slow
def test_grid_engine_boots_although_the_port_of_qmaster_is_taken(
    shared_folder: Path, ports: Ports, capfd: pytest.CaptureFixture[str]
) -> None:
    if why := sge.missing():
        unavailable("sge", why)
    folder = fresh_folder(shared_folder, "boots") / "sge"

    def first(count: int) -> list[int]:  # that of qmaster, which is on this host
        return ports(count)[::-1]

    with sge.PrivateSge(folder, nodes=1, ports=first).running() as running:
        assert running.queue() == []
    said = capfd.readouterr().out
    assert "boot 1 of 3: qmaster has ended" in said


def test_sshd_boots_although_its_port_is_taken(
    shared_folder: Path, home: Path, ports: Ports, capfd: pytest.CaptureFixture[str]
) -> None:
    if why := sshd.missing():
        unavailable("ssh", why)
    folder, laptop = (fresh_folder(shared_folder, name) for name in ("sshd", "laptop"))
    with sshd.LoginNode(folder, home, laptop, {}, ports=ports).running() as running:
        assert f"Port {running.port}\n" in (laptop / "ssh_config").read_text()
    said = capfd.readouterr().out
    assert "boot 1 of 3: sshd has ended" in said
    assert "Address already in use" in said
