"""Events of jobs in the folder of a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpujobs.injob.events import VERSION
from gpujobs.injob.folder import Folder
from gpujobs.injob.jobevents import JobFacts, job_events, job_facts


def write_job(
    folder: Path, job: int, event: str, *, run: str = "1-n1-1", node: str = "n1", **values: Any
) -> None:
    """Append an event of a job, as its script or its supervisor does; see `injob.jobevents`."""
    if event == "script":
        values.setdefault("version", VERSION)
    line = {"event": event, "run": run, "node": node, "at": 1.0, **values}
    if event == "started":
        line.setdefault("began", line["at"])
    with (folder / job_events(job)).open("a") as file:
        file.write(f"\n{json.dumps(line)}\n")


def facts_of(folder: Path, job: int) -> JobFacts:
    """Return what a job has said of itself."""
    return job_facts(Folder(str(folder)), job)


def events_of(folder: Path, job: int) -> list[dict[str, Any]]:
    """Return the lines of a job."""
    text = (folder / job_events(job)).read_text()
    return [json.loads(line) for line in text.splitlines() if line]


def has_left(folder: Path, job: int) -> bool:
    """Return whether a job has ended by itself."""
    return facts_of(folder, job).left is not None


def supervisor_of(folder: Path, job: int) -> int:
    """Return the process id of the supervisor that started last."""
    started = [event for event in events_of(folder, job) if event["event"] == "started"]
    return int(started[-1]["pid"])


def seconds_of(folder: Path, job: int) -> float:
    """Return the seconds between the last start of a job and its end."""
    facts = facts_of(folder, job)
    assert facts.script is not None and facts.left is not None and facts.left.at is not None
    return facts.left.at - facts.script
