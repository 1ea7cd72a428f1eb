"""`after` of a profile: clusters that wait for others."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpujobs.cli.main import main
from gpujobs.clusters.folderstate import read_state
from gpujobs.clusters.judge import judge
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Ledger, Submission
from gpujobs.clusters.submit import find_predecessor
from gpujobs.errors import InputError, NoSuchClusterError
from gpujobs.injob.folder import Ended, EndKind, Folder
from gpujobs.injob.options import SuperviseOptions
from gpujobs.injob.supervise import supervise

from ..support.transcripts import SQUEUE_HEADER
from .support import error_of, made_plan, make_spec


@pytest.fixture
def ledger(home: Path) -> Ledger:
    found = Ledger()
    found.add(record(home, "other-0001"))
    return found


def record(home: Path, name: str) -> ClusterRecord:
    folder = home / name
    (folder / "jobs").mkdir(parents=True)
    squeue = folder / "squeue"
    squeue.write_text(f"#!/bin/sh\nprintf '%s' '{SQUEUE_HEADER}'\n")  # no jobs
    squeue.chmod(0o755)
    return ClusterRecord(
        id=name,
        site="s",
        scheduler="slurm",
        folder=str(folder),
        created=time.time(),
        groups=(GroupRecord("", 1, 1, 1),),
        run=("ls",),
        encrypted=True,
        attempts=2,
        commands={"squeue": str(squeue), "sacct": "/bin/true"},
        submissions=tuple(Submission(str(n + 5), n, 1, attempt=n // 2 + 1) for n in range(4)),
    )


def end(home: Path, kind: EndKind, code: int) -> None:
    (home / "other-0001" / "ended").write_text(Ended(kind, code, "it said so").json())


def submissions(home: Path, ledger: Ledger, after: str) -> list[str] | None:
    spec = make_spec(home, f"gpus: 1\nafter: {after}\n", str(home / "s.yaml"))
    new = replace(record(home, f"new-{time.monotonic_ns()}"), submissions=())
    found = find_predecessor(spec, new, ledger)
    return found and found.submissions


def test_the_last_attempt_is_waited_for(home: Path, ledger: Ledger) -> None:
    assert submissions(home, ledger, "other-0001") == ["7", "8"]
    assert submissions(home, ledger, "other-0001:ok") == ["7", "8"]


def test_after_a_cluster_that_has_ended_nothing_waits(home: Path, ledger: Ledger) -> None:
    end(home, EndKind.DONE, 0)
    assert submissions(home, ledger, "other-0001") is None
    end(home, EndKind.FAILED, 3)
    assert submissions(home, ledger, "other-0001:any") is None
    with pytest.raises(InputError) as caught:
        submissions(home, ledger, "other-0001")
    text = str(caught.value)
    assert "svd.yaml:2:8: `after`: other-0001 is FAILED: it said so" in text
    assert "hint: after: other-0001:any" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"owner": "client"}, "is owned by a Python process"),
        ({"scheduler": "lsf"}, "which has another batch scheduler"),
    ],
)
def test_clusters_that_cannot_be_waited_for_are_refused(
    home: Path, ledger: Ledger, changes: dict[str, object], message: str
) -> None:
    ledger.update("other-0001", **changes)
    with pytest.raises(InputError, match=message):
        submissions(home, ledger, "other-0001")


def test_a_cluster_that_is_being_submitted_cannot_be_waited_for(home: Path, ledger: Ledger) -> None:
    ledger.update("other-0001", submissions=(), intent=Submission("", 0, 1, time=time.time()))
    with pytest.raises(InputError, match="is being submitted"):
        submissions(home, ledger, "other-0001")


def test_unknown_clusters_and_bad_values_are_refused(home: Path, ledger: Ledger) -> None:
    with pytest.raises(NoSuchClusterError):
        submissions(home, ledger, "other-0002")
    for text in ("other-0001:notok", "a b", "../x"):
        assert "must be the id of a cluster, ID:ok or ID:any" in error_of(
            home, f"gpus: 1\nafter: {text}\n"
        )
    assert made_plan(home, "gpus: 1\nafter: other-0001:any\n").profile.after is not None


@pytest.mark.parametrize(
    ("ended", "any_end", "failed"),
    [
        (Ended(EndKind.DONE, 0), False, ""),
        (Ended(EndKind.FAILED, 3, "no memory"), False, "has failed: no memory"),
        (Ended(EndKind.FAILED, 3, "no memory"), True, ""),
        (None, False, "it has not written how it ended"),
        (None, True, ""),
    ],
)
def test_the_first_job_checks_it(
    tmp_path: Path, ended: Ended | None, any_end: bool, failed: str
) -> None:
    other, own = tmp_path / "other-0001", tmp_path / "own-0001"
    for folder in (other, own / "jobs", own / "logs"):
        folder.mkdir(parents=True)
    if ended:
        (other / "ended").write_text(ended.json())
    value = {"cluster": "other-0001", "folder": str(other), "any_end": any_end}
    (own / "after").write_text(json.dumps(value))
    assert read_state(own).waits_for == ("" if ended else "other-0001")
    options = SuperviseOptions(
        folder=str(own), job=0, started=time.time(), scheduler=("false",), interface="none"
    )
    supervise(options)
    reason = Folder(str(own)).read("ended")["reason"]
    assert failed in reason
    assert ("has no interface none" in reason) is not bool(failed)  # it has begun its work


def test_status_says_which_cluster_is_waited_for(home: Path) -> None:
    own = record(home, "own-0001")
    value = {"cluster": "other-0001", "folder": str(home / "other"), "any_end": False}
    (home / "own-0001" / "after").write_text(json.dumps(value))
    found = judge(own, read_state(own.path), {}, now=time.time())
    assert (found.state.value, found.reason) == ("PENDING", "waits for other-0001")
    (home / "other").mkdir()
    (home / "other" / "ended").write_text(Ended(EndKind.DONE, 0).json())
    assert not judge(own, read_state(own.path), {}, now=time.time()).reason


def test_the_option_has_its_own_place(home: Path) -> None:
    (home / "p.yaml").write_text("gpus: 1\nafter: other-0001\n")
    done = CliRunner().invoke(main, ["submit", "p.yaml", "--site", "s.yaml", "--after", "a b"])
    assert "error: --after a b: `after`: 'a b' must be the id of a cluster" in done.output
    assert "--set" not in done.output and done.exit_code == 2
