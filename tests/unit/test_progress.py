"""The progress of a call in Python: on a terminal, in a notebook, and nowhere else."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from gpujobs.clusters.progress import LibraryProgress


def shown(progress: LibraryProgress) -> None:
    progress.show("0/2 workers, 2 PENDING", "00:01")
    progress.show("0/2 workers, 2 PENDING", "00:02")
    progress.show("1/2 workers", "00:03")
    progress.clear()


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]


def test_a_script_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    shown(LibraryProgress(quiet=False))
    assert capsys.readouterr() == ("", "")


def test_a_notebook_shows_one_line(notebook: None, capsys: pytest.CaptureFixture[str]) -> None:
    shown(LibraryProgress(quiet=False))
    out, err = capsys.readouterr()
    assert out.split("\r") == ["", "0/2 workers, 2 PENDING", "1/2 workers           \n"] and not err


def test_a_terminal_is_rewritten_and_cleared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown(LibraryProgress(quiet=False))
    out, err = capsys.readouterr()
    assert err.count("\r\033[K") == 4 and err.endswith("\r\033[K") and not out


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_progress_prints_nothing(
    notebook: None,
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    shown(LibraryProgress(quiet=True))
    assert capsys.readouterr() == ("", "")
