"""The benchmark of a start finds the moments of gpujobs and of dask's own commands."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ..support.cli import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_each_way_to_start_has_its_moments() -> None:
    argv = [sys.executable, ROOT / "benchmarks" / "start.py", "--rounds=1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    # Not the exit code: the ratio may be above the aim on a busy machine.
    assert re.search(r"^ratio \d+\.\d\d ", done.stdout, re.M), done.stderr
    ours, by_hand = re.split(r"^dask scheduler and .*$", done.stdout, flags=re.M)
    moments = re.findall(r"^  (\S.*\S) +-?\d+ ms$", ours, re.M)
    assert set(moments) == {
        "gpujobs submit begins",
        "the script begins",
        "the supervisor is started",
        "the process of the dask scheduler is started",
        "the process of the nannies is started",
        "the head is elected",
        "the dask scheduler listens",
        "the worker is forked",
        "the worker is registered",
    }
    assert "the worker is registered" in by_hand
