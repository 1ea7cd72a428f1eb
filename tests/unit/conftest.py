"""Fixtures of the unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support import SLURM


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the site file s.yaml, and an empty home directory."""
    (tmp_path / "s.yaml").write_text(SLURM)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path
