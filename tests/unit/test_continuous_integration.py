"""Continuous integration skips no test because a batch scheduler, program or library is missing."""

from __future__ import annotations

import re

import pytest

from ..support.cli import ROOT

CI = ROOT / ".ci" / "run"


def needed() -> set[str]:
    """Return what the tests skip without."""
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    return {
        name
        for text in [*texts, (ROOT / "tests" / "conftest.py").read_text()]
        for name in re.findall(r'(?:need_library|unavailable)\(\s*"(\w+)"', text)
    }


@pytest.mark.skipif(not CI.exists(), reason="the sdist does not have it")
def test_it_requires_everything_that_tests_need() -> None:
    lists = re.findall(r"GPUJOBS_REQUIRE\+?=(\S+)", CI.read_text())
    assert {"slurm", "torch", "xgboost"} <= needed() <= set(",".join(lists).split(","))


def test_contributing_lists_what_tests_need() -> None:
    assert needed() <= set(re.findall(r"\w+", (ROOT / "CONTRIBUTING.md").read_text()))
