"""`gpujobs clean`: which folders are removed, and which never."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpujobs.batch import receive
from gpujobs.cli.main import main
from gpujobs.clusters import cleanup
from gpujobs.clusters import clusterfolder as folder
from gpujobs.clusters.cleanup import leftovers
from gpujobs.clusters.clusterfolder import PresentFolders
from gpujobs.clusters.ledger import ClusterRecord, Ledger, Submission
from gpujobs.errors import GpujobsError

from ..support.transcripts import SQUEUE_HEADER
from .report_data import RECORD

OLD = time.time() - 40 * 86400


def left(path: Path, changed: float = OLD, *, ours: bool = True) -> Path:
    """Make a folder with a file, as a command of gpujobs (``ours``), or a user, has left it."""
    (path / "scripts").mkdir(parents=True)
    if ours:
        receive.mark(path)
    for made in (path.parent, path):
        made.chmod(0o700)
    (path / "scripts" / "file").write_bytes(b"x")
    for inner in (path / "scripts" / "file", *path.iterdir(), path):
        os.utime(inner, (changed, changed))
    return path


@pytest.fixture
def add(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ClusterRecord]:
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    root = home / "home" / ".gpujobs"
    root.mkdir(mode=0o700, parents=True)

    def add(name: str, **changes: object) -> ClusterRecord:
        changed = changes.pop("changed", OLD)
        path = root / name
        record = replace(RECORD, id=name, folder=str(path), finished=True, submissions=())
        record = replace(record, **changes)  # type: ignore[arg-type]
        if record.path == path and not path.exists():
            left(path, changed=float(str(changed)))
            (path / "spec.json").write_text("{}")
            os.utime(path / "spec.json", (OLD, OLD))
            os.utime(path, (float(str(changed)),) * 2)
        Ledger().add(record)
        return record

    return add


def names() -> list[str]:
    return [found.path.name for found in leftovers(Ledger())]


def test_only_ended_clusters_are_removed(add: Callable[..., ClusterRecord]) -> None:
    add("a-0000")
    add("b-0000", finished=False)  # runs, or its state is unknown
    add("c-0000")
    add("d-0000", finished=False, after="c-0000")  # which reads the folder of c
    assert names() == ["a-0000"]


def test_nothing_else_is_touched(add: Callable[..., ClusterRecord], home: Path) -> None:
    """A record of another folder, a link, a folder of others, files that are no cluster's."""
    root, precious = home / "home" / ".gpujobs", left(home / "precious")
    add("a-0000", folder=str(precious))
    (root / "b-0000").symlink_to(precious)
    add("b-0000")
    add("c-0000").path.chmod(0o777)
    left(root / "mine", ours=False)
    if os.geteuid() == 0:
        os.chown(add("d-0000").path / "scripts" / "file", 1234, 1234)
    assert names() == []
    logs = add("e-0000").path / "logs"
    logs.symlink_to(precious)
    done = CliRunner().invoke(main, ["clean", "--yes"])
    assert done.exit_code == 0, done.output
    assert "1 folder removed" in done.output and not logs.parent.exists()
    assert (precious / "scripts" / "file").exists() and (root / "mine").exists()
    assert sorted(record.id for record in Ledger().all())[:3] == ["a-0000", "b-0000", "c-0000"]
    assert "e-0000" not in {record.id for record in Ledger().all()}


def test_what_commands_from_a_laptop_have_left_is_removed(
    add: Callable[..., ClusterRecord],
) -> None:
    root = add("a-0000", finished=False).path.parent
    for name in ("sent/0a", "uploads/used-01", "uploads/old-02"):
        left(root / name)
    left(root / "sent" / "new", changed=time.time() - 60)
    (root / "a-0000" / "spec.json").write_text('{"workdir": "/x/uploads/used-01"}')
    assert names() == ["0a", "old-02"]
    (root / "a-0000" / "spec.json").unlink()  # nothing is known of what it uses
    assert names() == []


def test_folders_of_the_user_stay(add: Callable[..., ClusterRecord], home: Path) -> None:
    """In all places in which `clean` looks: without the marker, with a copied or a false one."""
    root, outside = add("a-0000").path.parent, left(home / "outside")
    add("b-0000").path.joinpath(receive.MARKER).unlink()
    mine = []
    for place in ("uploads", "sent", "folders", "."):
        parent = root / place
        for name in ("photos", "linked", "read", "empty"):
            mine.append(left(parent / f"{name}-{place}", ours=False))
        made = left(parent / f"made-{place}")
        mine.append(parent / f"copy-{place}")
        shutil.copytree(made, mine[-1])
        folder.remove(made)
        (mine[-4] / receive.MARKER).symlink_to(outside / receive.MARKER)
        os.mkfifo(mine[-3] / receive.MARKER)
        (mine[-2] / receive.MARKER).touch()
        mine.append(parent / "outside")
        mine[-1].symlink_to(outside)
    assert names() == ["a-0000"]
    done = CliRunner().invoke(main, ["clean", "--yes"])
    assert done.exit_code == 0 and "1 folder removed" in done.output
    for path in (*mine, root / "b-0000"):
        with pytest.raises(GpujobsError, match="gpujobs has not made it"):
            folder.remove(path)
        folder.discard(path)
        assert (path / "scripts" / "file").exists(), path


def test_folders_of_commands_that_were_killed_are_removed(
    add: Callable[..., ClusterRecord],
) -> None:
    """Those from which nothing was submitted; another host may have the record of the others."""
    root = add("a-0000", finished=False).path.parent
    for name in ("b-0000", "doctor-1234", "new-x", "sent/new-y"):
        left(root / name)
        (root / name / "scripts" / "file").unlink()
        os.utime(root / name / "scripts", (OLD, OLD))
    left(root / "c-0000")
    left(root / "d-0000", changed=time.time() - 60)
    (root / "d-0000" / "scripts" / "file").unlink()
    package = left(root / "0.3.0-abcd")
    (package / "scripts").rename(package / "gpujobs")
    assert names() == ["new-y", "b-0000", "doctor-1234", "new-x"]


def test_job_folders_of_a_laptop_are_removed_after_the_end_of_their_cluster(
    add: Callable[..., ClusterRecord],
) -> None:
    """Those whose cluster has ended; the jobs of the others may be in the queue."""
    root = add("a-0000", finished=False).path.parent
    for name, files in (("0a", ("record.json", "ended")), ("0b", ("record.json",)), ("0c", ())):
        left(root / "folders" / name)
        cluster = root / "folders" / name / "jobs" / "b-0000"
        cluster.mkdir(parents=True)
        for file in files:
            (cluster / file).touch()
        for path in (*cluster.iterdir(), cluster, cluster.parent, root / "folders" / name):
            os.utime(path, (OLD, OLD))
    assert names() == ["0a", "0c"]


@pytest.mark.parametrize(
    ("words", "removed"),
    [
        (["--older-than", "30d"], ["old-0000"]),
        (["--larger-than", "1KiB"], ["big-0000", "old-0000"]),
        (["--larger-than", "1MiB"], ["big-0000"]),
        (["--older-than", "30d", "--larger-than", "1MiB"], []),
        ([], ["big-0000", "old-0000"]),
    ],
)
def test_filters_choose_what_is_removed(
    add: Callable[..., ClusterRecord], words: list[str], removed: list[str]
) -> None:
    add("old-0000")
    path = add("big-0000").path / "scripts" / "file"
    path.write_bytes(b"x" * 2**21)
    shown = CliRunner().invoke(main, ["clean", *words])
    assert [word for word in ("big-0000", "old-0000") if word in shown.output] == removed
    assert " 0B " not in shown.output  # the sizes are those that the filter compares
    assert shown.exit_code == (2 if removed else 0)  # there is nobody to ask
    assert len(names()) == 2
    assert CliRunner().invoke(main, ["clean", "--yes", *words]).exit_code == 0
    assert set(names()) == {"big-0000", "old-0000"} - set(removed)


def test_a_cluster_that_was_scaled_meanwhile_stays(add: Callable[..., ClusterRecord]) -> None:
    record = add("a-0000")
    (found,) = leftovers(Ledger())
    Ledger().update(record.id, finished=False)
    with pytest.raises(GpujobsError, match="a-0000 is active"):
        cleanup.remove(found, Ledger())
    assert record.path.exists()


SQUEUE = """#!/bin/sh
echo "$@" >> {folder}/calls
cat {folder}/queue 2> /dev/null || {{ echo "Unable to contact slurm controller" >&2; exit 1; }}
"""


@pytest.fixture
def queue(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The answer of squeue: a file; Slurm is away if it is missing."""
    folder = home / "bin"
    folder.mkdir()
    (folder / "squeue").write_text(SQUEUE.format(folder=folder))
    (folder / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("gpujobs.clusters.monitor.QUERY_TIMEOUT", 0.1)
    (folder / "queue").write_text(SQUEUE_HEADER)
    return folder / "queue"


def lost(**changes: object) -> dict[str, object]:
    """Changes of the record of a cluster that is finished because nothing listed its jobs."""
    outcomes = {str(number): "FAILED" for number in range(3)}
    return {"submissions": RECORD.submissions, "outcomes": outcomes, **changes}


def test_a_cluster_whose_jobs_are_in_the_queue_after_all_stays_and_is_active(
    add: Callable[..., ClusterRecord], queue: Path
) -> None:
    """It is finished because of answers that did not list its jobs."""
    for name, id_ in (("a-0000", "71"), ("b-0000", "81"), ("c-0000", "91")):
        add(name, **lost(submissions=(Submission(id_, 0, 1),)))
    row = "71|N/A|RUNNING|n1|N/A|None|a-0000\n81|N/A|COMPLETED|n1|N/A|None|b-0000\n"
    queue.write_text(SQUEUE_HEADER + row)
    done = CliRunner().invoke(main, ["clean", "--yes"])
    assert done.exit_code == 0, done.output
    assert "a-0000 stays: its jobs are in the queue" in done.output
    assert "2 folders removed" in done.output
    (record,) = Ledger().all()
    assert record.id == "a-0000" and record.path.exists() and not record.finished
    assert len((queue.parent / "calls").read_text().splitlines()) == 1


def test_without_an_answer_only_clusters_whose_jobs_have_written_their_end_are_removed(
    add: Callable[..., ClusterRecord], queue: Path
) -> None:
    queue.unlink()
    add("a-0000", **lost())
    jobs = add("b-0000", **lost()).path / "jobs"
    jobs.mkdir()
    for number in range(3):
        (jobs / f"{number}.json").write_text('{"exit_code": 0, "host": "n1"}')
    done = CliRunner().invoke(main, ["clean", "--yes"])
    assert done.exit_code == 0, done.output
    assert "a-0000 stays: it is not known whether its jobs have ended" in done.output
    assert "1 folder removed" in done.output
    (record,) = Ledger().all()
    assert record.id == "a-0000" and record.path.exists() and record.finished


def test_status_mentions_large_folders(
    add: Callable[..., ClusterRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = add("a-0000")
    assert cleanup.note(Ledger().all(), PresentFolders()) == ""
    for number in range(cleanup.MANY_FILES + 1):
        (record.path / f"{number}").touch()
    monkeypatch.setattr(cleanup, "_WALK", 30.0)  # this machine may be busy
    note = "ended clusters have left more than 10000 files: see `gpujobs clean`"
    assert note in CliRunner().invoke(main, ["status"]).output
    assert note not in CliRunner().invoke(main, ["status", "--json"]).output
    monkeypatch.setattr(cleanup, "_WALK", 0.0)
    assert cleanup.note(Ledger().all(), PresentFolders()) == ""


def test_as_many_files_as_are_allowed_are_not_mentioned(
    add: Callable[..., ClusterRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = add("a-0000")
    monkeypatch.setattr(cleanup, "_WALK", 30.0)  # this machine may be busy
    present = sum(1 for _ in record.path.rglob("*"))
    monkeypatch.setattr(cleanup, "MANY_FILES", present + 2)
    for number in range(2):
        (record.path / f"{number}").touch()
    assert cleanup.note(Ledger().all(), PresentFolders()) == ""
    (record.path / "2").touch()
    assert "have left more than" in cleanup.note(Ledger().all(), PresentFolders())
