"""`gpujobs logs`: its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpujobs.cli.main import main
from gpujobs.clusters import clusterfolder as folders
from gpujobs.clusters.ledger import Ledger

from .report_data import RECORD


@pytest.mark.parametrize("finished", [False, True])
def test_without_follow_logs_end_at_once(
    finished: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    path = home / "home" / ".gpujobs" / "svd-0001"
    (path / "logs").mkdir(parents=True)
    for folder in (path, path.parent):
        folder.chmod(0o700)
    (path / "logs" / "run.log").write_text("one\ntwo")
    record = replace(RECORD, id="svd-0001", folder=str(path), run=("a",), finished=finished)
    Ledger().add(record)
    done = CliRunner().invoke(main, ["logs", "svd-0001"])
    assert (done.exit_code, done.stdout) == (0, "one\ntwo\n")


def test_logs_in_another_folder_are_private_and_the_clusters_folder_leads_there(home: Path) -> None:
    path = home / "clusters" / "svd-0001"
    folders.make(path, encrypted=False, logs=home / "scratch" / "logs")
    logs = home / "scratch" / "logs" / "svd-0001"
    assert (path / "logs").resolve() == logs.resolve()
    assert logs.is_dir() and logs.stat().st_mode & 0o777 == 0o700
