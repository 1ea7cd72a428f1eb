"""A file system that is nearly full: `plan`, `submit` and `doctor` say so."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpujobs.clusters.folder import space_problems
from gpujobs.clusters.submit import make_cluster_plan
from gpujobs.doctor.checks import CheckState
from gpujobs.doctor.job import _check_directory

from .support import make_spec


@dataclass(frozen=True)
class Disk:
    """What os.statvfs returns."""

    f_bavail: int
    f_files: int
    f_favail: int
    f_frsize: int = 4096


@pytest.mark.parametrize(
    ("disk", "problem"),
    [
        (Disk(2**18, 10**6, 10**4), ""),
        (Disk(2**18, 0, 0), ""),  # it counts no inodes
        (Disk(2**17, 10**6, 10**4), "has only 512MiB free"),
        (Disk(2**18, 10**6, 9999), "has room for only 9999 more files"),
    ],
)
def test_a_disk_that_is_nearly_full(
    home: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, problem: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    expected = [f"{home} {problem}"] if problem else []
    assert list(space_problems(home / "not" / "there")) == expected
    notes = make_cluster_plan(make_spec(home, {"gpus": 1}, str(home / "s.yaml"))).notes
    assert any(note == f"warning: {home} {problem}" for note in notes) == bool(problem)
    check = _check_directory("~/.gpujobs")
    assert check.state == (CheckState.WARNING if problem else CheckState.OK)
    assert problem in check.result
