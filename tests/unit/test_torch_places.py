"""The workers that `run_ddp` finds."""

from __future__ import annotations

import re
import sys

import dask
import pytest
from distributed import Client

from gpujobs.injob import workers

from ..support.cli import ROOT

sys.path.append(str(ROOT / "examples" / "ddp"))
import ranks

pytestmark = pytest.mark.filterwarnings("default")


def test_all_workers_are_found_while_the_client_refreshes_its_information() -> None:
    """`Client.scheduler_info` returns what a periodic callback may have replaced meanwhile."""
    with (
        dask.config.set({"distributed.client.scheduler-info-interval": "1ms"}),
        Client(
            processes=False, n_workers=2, threads_per_worker=1, dashboard_address=":0"
        ) as client,
    ):
        assert [len(ranks._workers(client)[0]) for _ in range(100)] == [2] * 100
        assert [len(workers._connected(client)) for _ in range(100)] == [2] * 100


def test_nobody_reads_what_the_client_refreshes() -> None:
    files = [
        file
        for folder in ("gpujobs", "examples", "benchmarks", "tests", "docs")
        for file in (ROOT / folder).rglob("*.*")
        if file.suffix in {".py", ".md", ".ipynb", ".j2"}
    ]
    assert len(files) > 300
    calls = [file for file in files if re.search(r"\.scheduler_info\(", file.read_text())]
    assert not calls
