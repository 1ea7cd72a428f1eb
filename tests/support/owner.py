"""Fixtures of tests in which this process, or a process of the test, owns a cluster on the real Slurm."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpujobs

from .backend import SlurmBackend
from .cli import text_of, with_stub
from .processes import patience


@pytest.fixture
def backend(slurm_backend: SlurmBackend) -> Iterator[SlurmBackend]:
    yield slurm_backend
    try:
        slurm_backend.wait_empty(20)  # nothing is left after close()
    finally:
        slurm_backend.clean()


@pytest.fixture
def site(
    backend: SlurmBackend,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Callable[..., str]:
    """Return a function that writes a site file, changed as asked; its commands count how often they are called.

    With the mark ``stub``, jobs import the stub of dask instead of dask.
    """
    usual = backend.site()
    if request.node.get_closest_marker("stub"):
        usual = with_stub(usual)
    for name, value in {**backend.env(), "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    commands = {}
    for name in ("sbatch", "squeue", "scancel"):
        real = backend.slurm.command("which", name).strip()
        wrapper = home / name
        wrapper.write_text(f'#!/bin/sh\necho "{name} $*" >> {home}/calls\nexec {real} "$@"\n')
        wrapper.chmod(0o755)
        commands[name] = str(wrapper)

    def write(**changes: Any) -> str:
        path = home / "here.yaml"
        path.write_text(text_of(usual | {"commands": commands} | changes))
        return str(path)

    return write


@pytest.fixture
def make(site: Callable[..., str]) -> Iterator[Callable[..., Any]]:
    """Return a function that makes clusters, which are closed at the end; ``changes``: of the site."""
    made: list[Any] = []

    def cluster(
        scale: int | None = None, changes: dict[str, Any] | None = None, **keywords: Any
    ) -> Any:
        keywords = {
            "worker_memory": "1GiB",
            "quiet": True,
            "scheduler_options": {"dashboard_address": ":0"},
            **keywords,
        }
        found = gpujobs.GPUSLURMCluster(site(**(changes or {})), **keywords)
        made.append(found)
        if scale is not None:
            found.scale(scale)
        return found

    yield cluster
    for found in made:
        found.close()


def calls(home: Path, name: str) -> int:
    path = home / "calls"
    return len(re.findall(rf"^{name} ", path.read_text(), re.M)) if path.exists() else 0


SCRIPT = """
import sys, time, gpujobs
if __name__ == "__main__":
    cluster = gpujobs.GPUSLURMCluster({site!r}, quiet=True, scheduler_options={options!r}, worker_memory="1GiB", **{keywords!r})
    cluster.scale({n})
    if {wait}:
        cluster.wait_for_workers({wait}, timeout={patience})
    print(cluster.id, flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def client_process(
    home: Path, site: str, n: int, wait: int, **keywords: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    options = {} if keywords.get("scheduler") == "job" else {"dashboard_address": ":0"}
    script = home / "client.py"
    script.write_text(
        SCRIPT.format(
            site=site, n=n, wait=wait, keywords=keywords, options=options, patience=patience(60)
        )
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout
    try:
        yield process, process.stdout.readline().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
