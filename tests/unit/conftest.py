"""Fixtures of the unit tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpujobs.injob.job import _SIGNALS

from .support import SLURM


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restore the handlers that a supervisor replaces: processes of later tests inherit some."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the site file s.yaml, and an empty home directory."""
    (tmp_path / "s.yaml").write_text(SLURM)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path
