"""`verdict.json`: which jobs of a cluster will not come, for a head that waits for their workers.

`ClusterHandle.wait` writes it; without that `judge.pyz` does, which the head starts. That archive
has the modules that judge a cluster: for Python 3.9, with the standard library only. A batch
scheduler of another package is packed with its package.

They are 36 outside of `injob`. At most 7 are not needed: the inventories of nodes (that of PBS has
parsers of jobs, too) and `batch.receive`. No more go unless the class of each batch scheduler, also
of other packages, becomes two: one that reads answers, one that plans.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shutil import which

from ..batch.client import SchedulerClient
from ..batch.process import HOST, System
from ..errors import GpujobsError, InputError, UnusableError
from ..injob.archive import pack
from ..injob.folder import Folder
from ..injob.names import HEAD, JUDGE, RECORD, VERDICT
from ..schedulers import CommandResult, JobId, JobState, JobStatus, Scheduler, get_scheduler
from ..schedulers.base import ENTRY_POINTS, all_commands
from ..text import with_home
from .clusterfolder import write_atomically, write_new
from .folderstate import FolderState, read_state
from .judge import judge, unlisted_since
from .ledger import ClusterRecord, parse
from .report import ClusterReport

_PACKED = (
    "__init__.py", "errors.py", "text.py", "schedulers/*.py", "batch/__init__.py",
    "batch/client.py", "batch/process.py", "batch/receive.py", "clusters/__init__.py",
    "clusters/clusterfolder.py", "clusters/findings.py", "clusters/folderstate.py",
    "clusters/judge.py", "clusters/lastword.py", "clusters/ledger.py", "clusters/oldfolder.py",
    "clusters/report.py", "clusters/targets.py", "clusters/verdict.py", "injob/__init__.py",
    "injob/archive.py", "injob/certificate.py", "injob/children.py", "injob/events.py",
    "injob/folder.py", "injob/gpus.py", "injob/jobevents.py", "injob/log.py", "injob/memory.py",
    "injob/names.py", "injob/network.py", "injob/reason.py", "injob/transport.py", "version.py",
)  # fmt: skip
_MAIN = """\
import sys

from gpujobs.clusters.verdict import main

main(*sys.argv[1:])
"""
_ENTRY_POINTS = "gpujobs_scheduler-0.dist-info/entry_points.txt"
"""By which `get_scheduler` finds a batch scheduler of another package in the archive."""
_NOT_FOUND = 127
"""Exit code of `env` without the command."""
_QUERY_TIMEOUT = 15.0
"""Seconds for which a query waits for a batch scheduler that is away."""


def write_judge(folder: Path, scheduler: str) -> None:
    """Write `judge.pyz` into a cluster's folder; ``scheduler``: the name of its batch scheduler."""
    package = Path(__file__).parent.parent
    paths = sorted({path for pattern in _PACKED for path in package.glob(pattern)})
    sources = {f"gpujobs/{path.relative_to(package)}": path.read_bytes() for path in paths}
    others = _other_packages(get_scheduler(scheduler))
    write_new(folder / JUDGE, pack({"__main__.py": _MAIN, **sources, **others}))


def _other_packages(scheduler: type[Scheduler]) -> dict[str, str | bytes]:
    """Return the packages of other projects that a batch scheduler's class is from, by path.

    A class in the user's script is in none: its jobs cannot ask.
    """
    found: dict[str, str | bytes] = {}
    own = __name__.partition(".")[0]
    for one in scheduler.__mro__:
        if issubclass(one, Scheduler) and one.__module__.partition(".")[0] not in (own, "__main__"):
            found.update(_package_of(one.__module__))
    if found:
        name, module = scheduler.name, scheduler.__module__
        found[_ENTRY_POINTS] = f"[{ENTRY_POINTS}]\n{name} = {module}\n"
    return found


def _package_of(module: str) -> dict[str, str | bytes]:
    """Return the sources of the outermost package that has ``module``, or of the lone module."""
    found: dict[str, str | bytes] = {}
    names = module.split(".")
    for depth in range(1, len(names) + 1):
        place = "/".join(names[:depth])
        source = getattr(sys.modules[".".join(names[:depth])], "__file__", None)
        if source is None:  # a namespace package, which has other projects, too
            found[f"{place}/__init__.py"] = ""
            continue
        path = Path(source)
        if path.name != "__init__.py":
            found[f"{place}.py"] = path.read_bytes()
            return found
        for inside in sorted(path.parent.rglob("*.py")):
            found[f"{place}/{inside.relative_to(path.parent)}"] = inside.read_bytes()
        return found
    return {}


def write_record(record: ClusterRecord) -> None:
    """Write the record for the cluster's jobs, which cannot read the ledger.

    It has the paths of the commands on this host: their folder may not be on the PATH of jobs. In a
    job folder, the ledger writes this file.
    """
    if record.planned:
        return
    scheduler = get_scheduler(record.scheduler)(record.multi_cluster)
    found = {name: which(name) for name in all_commands(scheduler)}
    commands = {name: path for name, path in found.items() if path} | record.commands
    known = replace(record, commands=commands, targets=(), ended={})
    write_atomically(record.path / RECORD, json.dumps(asdict(known)))


class _Outside(System):
    """Commands run by the batch script, outside of the container (`gpujobs_ask` in body.sh.j2)."""

    def __init__(self, request: Path) -> None:
        self._request = request

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str,
        timeout: float,
        cwd: Path | None,
        env: Mapping[str, str],
    ) -> CommandResult:
        """Write the request, and wait for the files of its result."""
        own = [f"{name}={value}" for name, value in env.items() if os.environ.get(name) != value]
        code = self._result("code")
        code.unlink(missing_ok=True)
        write_atomically(self._request, "\0".join(["env", *own, *argv]))
        deadline = self.monotonic() + timeout
        while not code.exists() or not (text := code.read_text("utf-8")).endswith("\n"):
            if self.monotonic() > deadline:
                self._request.unlink(missing_ok=True)
                return CommandResult(tuple(argv), None, problem=f"{argv[0]} did not respond")
            self.sleep(0.2)
        output, errors = (
            self._result(name).read_text("utf-8", "replace") for name in ("out", "err")
        )
        found = int(text) != _NOT_FOUND
        return CommandResult(tuple(argv), int(text), output, errors, started=found)

    def _result(self, name: str) -> Path:
        return self._request.with_name(f"{self._request.name}.{name}")


def write_verdict(report: ClusterReport, *, asked: bool = True, usable: bool = True) -> None:
    """Write which jobs of a cluster will not come, and which workers still may.

    ``asked``: the batch scheduler has ever answered. ``usable``: its commands can be used in jobs.
    """
    gone = report.gone
    jobs = [job for job in report.current_jobs if job.active and job.number not in gone]
    record = report.record
    possible = [name for job in jobs for name in job.workers]
    for planned in record.unseen:  # they may be submitted later
        for number in planned.numbers:
            possible += record.worker_names(number, planned.group)
    head = record.head
    heads = (job for job in jobs if not head or head == (job.group if job.workers else HEAD))
    value = {
        "time": time.time(),
        "gone": gone,
        "possible": possible,
        "head": report.folder.head is not None or any(heads) or bool(record.unseen),
        "unlisted": record.unlisted,
        "undecided": [job.number for job in jobs if str(job.number) in record.unlisted],
        "asked": asked,
        "usable": usable,
    }
    with contextlib.suppress(GpujobsError):  # a full disk
        write_atomically(report.record.path / VERDICT, json.dumps(value))


def main(path: str, request: str = "") -> None:
    """Ask about the jobs of a cluster from one of them; ``request``: a file for `_Outside`."""
    folder = Folder(path)
    before = folder.read(VERDICT)
    record = parse(folder.load(RECORD)).at(folder.path)
    record = replace(record, unlisted=before.get("unlisted", {}))
    state, usable = read_state(folder.path), before.get("usable", True)
    answers: Mapping[JobId, JobStatus] = {}
    if usable:
        try:
            answers = _ask(record, state, _Outside(Path(request)) if request else HOST)
        except (UnusableError, InputError) as error:  # or its package cannot be imported here
            usable = False
            print(f"cannot ask about the jobs of the cluster from here: {error}", file=sys.stderr)
        except GpujobsError as error:
            print(error, file=sys.stderr)
    now = time.time()
    if answers:
        record = replace(record, unlisted=unlisted_since(record, state, answers, now))
    answered = any(answer.state is not JobState.UNKNOWN for answer in answers.values())
    asked = answered or before.get("asked", False)  # it may be away for a while
    write_verdict(judge(record, state, answers, now=now), asked=asked, usable=usable)


def _ask(record: ClusterRecord, state: FolderState, system: System) -> Mapping[JobId, JobStatus]:
    scheduler = get_scheduler(record.scheduler)(record.multi_cluster)
    commands = record.commands
    if system is HOST:
        commands = {name: path for name, path in commands.items() if which(with_home(path))}
    client = SchedulerClient(scheduler, commands, timeout=_QUERY_TIMEOUT, system=system)
    jobs = record.current_jobs(state.claims).values()
    return client.status(sorted(set(jobs), key=str), [record.id])
