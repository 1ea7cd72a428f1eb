"""Faults of a private Slurm: a node that fails with all that runs on it, a controller that is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .processes import processes_with, stop, until
from .slurm import PID_NAMESPACE, PrivateSlurm


def fail_node(slurm: PrivateSlurm, node: str, *, noticed: bool = True) -> None:
    """End all processes of a node at once, as a power failure does.

    ``noticed``: Slurm then knows that it is down; else it waits for its SlurmdTimeout.
    """
    daemon = slurm.daemons[f"slurmd-{node}"]
    daemon.kill()
    daemon.wait()
    found = processes_of(slurm, node)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them sees the end of another one
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    if noticed:
        slurm.command("scontrol", "update", f"nodename={node}", "state=down", "reason=failed")


def restore_node(slurm: PrivateSlurm, node: str) -> None:
    """Boot a node that has failed."""
    slurm.start_node(node)
    slurm.command("scontrol", "update", f"nodename={node}", "state=resume")


@contextlib.contextmanager
def failed_node(slurm: PrivateSlurm, node: str, *, noticed: bool = True) -> Iterator[None]:
    """While this is open, a node is down (see `fail_node`)."""
    fail_node(slurm, node, noticed=noticed)
    try:
        yield
    finally:
        restore_node(slurm, node)
        until(slurm.ready, 60, f"{node} after its failure")


@contextlib.contextmanager
def node_without_launch(slurm: PrivateSlurm, node: str) -> Iterator[None]:
    """While this is open, a node accepts jobs and cannot launch them: its slurmd has lost a plugin.

    Slurm drains the node at the first job, and calls that COMPLETED with exit code 0:0. A step that fails so early may
    signal every process that it sees, as root: the node has a namespace of its own.
    """
    if subprocess.run([*PID_NAMESPACE, "true"], check=False).returncode:
        pytest.skip("no namespaces of processes here")
    library = next(Path("/usr").glob("**/task_none.so")).parent
    own = slurm.folder / f"own-{node}"
    shutil.copytree(library, own / "plugins")
    for path in slurm.folder.glob("*.conf"):
        shutil.copy(path, own)
    with (own / "slurm.conf").open("a") as file:
        file.write(f"PluginDir={own}/plugins\n")
    stop(slurm.daemons[f"slurmd-{node}"])
    pid = slurm.folder / "run" / f"slurmd-{node}.pid"
    pid.unlink(missing_ok=True)
    slurm.start_node(node, "-f", str(own / "slurm.conf"), isolated=True)
    until(pid.exists, 20, node)
    until(slurm.ready, 60, node)
    (own / "plugins" / "task_none.so").unlink()
    try:
        yield
    finally:
        slurm.daemons[f"slurmd-{node}"].kill()
        slurm.daemons[f"slurmd-{node}"].wait()
        shutil.rmtree(own)
        restore_node(slurm, node)
        until(slurm.ready, 60, f"{node} with its plugins")


@contextlib.contextmanager
def failing_prolog(slurm: PrivateSlurm) -> Iterator[None]:
    """While this is open, no node can start a job: Slurm holds each, "launch failed requeued held"."""
    prolog, before = slurm.folder / "prolog.sh", slurm.conf.read_text()
    prolog.write_text("#!/bin/sh\nexit 1\n")
    prolog.chmod(0o755)
    slurm.conf.write_text(f"{before}Prolog={prolog}\n")
    slurm.command("scontrol", "reconfigure")
    try:
        yield
    finally:
        slurm.conf.write_text(before)
        slurm.command("scontrol", "reconfigure")
        nodes = ",".join(f"node{n + 1}" for n in range(slurm.nodes))
        slurm.command("scontrol", "update", f"nodename={nodes}", "state=resume")
        until(slurm.ready, 60, "nodes with a prolog that works")


def restart_controller(slurm: PrivateSlurm) -> None:
    """Kill slurmctld, and start it again from the state that it has saved."""
    daemon = slurm.daemons["slurmctld"]
    daemon.kill()
    daemon.wait()
    slurm.start_controller()


def processes_of(slurm: PrivateSlurm, node: str) -> list[int]:
    """Return the processes of the jobs on a node, and Slurm's own one of each step."""
    own = set(processes_with(f"SLURM_CONF={slurm.conf}"))
    found = own.intersection(processes_with(f"SLURMD_NODENAME={node}\0"))
    for pid in list(found):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(p.pid for p in psutil.Process(pid).parents() if p.name() == "slurmstepd")
    return sorted(found)
