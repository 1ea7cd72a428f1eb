"""A cluster that has ended costs `status` its record only, which has the last word of its folder."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpujobs.batch import receive
from gpujobs.cli.main import main
from gpujobs.clusters import cleanup, lastword
from gpujobs.clusters import clusterfolder as folders
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Ledger, Submission
from gpujobs.errors import GpujobsError

from ..support.events import write_events
from ..support.filecalls import file_calls
from ..support.transcripts import SQUEUE_HEADER

START = 1795421662.0


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A ledger beside a Slurm that lists no job."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("squeue", SQUEUE_HEADER), ("sacct", "")):
        (commands / name).write_text(f"#!/bin/sh\nprintf '%s' '{text}'\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return Ledger()


def of_job(event: str, **values: Any) -> dict[str, Any]:
    return {"event": event, "run": "1-n1-9", "node": "n1", "at": START + 90, **values}


def add(ledger: Ledger, number: int, *, code: int = 0, connected: int = 0) -> ClusterRecord:
    """Add a cluster of two jobs that has ended with a code, as its files say."""
    name = f"svd-{number:04x}"
    path = ledger.folder.parent / "root" / name
    for folder in (path / "jobs", path / "logs", path / "scripts", path / "head-1"):
        folder.mkdir(mode=0o700, parents=True)
    for folder in (path, path.parent):
        folder.chmod(0o700)
    receive.mark(path)
    lines: list[Any] = [{"event": "opened", "address": "tls://h:1", "dashboard": 8787}]
    for job in range(2):
        worker, gpu = f"{name}-{job}", {"uuid": f"GPU-{job}", "node": "n1", "model": "A100"}
        row = {"address": "tls://h:2", "threads": 1, "gpu": gpu, "memory": 2**30}
        lines.append({"event": "connected", "at": START + 9, "worker": worker, "row": row})
        if job >= connected:
            lines.append({"event": "disconnected", "at": START + 80, "worker": worker})
        (path / f"jobs/{job}.claim").write_text(f"{number}[{job}]\n")
        events = [of_job("script", version=1), of_job("started", began=START + 5.5)]
        if code:
            events += [of_job("setup failed", text="false failed"), of_job("failed", reason="x")]
        events.append(of_job("left", code=code))
        text = "".join(f"\n{json.dumps(event)}\n" for event in events)
        (path / f"jobs/{job}.jsonl").write_text(text)
    lines.append({"event": "over memory", "worker": f"{name}-1", "restarts": 2, "limit": 2**30})
    lost = {"work": 3.5}
    lines.append({"event": "left", "at": START, "worker": f"{name}-0", "why": "x", "lost": lost})
    write_events(path, *lines)
    (path / "head-1/owner").write_text('{"job": 0, "node": "n1"}')
    (path / "jobs/0.note").write_text("run: has had no client\n")
    (path / "transport.json").write_text('{"scheme": "tls", "reason": "ucxx does not work"}')
    kind = "failed" if code else "done"
    end = {"kind": kind, "exit_code": code, "reason": "why", "job": 0, "time": START + 91}
    (path / "ended").write_text(json.dumps(end))
    record = ClusterRecord(
        id=name,
        site="here",
        scheduler="slurm",
        folder=str(path),
        created=START,
        groups=(GroupRecord("", workers=2, workers_per_job=1, gpus_per_job=1, walltime=600),),
        run=(),
        encrypted=True,
        submissions=(Submission(str(number), 0, 2, array=True, time=START),),
        unlisted={"0": START, "1": START},
    )
    ledger.add(record)
    return record


def shown(*arguments: str) -> str:
    """Return what `status` prints."""
    result = CliRunner().invoke(main, ["status", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_two_hundred_ended_clusters_cost_one_open_each(ledger: Ledger) -> None:
    for number in range(1, 201):
        add(ledger, number)
    first = shown("--all")
    assert len(first.splitlines()) == 201
    calls = file_calls(lambda: shown("--all"))
    assert shown("--all") == first
    assert 200 <= len(calls) <= 250


@pytest.mark.parametrize(("code", "connected"), [(0, 0), (1, 0), (143, 2)])
def test_the_last_word_is_what_the_folder_said(ledger: Ledger, code: int, connected: int) -> None:
    record = add(ledger, 1, code=code, connected=connected)
    before = [shown("--all"), shown(record.id), shown("--all", "--json")]
    ledger.update(record.id, finished=False, outcomes={}, reasons={}, last=None)
    read = [shown("--all", "--json"), shown("--all"), shown(record.id)]
    told = ledger.get(record.id)
    assert told.finished and told.last and len(told.last.jobs) == 2
    assert read == [before[2], before[0], before[1]]
    jobs = json.loads(read[0])["clusters"][0]["jobs"]
    assert [len(job["connected"]) for job in jobs] == [1 if connected else 0] * 2
    for name in ("jobs/0.jsonl", "jobs/1.jsonl", "workers-1.jsonl", "ended"):
        (record.path / name).unlink()
    assert [shown("--all", "--json"), shown("--all")] == read[:2]
    assert shown(record.id) != read[2]  # one that is named is shown as its folder is now


def test_a_folder_that_is_damaged_later_is_named_once_a_look_at_the_cluster_has_found_it(
    ledger: Ledger,
) -> None:
    """`status --all` opens no file of an ended cluster; from then on it reads this one's again."""
    record = add(ledger, 1)
    shown("--all")
    file = record.path / "jobs" / "1.jsonl"
    before = file.read_text()
    file.write_text(before + "{\n")
    assert "damaged" in shown(record.id)
    assert "damaged" in shown("--all") and "damaged" in shown("--all")
    file.write_text(before)
    assert "damaged" not in shown("--all")
    assert ledger.get(record.id).last


def test_a_cluster_whose_folder_is_removed_is_judged_without_its_last_word(ledger: Ledger) -> None:
    record = add(ledger, 1)
    shown("--all")
    assert ledger.get(record.id).last
    folders.remove(record.path)
    assert "its folder was removed" in shown(record.id)
    assert record.id not in shown("--all")
    assert ledger.all() == []


def test_a_record_of_an_earlier_gpujobs_gets_the_last_word_at_the_next_look(ledger: Ledger) -> None:
    record = add(ledger, 1)
    before = shown("--all")
    path = ledger.folder / f"{record.id}.json"
    value = json.loads(path.read_text())
    del value["last"]
    path.write_text(json.dumps(value))
    assert ledger.get(record.id).last is None
    assert shown("--all") == before
    assert ledger.get(record.id).last


@pytest.mark.parametrize("why", ["a job has not left", "damaged", "large"])
def test_a_folder_that_may_say_more_is_read_again(
    ledger: Ledger, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = add(ledger, 1)
    file = record.path / "jobs" / "1.jsonl"
    if why == "large":
        monkeypatch.setattr(lastword, "MOST_BYTES", 100)
    elif why == "damaged":
        file.write_text(file.read_text() + "{\n")
    else:
        file.write_text(file.read_text().rpartition("\n{")[0] + "\n")
    shown("--all")
    found = ledger.get(record.id)
    assert found.last is None and (found.finished or why == "a job has not left")


def test_a_cluster_that_is_submitted_again_is_not_judged_by_its_last_word(ledger: Ledger) -> None:
    record = add(ledger, 1)
    shown("--all")
    assert (last := ledger.get(record.id).last)
    (record.path / "ended").unlink()
    again = Submission("", 2, 1, time=time.time())
    ledger.begin_submission(record.id, again)
    ledger.end_submission(record.id, replace(again, id="9"))
    assert last.state().ended and " DONE " not in shown("--all")


@pytest.mark.parametrize("text", ["--me", "7 8", "$(id)"])
def test_a_last_word_cannot_smuggle_an_option_into_the_ids(ledger: Ledger, text: str) -> None:
    record = add(ledger, 1)
    shown("--all")
    path = ledger.folder / f"{record.id}.json"
    value = json.loads(path.read_text())
    value["last"]["jobs"][0]["claim"] = text
    path.write_text(json.dumps(value))
    with pytest.raises(GpujobsError, match="is not the id of a job"):
        ledger.get(record.id)


def test_the_last_word_knows_the_space_of_the_folder(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = add(ledger, 1)
    for number in range(30):
        (record.path / "logs" / f"{number}.log").write_text("x" * 5000)
    shown("--all")
    last = ledger.get(record.id).last
    assert last and last.files == sum(
        len(names) + len(inside) for _, names, inside in os.walk(record.path)
    )
    monkeypatch.setattr(cleanup, "_WALK", 0.0)
    assert cleanup.note(ledger.all(), folders.PresentFolders()) == ""
    monkeypatch.setattr(cleanup, "MANY_FILES", last.files - 1)
    assert "have left more than" in cleanup.note(ledger.all(), folders.PresentFolders())
    monkeypatch.setattr(cleanup, "MANY_FILES", 10**6)
    monkeypatch.setattr(cleanup, "MUCH_SPACE", last.size - 1)
    assert "have left more than 1GiB" in cleanup.note(ledger.all(), folders.PresentFolders())
