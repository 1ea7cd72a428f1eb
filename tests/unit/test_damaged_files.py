"""Damaged files of clusters: each is named in one line, and all other clusters are shown."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpujobs.batch.process import System
from gpujobs.cli.main import main
from gpujobs.cli.status import status_json, status_table, status_text
from gpujobs.cli.usage_text import page, usage_json, usage_text
from gpujobs.clusters.history import read_history, with_samples
from gpujobs.clusters.ledger import Ledger
from gpujobs.clusters.monitor import ClusterMonitor, with_log
from gpujobs.clusters.notebook import Card, card_html
from gpujobs.clusters.prepare import scripts_of
from gpujobs.clusters.scale import cancel
from gpujobs.clusters.usage import make_usage
from gpujobs.config.spec import read_spec, write_spec
from gpujobs.deploy import GPUJobQueueCluster
from gpujobs.errors import GpujobsError, InputError
from gpujobs.injob.events import events_file
from gpujobs.planning.plan import make_plan
from gpujobs.schedulers import CommandResult

from ..conftest import slow_variant
from ..support.transcripts import SQUEUE_HEADER
from .support import MACHINE, make_spec

NOW = 1795421700.0
GPU = {
    "node": "vm",
    "uuid": "GPU-0",
    "model": "Fake GPU",
    "memory": 17179869184,
    "fast": ["NVLink"],
    "others": [{"node": "vm", "uuid": "GPU-1", "model": "Fake GPU", "memory": 17179869184}],
    "sharing": 1,
}
ROW = {"address": "tls://127.0.0.1:36083", "threads": 1, "gpu": GPU, "memory": 524288000}
OLD: dict[str, Any] = {
    "workers.json": {
        "version": 1,
        "time": 1795421696.97,
        "workers": {"p-2cab-0": ROW},
        "seen": ["p-2cab-0", "p-2cab-1"],
        "gone": {"p-2cab-1": 1795421690.25},
        "over_memory": {"p-2cab-0": {"restarts": 2, "limit": 524288000, "paused": 52428800}},
        "ends_at": 1795421999.0,
        "ends_by": "idle",
    },
    "scheduler.json": {
        "type": "Scheduler",
        "id": "Scheduler-5c0b",
        "address": "tls://127.0.0.1:36085",
        "services": {"dashboard": 8787},
        "started": 1795421662.3,
        "workers": {},
    },
    "head/owner": {"job": 0, "node": "vm", "time": 1795421663.66},
    "jobs/0.started": {"node": "vm", "started": 1795421662.0, "pid": 29963, "job_id": "7"},
    "jobs/1.started": {"node": "vm", "started": 1795421662.0, "pid": 29964, "job_id": "7"},
    "jobs/1.json": {"exit_code": 0, "host": "vm", "started": 1795421662, "ended": 1795421700},
    "jobs/3.lost": {"node": "vm", "reason": "its node is lost", "exit_code": 1},
}
"""The files of a cluster of gpujobs 0.2.0 that later ones have replaced."""
OLD_TEXTS = {
    "jobs/1.reason": "it failed\n",
    "jobs/1.setup": "false failed (exit code 1)\n",
}
OLD_LINES = [
    {"time": 1795421674.25, "event": "connected", "worker": "p-2cab-0", "gpus": ["GPU-0", "GPU-1"]},
    {"time": 1795421674.25, "event": "connected", "worker": "p-2cab-1", "gpus": ["GPU-0", "GPU-1"]},
    {"time": 1795421690.25, "event": "disconnected", "worker": "p-2cab-1", "gpus": []},
]
FILES: dict[str, Any] = {
    "transport.json": {
        "scheme": "tls",
        "reason": "ucxx does not work",
        "measured": {"ucxx": {"within": 90.5, "between": None, "problem": ""}},
        "environ": {"UCX_TLS": "^sm"},
        "remark": "jobs are isolated",
    },
    "ended": {"kind": "failed", "exit_code": 3, "reason": "run: ended", "job": 0, "time": NOW},
    "head-1/owner": {"job": 0, "node": "vm", "time": 1795421663.66},
    "after": {"cluster": "svd-7f3a", "folder": "/nosuch/svd-7f3a", "any_end": False},
    "rank-error": {"exit_code": 1, "reason": "rank 3"},
}
"""The files of a real cluster of two jobs, with all keys; those of the lines are `LINES`."""
OF_JOBS = ("jobs/0.jsonl", "jobs/1.jsonl", "jobs/1-vm.jsonl")
JSON_FILES = FILES.keys() - {"rank-error"}
"""Those that this side reads."""
EVENTS = events_file(1)


def of_job(event: str, *, at: float = 1795421662, **values: Any) -> dict[str, Any]:
    """Return a line of a job, or of its node."""
    return {"event": event, "run": "1795421662-vm-29000", "node": "vm", "at": at, **values}


LINES: dict[str, list[Any]] = {
    EVENTS: [
        {
            "event": "opened",
            "at": 1795421673.5,
            "version": 1,
            "address": "tls://127.0.0.1:36085",
            "dashboard": 8787,
        },
        {"event": "connected", "at": 1795421674.25, "worker": "p-2cab-0", "row": ROW},
        {"event": "connected", "at": 1795421674.25, "worker": "p-2cab-1", "row": ROW},
        {"event": "disconnected", "at": 1795421690.25, "worker": "p-2cab-1"},
        {
            "event": "over memory",
            "at": 1795421690.25,
            "worker": "p-2cab-0",
            "restarts": 2,
            "limit": 524288000,
            "paused": 52428800,
        },
        {"event": "client", "at": 1795421691.0, "clients": 1},
        {"event": "idle", "at": 1795421692.0, "ends_at": 1795421999.0, "by": "idle"},
        {"event": "idle", "at": 1795421693.0, "reason": "no tasks"},
        {"event": "draining", "at": 1795421680.25, "worker": "p-2cab-1", "why": "the walltime"},
        {
            "event": "left",
            "at": 1795421690.25,
            "worker": "p-2cab-1",
            "why": "the walltime",
            "seconds": 10.0,
            "lost": {"work": 3.5},
        },
    ],
    "jobs/0.jsonl": [of_job("script", version=1), of_job("started", began=1795421662.0, pid=29963)],
    "jobs/1.jsonl": [
        of_job("script", version=1),
        of_job("setup failed", text="false failed (exit code 1)"),
        of_job("started", began=1795421662.0, pid=29964),
        of_job("signalled"),
        of_job("failed", reason="it failed"),
        of_job("left", at=1795421700, code=0),
    ],
    "jobs/1-vm.jsonl": [of_job("node lost", number=3, reason="its node is lost", code=1)],
    "usage/0-vm.jsonl": [
        {"gpus": [{"uuid": "GPU-0", "memory": 17179869184}], "time": 1795421666.5},
        {"time": 1795421687.5, "seconds": 1.0, "busy": [35], "used": [1024], "energy": [700.5]},
    ],
    "usage/1-vm.jsonl": [{"error": "no driver", "time": 1795421666.5}],
}
TEXTS = {
    "jobs/0.claim": "7[0]\n",
    "jobs/1.note": "run: has had no client\n",
    "logs/run.log": "a line\n",
    "logs/job-1.log": "a line\n",
    "job-ids": "7\n",
}
RECORD: dict[str, Any] = {
    "id": "p-2cab",
    "site": "local",
    "scheduler": "slurm",
    "created": 1795421662.31,
    "groups": [
        {
            "name": "fit",
            "workers": 2,
            "workers_per_job": 1,
            "gpus_per_job": 2,
            "queue": "gpu",
            "walltime": 3600,
            "error": "refused",
        }
    ],
    "run": ["python", "p.py"],
    "encrypted": True,
    "poll": 5,
    "multi_cluster": None,
    "commands": {"squeue": "squeue"},
    "layout": "workers",
    "ranks": 0,
    "owner": "cluster",
    "after": "svd-7f3a",
    "attempts": 2,
    "submissions": [
        {
            "id": "7",
            "first": 0,
            "count": 2,
            "group": "fit",
            "array": True,
            "first_index": 0,
            "attempt": 1,
            "time": 1795421662.5,
            "devices": ["0", "1"],
        }
    ],
    "intent": {"first": 2, "count": 1, "group": "fit", "array": False, "time": NOW, "attempt": 1},
    "removed": [1],
    "finished": False,
    "ended": {
        "1": {
            "state": "FAILED",
            "files": {"number": 1, "claim": "7[1]", "host": "vm", "exit_code": 1},
            "native": "FAILED",
            "reason": "it failed",
            "exit_code": 1,
        }
    },
    "outcomes": {"0": "COMPLETED", "1": "FAILED"},
    "reasons": {"1": "it failed"},
    "last": {
        "kind": "failed",
        "exit_code": 3,
        "time": NOW,
        "reason": "run: ended",
        "job": 0,
        "head": 0,
        "jobs": [
            {
                "number": 1,
                "claim": "7[1]",
                "script": 1795421662.0,
                "node": "vm",
                "began": 1795421662.0,
                "setup": "false failed (exit code 1)",
                "reason": "it failed",
                "note": "run: has had no client",
                "alive": 1795421699.0,
                "host": "vm",
                "exit_code": 0,
                "ended": 1795421700.0,
            }
        ],
        "address": "tls://127.0.0.1:36085",
        "dashboard": 8787,
        "connected": {"p-2cab-fit-0": ROW},
        "gone": {"p-2cab-fit-1": 1795421690.25},
        "over_memory": {"p-2cab-fit-0": {"restarts": 2, "limit": 524288000, "paused": 52428800}},
        "lost_tasks": [{"worker": "p-2cab-fit-1", "at": 1795421690.25, "tasks": {"work": 3.5}}],
        "lost_nodes": [{"number": 3, "reason": "its node is lost", "exit_code": 1}],
        "transport": {
            "scheme": "tls",
            "reason": "ucxx does not work",
            "measured": {"ucxx": {"within": 90.5, "between": 1.5, "problem": ""}},
            "environ": {"UCX_TLS": "^sm"},
            "remark": "jobs are isolated",
            "kind": "A100",
        },
        "size": 4096,
        "files": 12,
    },
    "notes": ["a note"],
    "contact": "help@example.org",
    "targets": [{"time": 1795421662.31, "workers": 2, "group": "fit"}],
    "dashboard": "local",
    "unlisted": {"1": 1795421690.0},
    "version": 2,
}
FREE = (
    "node",
    "text",
    "model",
    "reason",
    "error",
    "host",
    "site",
    "queue",
    "remark",
    "problem",
    "contact",
)
"""Keys whose values are any text."""
WRONG: list[Any] = [None, [], {}, "x\x1b[31m\ud800", -1, 10**15, 10**40, True, float("inf")]


SOME_OR_ALL = pytest.mark.parametrize("values", ["some", slow_variant("all")])


class Slurm(System):
    """A clock that stands still, and a Slurm that lists one of the two jobs of each cluster."""

    def __init__(self) -> None:
        self.calls: list[Sequence[str]] = []

    def time(self) -> float:
        return NOW

    def run(self, argv: Sequence[str], **_: Any) -> CommandResult:
        self.calls.append(argv)
        rows = f"{SQUEUE_HEADER}7|0|RUNNING|node1|N/A|None|p-2cab\n"
        listed = rows if argv[0] == "squeue" else ""
        return CommandResult(list(argv), 0, listed, "")


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A ledger with the clusters p-2cab and good-0001."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    ledger = Ledger()
    for name in ("p-2cab", "good-0001"):
        write(ledger, name)
    return ledger


def write(ledger: Ledger, name: str) -> None:
    """Write the record and the folder of a cluster."""
    folder = ledger.folder.parent / "root" / name
    for inside in ("jobs", "usage", "logs", "head-1"):
        (folder / inside).mkdir(parents=True, mode=0o700, exist_ok=True)
    for path in (folder, folder.parent):
        path.chmod(0o700)
    for file, value in FILES.items():
        (folder / file).write_text(json.dumps(value))
    for file, lines in LINES.items():
        (folder / file).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for file, text in TEXTS.items():
        (folder / file).write_text(text)
    ledger.folder.mkdir(parents=True, exist_ok=True)
    path = ledger.folder / f"{name}.json"
    path.write_text(json.dumps({**RECORD, "id": name, "folder": str(folder)}))


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of every value inside ``value``."""
    items: Any = {list: enumerate, dict: dict.items}.get(type(value), lambda value: ())(value)
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


def wrong_values(value: Any, values: str) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each place with all wrong values, or with a third of them: the next place has the next third."""
    for number, place in enumerate(places(value)):
        for wrong in WRONG if values == "all" else WRONG[number % 3 :: 3]:
            yield place, wrong


def damaged(value: Any, place: tuple[Any, ...], wrong: Any) -> Any:
    """Return a copy of ``value`` with ``wrong`` at a place."""
    changed = copy.deepcopy(value)
    inside = changed
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = wrong
    return changed


def show(ledger: Ledger) -> str:
    """Show the cluster p-2cab in every way; return the table of all clusters."""
    reports = ClusterMonitor(ledger.all(), ledger, system=Slurm()).reports()
    for report in reports:
        if report.record.id != "p-2cab":
            continue
        logged = [with_log(report.record, job) for job in report.jobs]
        sampled = [with_samples(report.record, job, NOW) for job in logged]
        status_text(report)
        json.loads(status_json([report]))
        status_text(replace(report, jobs=tuple(sampled)), {})
        usage = make_usage(
            report,
            read_history(report.record.path, report.folder.jobs),
            ledger.targets(report.record),
            NOW,
        )
        usage_text(usage)
        json.dumps(usage_json(usage), allow_nan=False)
        page(usage).encode()
        card_html(Card(report, "title")).encode()
    return status_table(reports)


def wrong_texts(name: str, values: str) -> Iterator[str]:
    """Yield the text of a file with wrong values at each place."""
    value = {**OLD, **FILES, **LINES}[name]
    for place, wrong in wrong_values(value, values):
        changed = damaged(value, place, wrong)
        yield lines_of(changed) if name in LINES else json.dumps(changed)


def coloured(value: Any) -> Any:
    """Return a copy of ``value`` in which the texts that are free have a control character."""
    if isinstance(value, dict):
        return {
            key: coloured(item) if key in FREE or not isinstance(item, str) else item
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [item if isinstance(item, str) else coloured(item) for item in value]
    return f"{value}\x1b[31m" if isinstance(value, str) else value


def lines_of(rows: list[Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@SOME_OR_ALL
@pytest.mark.parametrize("name", [*FILES, *LINES])
def test_wrong_values_in_the_folder_hide_no_cluster(ledger: Ledger, name: str, values: str) -> None:
    folder = ledger.get("p-2cab").path
    for text in wrong_texts(name, values):
        (folder / name).write_text(text)
        table = show(ledger)
        assert "good-0001" in table and "p-2cab" in table, (text, table)
        assert "\x1b" not in table


@SOME_OR_ALL
@pytest.mark.parametrize("name", OLD)
def test_wrong_values_in_a_folder_of_an_earlier_gpujobs_hide_no_cluster(
    ledger: Ledger, name: str, values: str
) -> None:
    folder = make_old(ledger)
    for text in wrong_texts(name, values):
        (folder / name).write_text(text)
        table = show(ledger)
        assert "good-0001" in table and "p-2cab" in table, (text, table)
        assert "\x1b" not in table


def make_old(ledger: Ledger) -> Path:
    """Give the cluster p-2cab the files of an earlier gpujobs; return its folder."""
    folder = ledger.get("p-2cab").path
    for path in (folder / EVENTS, *(folder / "jobs").glob("*.jsonl")):
        path.unlink()
    (folder / "head-1").rename(folder / "head")
    for name, text in OLD_TEXTS.items():
        (folder / name).write_text(text)
    for name, value in OLD.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "events.jsonl").write_text(lines_of(OLD_LINES))
    return folder


def test_a_cluster_of_an_earlier_gpujobs_has_the_same_report(ledger: Ledger) -> None:
    folder = ledger.get("p-2cab").path
    (folder / "ended").unlink()
    known = [row for row in LINES[EVENTS] if row["event"] not in ("draining", "left")]
    (folder / EVENTS).write_text(lines_of(known))
    new = status_and_usage(ledger, EVENTS)
    make_old(ledger)
    assert status_and_usage(ledger, "workers.json", "events.jsonl") == new
    status, usage = new
    assert '"GPU-1"' in status and '"address": "tls' in status and usage["workers"]


def status_and_usage(ledger: Ledger, *names: str) -> tuple[str, Any]:
    """Return what `status` and `report` print, with workers of the group in the files ``names``."""
    record = ledger.get("p-2cab")
    for path in map(record.path.joinpath, names):
        path.write_text(path.read_text().replace("p-2cab-", "p-2cab-fit-"))
    (report,) = ClusterMonitor([record], ledger, system=Slurm()).reports()
    usage = make_usage(
        report, read_history(record.path, report.folder.jobs), ledger.targets(record), NOW
    )
    return re.sub(r'"elapsed": [0-9.]+', "", status_json([report])), usage_json(usage)


@SOME_OR_ALL
@pytest.mark.parametrize("ended", [False, True])
def test_wrong_values_in_the_ledger_hide_no_cluster(
    ledger: Ledger, ended: bool, values: str
) -> None:
    folder = ledger.get("p-2cab").path
    if not ended:
        (folder / "ended").unlink()
    path = ledger.folder / "p-2cab.json"
    value = {**json.loads(path.read_text()), "finished": ended}
    for place, wrong in wrong_values(value, values):
        path.write_text(json.dumps(damaged(value, place, wrong)))
        try:
            ledger.get("p-2cab")
        except GpujobsError as error:
            assert str(path) in str(error)
        table = show(ledger)
        assert "good-0001" in table, (place, wrong)


@pytest.mark.usefixtures("bounds")
def test_wrong_values_in_the_specification_raise_our_errors_only(home: Path) -> None:
    path = home / "spec.json"
    write_spec(make_spec(home, "gpus: 1\nrun: [python, p.py]\n", str(home / "s.yaml")), path)
    value = json.loads(path.read_text())
    plan_of(path)
    for place in places(value):
        for wrong in WRONG:
            path.write_text(json.dumps(damaged(value, place, wrong)))
            with contextlib.suppress(GpujobsError):
                plan_of(path)


def plan_of(path: Path) -> None:
    """Plan a specification that was read, as `scale` does."""
    spec = read_spec(path)
    planned = make_plan(spec, python="/usr/bin/python3", machine=MACHINE)
    scripts_of(spec, planned, "p-2cab")


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def nested(path: Path) -> None:
    path.write_text('{"workers": ' + "[" * 100_000 + "]" * 100_000 + "}")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def digits(path: Path) -> None:
    path.write_text("9" * 10**6)


def others_inside(path: Path) -> None:
    gpu = '{"others": [' * 300 + "{}" + "]}" * 300
    path.write_text(f'{{"workers": {{"a": {{"gpu": {gpu}}}}}}}')


def foreign(path: Path) -> None:
    path.symlink_to("/etc/shadow")


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "endless": endless,
    "foreign": foreign,
    "nested": nested,
    "others": others_inside,
    "huge": huge,
    "digits": digits,
    "binary": lambda path: path.write_bytes(bytes(range(256))) and None,
    "unreadable": lambda path: path.touch(0o000),
    "cut": lambda path: path.write_text('{"workers": {"a"') and None,
}


@pytest.fixture
def bounds() -> Iterator[None]:
    """End a test that hangs, or that takes much memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, before[1]))
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("bounds")
def test_files_of_a_wrong_kind_hide_no_cluster(
    ledger: Ledger, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = ledger.get("p-2cab").path
    for name in (*FILES, *LINES, *TEXTS):
        write(ledger, "p-2cab")
        (folder / name).unlink()
        KINDS[kind](folder / name)
        table = show(ledger)
        (row,) = (line for line in table.splitlines() if line.startswith("p-2cab"))
        read = name in (
            *JSON_FILES,
            EVENTS,
            "jobs/0.claim",
            "jobs/1.note",
            *OF_JOBS,
        )
        free = name in TEXTS and name != "jobs/0.claim"
        fine = (kind in ("digits", "binary", "cut") and free) or kind == "unreadable"
        # In a file of lines, half a line at its end is one that is being written.
        fine = fine or (
            name in (EVENTS, *OF_JOBS) and kind in ("nested", "others", "digits", "cut")
        )
        if read and not fine and kind != "others":
            assert f"{folder / name} " in row, (name, row)
        remove(folder / name)


NOT_IDS = (
    b"\0", b"7\0", b"1[\xc2\xb2]", "٣".encode(), "7[٣]".encode(), b"-1", b"--me", b"7 8", b"7\n8", b"7,8",
    b"7[", b"[7]", b"7;rm", b"$(id)", b"\xff\xfe", b"9" * 20_000, b"7[" + b"9" * 20_000 + b"]", b"\x1b[31m", b"/etc/passwd",
)  # fmt: skip
"""Contents of a claim that are not the id of a job."""


@pytest.mark.usefixtures("bounds")
def test_claims_that_are_not_ids_are_named_and_never_cancelled(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    """They are named as damaged; `cancel` cancels the jobs of the record, and nothing else."""
    claim = ledger.get("p-2cab").path / "jobs/0.claim"
    for text in NOT_IDS:
        write(ledger, "p-2cab")
        claim.write_bytes(text)
        rows = {line.split()[0]: line for line in show(ledger).splitlines()}
        assert f"{claim} is damaged: it is not the id of a job" in rows["p-2cab"], text
        assert "good-0001" in rows, text
        system = Slurm()
        cancel(ledger.update("p-2cab", intent=None), ledger, system=system)
        cancelled = [argv[1:] for argv in system.calls if argv[0] == "scancel"]
        assert cancelled == [("7",)] or cancelled == [["7"]], (text, cancelled)
    for text in (b"", b"\n"):  # a job on a full disk writes nothing
        claim.write_bytes(text)
        assert "damaged" not in show(ledger)
    claim.write_bytes(b"7[0]\n")
    for name in ("\u0663.claim", "\u00b2.claim", "9" * 200 + ".claim", "-1.claim", ".claim"):
        claim.with_name(name).write_bytes(b"8\n")
    assert "damaged" not in show(ledger)


def test_ids_of_the_record_that_no_batch_scheduler_writes_are_refused(ledger: Ledger) -> None:
    path = ledger.folder / "p-2cab.json"
    for text in NOT_IDS:
        value = json.loads(path.read_text())
        value["submissions"][0]["id"] = text.decode(errors="surrogateescape")
        if not value["submissions"][0]["id"].startswith("7["):  # of an array of PBS
            path.write_text(json.dumps(value))
            with pytest.raises(GpujobsError, match="is not a valid record of a cluster"):
                ledger.get("p-2cab")


def remove(path: Path) -> None:
    path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"unreadable", "others"}))
@pytest.mark.usefixtures("bounds")
def test_records_of_a_wrong_kind_are_named_and_hide_no_other(
    ledger: Ledger, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = ledger.folder / "p-2cab.json"
    path.unlink()
    KINDS[kind](path)
    os.mkfifo(path.with_suffix(".lock"))
    assert [line.split()[0] for line in show(ledger).splitlines()] == ["CLUSTER", "good-0001"]
    (message,) = (record.getMessage() for record in caplog.records)
    assert str(path) in message
    with pytest.raises(GpujobsError, match=r"p-2cab\.json"):
        ledger.get("p-2cab")


COMMANDS = {
    "status": ["status", "p-2cab"],
    "report": ["report", "p-2cab"],
    "logs": ["logs", "p-2cab"],
    "connect": ["connect", "p-2cab"],
    "scale": ["scale", "p-2cab", "3"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("how", ["linked", "writable", "above", "foreign"])
def test_folders_that_others_can_change_are_not_read(ledger: Ledger, name: str, how: str) -> None:
    folder = ledger.get("p-2cab").path
    folder = folder.parent if how == "above" else folder
    hint = f"chmod 700 {folder}, or use" if how in ("writable", "above") else "use another folder"
    problem = {
        "linked": f"{folder} is a symbolic link",
        "writable": f"{folder} is writable by other users",
        "above": f"{folder} is writable by other users",
        "foreign": f"{folder} belongs to another user",
    }[how]
    if how == "linked":
        folder.rename(folder.with_name("elsewhere"))
        folder.symlink_to(folder.with_name("elsewhere"))
    elif how in ("writable", "above"):
        folder.chmod(0o770)
    elif os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        pytest.skip("only root can give a folder to another user")
    finish(ledger, "p-2cab")
    done = CliRunner().invoke(main, COMMANDS[name])
    assert problem in done.output, done.output
    assert "tls://" not in done.output and "a line" not in done.output
    assert done.exit_code == (2 if name in ("logs", "connect", "scale") else 0)
    assert not done.exit_code or f"hint: {hint}" in done.output


def test_no_client_connects_by_a_folder_that_others_can_change(ledger: Ledger) -> None:
    folder = ledger.get("p-2cab").path
    folder.chmod(0o777)
    with pytest.raises(InputError, match=f"{folder} is writable by other users"):
        GPUJobQueueCluster.from_name("p-2cab")


def test_cancel_writes_nothing_into_a_folder_that_others_can_change(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    folder = ledger.get("p-2cab").path
    (folder / "ended").unlink()
    folder.chmod(0o777)
    system = Slurm()
    cancel(ledger.update("p-2cab", intent=None), ledger, system=system)
    assert not (folder / "ended").exists() and "its jobs are not asked to exit" in caplog.text
    assert any(argv[0] == "scancel" for argv in system.calls)


def test_control_characters_of_files_are_in_no_output(ledger: Ledger) -> None:
    for name, text in {**FILES, **LINES}.items():
        rows = [coloured(value) for value in (text if name in LINES else [text])]
        (ledger.get("p-2cab").path / name).write_text(lines_of(rows))
    for name in TEXTS:
        (ledger.get("p-2cab").path / name).write_text("a line \x1b[31m\n")
    path = ledger.folder / "p-2cab.json"
    path.write_text(
        json.dumps({**coloured(json.loads(path.read_text())), "finished": True, "intent": None})
    )
    commands = (*COMMANDS.values(), ["status", "--all"], ["report", "p-2cab", "-o", "-"])
    outputs = [CliRunner().invoke(main, arguments).output for arguments in commands]
    assert [output for output in outputs if "\x1b" in output] == []
    assert sum("[31m" in output for output in outputs) > 3
    assert "</html>" in outputs[-1] and not Path("-").exists()  # "-" is stdout


def finish(ledger: Ledger, name: str) -> None:
    """Record that the jobs have ended, so that no batch scheduler is queried."""
    path = ledger.folder / f"{name}.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "intent": None, "finished": True}))


def test_connect_says_that_a_cluster_without_a_written_end_has_ended(ledger: Ledger) -> None:
    for name in ("ended", EVENTS, "jobs/1.jsonl"):
        (ledger.get("p-2cab").path / name).unlink()
    finish(ledger, "p-2cab")
    done = CliRunner().invoke(main, ["connect", "p-2cab"])
    assert "p-2cab has ended: all its jobs have ended: " in done.output
    assert done.exit_code == 5


@pytest.mark.parametrize("text", ["-u", "--state=PENDING", "0", "all", "*", "7 8", "", "[1]"])
def test_ids_of_jobs_are_no_options(ledger: Ledger, text: str) -> None:
    """An id that is an option, a pattern or a word for all jobs is never given to a command."""
    path = ledger.folder / "p-2cab.json"
    record = json.loads(path.read_text())
    (Path(record["folder"]) / "jobs" / "0.claim").write_text(f"{text}[0]\n")
    system = Slurm()
    cancel(ledger.get("p-2cab"), ledger, system=system)
    assert [list(call) for call in system.calls if call[0] == "scancel"] == [["scancel", "7"]]
    record["submissions"][0]["id"] = text
    path.write_text(json.dumps(record))
    with pytest.raises(GpujobsError, match="is not the id of a job") as caught:
        ledger.get("p-2cab")
    assert repr(text) in str(caught.value)
