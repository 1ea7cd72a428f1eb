"""Compare what jobs have said with the files that this replaces: `pytest -p tests.support.oracle`.

Each look of a `FolderReader` in this process is compared, and once more so are all clusters of
tests below the folders of pytest, four times a second: their readers are in other processes.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpujobs.clusters.folder import FolderReader
from gpujobs.injob.jobevents import JobFacts

LOOKS, CLUSTERS, DIFFERENT = [0], set[str](), list[str]()
_read_jobs = FolderReader._read_jobs


def plain(text: str) -> str:
    """Return a text as the script wrote it for JSON."""
    return "".join(c for c in text if c.isprintable() and c not in '"\\').strip()


def of_files(jobs: Path) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {
        k: {} for k in ("json", "started", "reason", "setup", "lost", "stopped")
    }
    for path in jobs.iterdir():
        number, _, kind = path.name.partition(".")
        if kind in found and number.isdecimal():
            text = path.read_text(errors="replace")
            found[kind][int(number)] = (
                json.loads(text) if kind in ("json", "started", "lost") else text.strip()
            )
    return {
        "exits": {n: (v.get("exit_code"), v.get("host")) for n, v in found["json"].items()},
        "reasons": {n: plain(v) for n, v in found["reason"].items()},
        "setups": {n: plain(v) for n, v in found["setup"].items()},
        "starts": {n: (v.get("node"), v.get("started")) for n, v in found["started"].items()},
        "stopped": dict.fromkeys(found["stopped"], True),
        "lost": {n: v["reason"] for n, v in found["lost"].items()},
    }


def of_events(jobs: Any) -> dict[str, dict[int, Any]]:
    facts: dict[int, JobFacts] = jobs.facts
    return {
        "exits": {n: (v.left.exit_code, v.left.host) for n, v in facts.items() if v.left},
        "reasons": {n: plain(v.reason) for n, v in facts.items() if v.reason},
        "setups": {n: plain(v.setup) for n, v in facts.items() if v.setup},
        "starts": {n: (v.node, v.began) for n, v in facts.items() if v.node is not None},
        "stopped": {n: True for n, v in facts.items() if v.signalled},
        "lost": {n: v.reason for n, v in jobs.lost.items()},
    }


def difference(reader: FolderReader, found: Any, told: Any) -> str:
    old, new = of_files(reader._folder.path / "jobs"), of_events(found)
    for kind in old:
        for number in old[kind].keys() | new[kind].keys():
            if number in told and kind in ("exits", "reasons", "stopped"):
                continue
            if old[kind].get(number) != new[kind].get(number):
                return f"{kind} {number}: files {old[kind].get(number)}, events {new[kind].get(number)}"
    return ""


def compared(reader: FolderReader, runs: Any) -> Any:
    found = _read_jobs(reader, runs)
    LOOKS[0] += 1
    CLUSTERS.add(str(reader._folder.path))
    for _ in range(15):  # a job of another process may have written but one of both
        try:
            if not (problem := difference(reader, found, runs)):
                return found
        except (OSError, ValueError) as error:
            problem = str(error)
        if "simulated" in os.environ.get("PYTEST_CURRENT_TEST", ""):
            break
        time.sleep(0.2)
        found = _read_jobs(reader, runs)
    DIFFERENT.append(f"{os.environ.get('PYTEST_CURRENT_TEST')} {reader._folder.path}: {problem}")
    return found


def watch() -> None:
    readers: dict[Path, FolderReader] = {}
    while True:
        time.sleep(0.25)
        for jobs in list(folders()):
            reader = readers.setdefault(jobs, FolderReader(jobs.parent))
            if jobs.is_dir():
                reader.read()


def folders() -> Iterator[Path]:
    root = Path(os.environ.get("GPUJOBS_ORACLE_ROOT", tempfile.gettempdir()))
    for pattern in (
        "*/*/*/.gpujobs/*/jobs",
        "*/.gpujobs/*/jobs",
        "*/*/.gpujobs/*/jobs",
        "*/*/*/*/.gpujobs/*/jobs",
    ):
        yield from root.glob(pattern)


def pytest_sessionstart() -> None:
    FolderReader._read_jobs = compared  # type: ignore[method-assign]
    if "GPUJOBS_ORACLE_ROOT" in os.environ:
        threading.Thread(target=watch, daemon=True).start()


def pytest_sessionfinish(session: pytest.Session) -> None:
    with Path(os.environ.get("GPUJOBS_ORACLE_OUT", "/tmp/oracle.txt")).open("a") as file:
        file.write(f"looks {LOOKS[0]}, clusters {len(CLUSTERS)}, different {len(DIFFERENT)}\n")
        file.writelines(f"{line}\n" for line in DIFFERENT[:40])
    if DIFFERENT:
        session.exitstatus = 1
