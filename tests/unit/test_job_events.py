"""What a job says of itself, line by line, and what that amounts to."""

from __future__ import annotations

import itertools
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpujobs.injob.events import VERSION
from gpujobs.injob.folder import Folder
from gpujobs.injob.jobevents import (
    ExitRecord,
    JobEvent,
    JobFacts,
    JobReader,
    LostNode,
    append_event,
    job_events,
    lost_nodes,
)
from gpujobs.injob.names import RUN_NAME

from ..support.jobevents import facts_of, write_job

FIRST, SECOND = "10-n1-100", "70-n2-200"
SCRIPT = JobEvent(event="script", run=FIRST, node="n1", at=10.0, version=VERSION)
SETUP = JobEvent(event="setup failed", run=FIRST, node="n1", at=11.0, text="false failed")
STARTED = JobEvent(event="started", run=FIRST, node="n1", at=12.0, began=10.0)
SIGNALLED = JobEvent(event="signalled", run=FIRST, node="n1", at=13.0)
FAILED = JobEvent(event="failed", run=FIRST, node="n1", at=14.0, reason="no GPU")
LEFT = JobEvent(event="left", run=FIRST, node="n1", at=15.0, code=70)
LOST = JobEvent(event="node lost", run=FIRST, node="n1", at=14.0, number=3, reason="gone", code=1)
LIFE = [SCRIPT, SETUP, STARTED, SIGNALLED, FAILED, LOST, LEFT]


def fold(*events: JobEvent) -> JobFacts:
    found = JobFacts()
    for event in events:
        found.feed(event)
    return found


def again(event: JobEvent) -> JobEvent:
    """Return the event of the next start, on another node."""
    return {**event, "run": SECOND, "node": "n2", "at": event["at"] + 60}


# -- what the events amount to ---------------------------------------------------------------------
def test_a_job_starts_and_fails() -> None:
    found = fold(SCRIPT)
    assert (found.run, found.script, found.node, found.left) == (FIRST, 10.0, None, None)
    found = fold(*LIFE)
    assert (found.setup, found.node, found.began) == ("false failed", "n1", 10.0)
    assert (found.signalled, found.reason) == (True, "no GPU")
    assert found.left == ExitRecord(70, "n1", 15.0) and found.lost == {3: LostNode("gone", 1)}


def test_a_job_that_starts_again_has_neither_left_nor_failed() -> None:
    found = fold(*LIFE, again(SCRIPT))
    assert (found.setup, found.reason, found.signalled, found.left) == ("", "", False, None)
    assert not found.lost
    assert (found.node, found.began) == ("n1", 10.0)  # until its supervisor starts
    found.feed({**again(STARTED), "began": 70.0})
    assert (found.node, found.began, found.script) == ("n2", 70.0, 70.0)


@pytest.mark.parametrize("late", LIFE, ids=lambda event: event["event"])
def test_a_process_of_an_earlier_start_changes_nothing(late: JobEvent) -> None:
    """A requeued job runs already, while the node before still kills the processes of the old."""
    before = fold(*LIFE[:5], again(SCRIPT), again(STARTED))
    after = fold(*LIFE[:5], again(SCRIPT), again(STARTED), late)
    assert after == before and after.left is None and not after.reason


def test_a_start_whose_first_line_a_full_disk_has_refused_counts() -> None:
    assert fold(FAILED, LEFT).left == ExitRecord(70, "n1", 15.0)
    assert fold(*LIFE, again(STARTED)).left is None
    assert fold(*LIFE, again(LEFT), LEFT).left == ExitRecord(70, "n2", 75.0)


@settings(max_examples=1000, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_old_lines_may_come_at_any_moment_and_lines_may_come_twice(
    order: random.Random, twice: bool
) -> None:
    old, new = LIFE[1:], [again(event) for event in LIFE]
    lines = [SCRIPT]
    while old or new:
        own = order.choice([author for author in (old, new) if author])
        lines.append(own.pop(0))
        if twice:
            lines.append(order.choice(lines))
    expected = fold(*(again(event) for event in LIFE))
    assert replace(fold(*lines), past=set()) == replace(expected, past=set())


def test_a_look_at_thousands_of_starts_takes_no_longer_for_each() -> None:
    """A file of 16 MiB may have as many: others may have written it."""

    def seconds(starts: int) -> float:
        events = [JobEvent(event="script", run=str(number)) for number in range(starts)]
        began = time.process_time()
        assert len(fold(*events).past) == starts
        return time.process_time() - began

    assert seconds(40_000) < 40 * seconds(4_000)


def test_an_unknown_word_changes_nothing() -> None:
    assert fold(SCRIPT, JobEvent(event="later word", run=FIRST)) == fold(SCRIPT)


def test_lost_nodes_are_those_of_the_present_start() -> None:
    nodes = [fold(LOST), fold({**LOST, "number": 4}, again(LOST)), fold({**LOST, "reason": "x"})]
    assert lost_nodes(FIRST, nodes) == {3: LostNode("gone", 1)}
    assert lost_nodes(SECOND, nodes) == {3: LostNode("gone", 1)}
    assert lost_nodes("other", nodes) == {}


# -- the file --------------------------------------------------------------------------------------
CUTS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 200), st.integers(0, 20)), min_size=1, max_size=6
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(appends=CUTS)
def test_torn_lines_spoil_only_themselves(
    tmp_path_factory: pytest.TempPathFactory, appends: list[tuple[int, int, int]]
) -> None:
    """A full disk tears an append; a stale cache hides the end of the file."""
    path = tmp_path_factory.mktemp("folder") / "3.jsonl"
    reader, text, left = JobReader(path), b"", list(LIFE)
    for size, cut, hidden in itertools.cycle(appends):
        if not left:
            break
        batch = "".join(f"\n{json.dumps(event)}\n" for event in left[:size]).encode()
        text += batch[: min(cut, len(batch) - 1)]
        path.write_bytes(text[: len(text) - hidden])
        reader.read()
        text += batch
        left = left[size:]
    path.write_bytes(text)
    assert reader.read() == fold(*LIFE) == JobReader(path).read()


def test_an_event_is_appended_with_its_run_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_NAME, FIRST)
    (tmp_path / "jobs").mkdir()
    folder = Folder(str(tmp_path))
    append_event(folder, job_events(3), "failed", reason='"no" GPU\n')
    text = (tmp_path / "jobs/3.jsonl").read_text()
    assert text.startswith(f'\n{{"event": "failed", "run": "{FIRST}", "node": "')
    assert facts_of(tmp_path, 3).reason == '"no" GPU\n'


def test_an_event_that_the_disk_refuses_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    append_event(Folder(str(tmp_path)), job_events(3), "started")
    assert "cannot write to" in "".join(capfd.readouterr())


def test_damaged_lines_and_newer_words_are_named(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    write_job(tmp_path, 0, "script")
    with (tmp_path / "jobs/0.jsonl").open("a") as file:
        file.write('{"event": "left", "run": 7}\n[]\nx\n')
    write_job(tmp_path, 0, "left", code=3)
    reader = JobReader(tmp_path / "jobs/0.jsonl")
    assert reader.read().left == ExitRecord(3, "n1", 1.0)
    assert reader.problem.endswith("lines that are left out: 3")
    write_job(tmp_path, 1, "script", version=VERSION + 1)
    reader = JobReader(tmp_path / "jobs/1.jsonl")
    assert reader.read() == JobFacts() and "newer gpujobs" in reader.problem
