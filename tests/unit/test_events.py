"""What the dask scheduler writes, line by line, and the workers that it amounts to."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpujobs.clusters import findings
from gpujobs.clusters.folderstate import FolderReader, read_state
from gpujobs.clusters.history import Connection, History, read_history
from gpujobs.injob.events import (
    VERSION,
    DaskWorkers,
    Event,
    EventQueue,
    EventReader,
    attempts_in,
    events_file,
)
from gpujobs.injob.folder import bounded
from gpujobs.schedulers import JobId

from ..support.events import write_events
from ..support.jobevents import write_job
from ..support.processes import patience

OPENED = Event(event="opened", at=1.0, version=VERSION, address="tls://n1:1", dashboard=8787)


def connected(worker: str, at: float = 1.0, **row: Any) -> Event:
    return Event(event="connected", at=at, worker=worker, row=row)  # type: ignore[typeddict-item]


def disconnected(worker: str, at: float = 2.0) -> Event:
    return Event(event="disconnected", at=at, worker=worker)


def fold(*events: Event) -> DaskWorkers:
    found = DaskWorkers()
    for event in events:
        found.feed(event)
    return found


# -- the workers -----------------------------------------------------------------------------------
def test_workers_are_connected_or_gone() -> None:
    found = fold(OPENED, connected("a"), connected("b"), disconnected("a", 5.0), disconnected("c"))
    assert [*found.connected] == ["b"] and found.gone == {"a": 5.0} and found.seen == {"a", "b"}
    found.feed(connected("a"))
    assert found.seen == {"a", "b"} == {*found.connected} and not found.gone


def test_a_dask_scheduler_that_closes_keeps_its_workers_and_no_address() -> None:
    found = fold(OPENED, connected("a"))
    assert (found.address, found.dashboard, found.clients) == ("tls://n1:1", 8787, 0)
    found.feed(Event(event="closed"))
    assert (found.address, found.dashboard, [*found.connected]) == (None, None, ["a"])


def test_memory_is_of_a_worker_until_it_runs_as_before() -> None:
    memory = Event(event="over memory", worker="a", restarts=0, limit=9)
    found = fold({**memory, "paused": 8})
    assert found.over_memory == {"a": {"restarts": 0, "limit": 9, "paused": 8}}
    found.feed({**memory, "restarts": 1})
    assert found.over_memory == {"a": {"restarts": 1, "limit": 9}}
    found.feed(memory)
    assert found.over_memory == {}


def test_events_say_the_clients_and_when_a_cluster_without_work_ends() -> None:
    client, idle = Event(event="client"), Event(event="idle")
    found = fold(OPENED, {**client, "clients": 1}, {**idle, "ends_at": 9.0, "by": "idle"})
    assert (found.clients, found.ends_at, found.ends_by) == (1, 9.0, "idle")
    for event in (Event(event="client", clients=0), idle, Event(event="later word", worker="a")):
        found.feed(event)
    assert (found.clients, found.had_client, found.ends_at, found.ends_by) == (0, True, None, "")
    found.feed({**idle, "reason": "no tasks"})
    assert found.idle_reason == "no tasks"


def any_event() -> Any:
    """Return what hypothesis makes events with."""
    from hypothesis import strategies as st  # half a second, in each test process if it stood above

    def over_memory(worker: str, restarts: int) -> Event:
        return Event(event="over memory", worker=worker, restarts=restarts, limit=1)

    workers = st.sampled_from("abc")
    return st.one_of(
        st.builds(connected, workers, st.floats(0, 9), threads=st.integers(1, 4)),
        st.builds(disconnected, workers, st.floats(0, 9)),
        st.builds(over_memory, workers, st.integers(0, 3)),
        st.builds(lambda number: Event(event="client", clients=number), st.integers(0, 3)),
        st.builds(lambda end: Event(event="idle", ends_at=end, by="idle"), st.floats(1, 9)),
    )


def test_lines_that_come_twice_or_torn_or_bit_by_bit_give_the_same_workers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A full disk tears an append, which is written again; a reader may look at any moment.

    ``appends``: events, written bytes of a try before, and bytes that a stale cache does not show.
    """
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    appends = st.tuples(st.integers(1, 4), st.integers(0, 300), st.integers(0, 20))

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(any_event(), max_size=20), st.lists(appends, min_size=1, max_size=6))
    def check(events: list[Event], appends: list[tuple[int, int, int]]) -> None:
        path = tmp_path_factory.mktemp("folder") / events_file(1)
        reader, text, left = EventReader(path), b"", [OPENED, *events]
        for size, cut, hidden in itertools.cycle(appends):
            if not left:
                break
            batch = "".join(("\n", *(f"{json.dumps(event)}\n" for event in left[:size]))).encode()
            if torn := batch[: min(cut, len(batch) - 1)]:
                text += torn
                path.write_bytes(text[: len(text) - hidden])
                reader.read()
            text += batch
            left = left[size:]
            path.write_bytes(text)
            reader.read()
        assert reader.read() == fold(OPENED, *events) == EventReader(path).read()

    check()


# -- the reader ------------------------------------------------------------------------------------
def test_readers_get_the_same_value_until_something_is_new(tmp_path: Path) -> None:
    reader = EventReader(tmp_path / events_file(1))
    assert reader.read() == DaskWorkers() and not reader.problem
    write_events(tmp_path, OPENED, connected("a"))
    first = reader.read()
    assert reader.read() is first and [*first.connected] == ["a"]
    write_events(tmp_path, connected("b"))
    assert [*reader.read().connected] == ["a", "b"] and [*first.connected] == ["a"]


def test_a_file_that_is_shorter_than_before_says_nothing_new(tmp_path: Path) -> None:
    path = tmp_path / events_file(1)
    write_events(tmp_path, OPENED, connected("a"), disconnected("a"))
    reader, whole = EventReader(path), path.read_bytes()
    reader.read()
    path.write_bytes(whole[: len(whole) // 2])
    assert reader.read().gone and not reader.problem
    path.write_bytes(whole)
    write_events(tmp_path, connected("b"))
    assert [*reader.read().connected] == ["b"] and not reader.problem


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    write_events(tmp_path, OPENED, connected("a"))
    with (tmp_path / events_file(1)).open("a") as file:
        file.write('{"event": "connected", "worker": 3}\n{"event": "conn')
    write_events(tmp_path, connected("b"))
    reader = EventReader(tmp_path / events_file(1))
    for _ in range(2):
        assert [*reader.read().connected] == ["a", "b"]
        assert reader.problem.endswith("is damaged: lines that are left out: 2")
    assert any(
        "lines that are left out: 2" in note for note in FolderReader(tmp_path).read().damaged
    )


def test_words_of_a_newer_gpujobs_are_refused(tmp_path: Path) -> None:
    write_events(tmp_path, {**OPENED, "version": VERSION + 1}, connected("a"))
    reader = EventReader(tmp_path / events_file(1))
    for _ in range(2):
        assert reader.read() == DaskWorkers()
        assert reader.problem.endswith("is of a newer gpujobs: update this one")


def test_the_last_attempt_is_the_one_that_counts(tmp_path: Path) -> None:
    names = ("head-2", "workers-1.jsonl", "workers-10.jsonl", "head-0", "head-x", "workers-1")
    assert attempts_in(names) == [1, 2, 10]
    write_events(tmp_path, OPENED, connected("a"))
    reader = FolderReader(tmp_path)
    assert reader.read().dask.address == "tls://n1:1"
    (tmp_path / "head-2").mkdir()
    (tmp_path / "head-2" / "owner").write_text('{"job": 3}')
    found = reader.read()
    assert (found.head, found.dask.address, found.dask.seen) == (3, None, frozenset())


def test_the_history_is_of_all_attempts(tmp_path: Path) -> None:
    gpu = {"uuid": "GPU-0", "others": [{"uuid": "GPU-1"}]}
    write_events(tmp_path, OPENED, connected("a", 1.0, gpu=gpu), disconnected("a", 3.0))
    write_events(tmp_path, OPENED, connected("b", 5.0), Event(event="client", clients=1), attempt=2)
    assert set(read_history(tmp_path, read_state(tmp_path).jobs).connections) == {
        Connection("a", 1.0, 3.0, ("GPU-0", "GPU-1")),
        Connection("b", 5.0),
    }


def test_the_events_of_the_last_attempt_are_read_once(tmp_path: Path) -> None:
    write_events(tmp_path, OPENED, connected("a", 1.0), disconnected("a", 3.0))
    write_events(tmp_path, OPENED, connected("b", 5.0), OPENED, connected("c", 6.0), attempt=2)
    whole = read_history(tmp_path, {})
    reader = FolderReader(tmp_path, in_full=True)
    assert reader.read().dask == read_state(tmp_path).dask
    found: list[History] = []

    def read() -> None:
        found.append(read_history(tmp_path, {}, reader.read().dask.past))

    assert opened_by(read, tmp_path).count("workers-2.jsonl") == 1
    assert found == [whole] and {one.worker for one in whole.connections} == {"a", "b", "c"}
    assert read_state(tmp_path).dask.past is None


def test_a_look_at_thousands_of_workers_reads_only_what_is_new(tmp_path: Path) -> None:
    row = {"address": "tls://10.0.0.1:1", "threads": 1, "gpu": {"uuid": "GPU-0"}, "memory": 2**30}
    write_events(tmp_path, OPENED, *(connected(f"p-{n}", **row) for n in range(4000)))
    reader = EventReader(tmp_path / events_file(1))
    began = time.process_time()
    assert len(reader.read().connected) == 4000
    whole, began = time.process_time() - began, time.process_time()
    for _ in range(100):
        reader.read()
    assert (time.process_time() - began) / 100 < whole / 20


# -- the files of running jobs, which their workers have told ----------------------------------------
RUN = {"job": 0, "id": "7[0]", "name": "5-n2-9", "node": "n2", "started": 5.0}


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """The folder of a cluster whose jobs 0 and 1 run; the worker of the first is connected."""
    for name in ("head-1", "jobs"):
        (tmp_path / name).mkdir()
    (tmp_path / "head-1" / "owner").write_text('{"job": 1}')
    (tmp_path / "head-1" / "heartbeat").write_text("1.0")
    for job in (0, 1):
        (tmp_path / f"jobs/{job}.claim").write_text(f"7[{job}]\n")
        write_job(tmp_path, job, "started", run=f"5-n2-{job}", node="n2", began=5.0)
    write_events(tmp_path, OPENED, connected("a", run=RUN))
    return tmp_path


def opened_by(read: Callable[[], object], folder: Path) -> list[str]:
    """Return the names of the files in a folder that a function opens."""
    found: list[str] = []
    watching = [True]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open" and str(arguments[0]).startswith(f"{folder}/"):
            found.append(str(arguments[0])[len(f"{folder}/") :])

    sys.addaudithook(hook)
    read()
    watching.clear()
    return sorted(found)


def test_a_running_job_costs_a_reader_nothing(running: Path) -> None:
    always = ["head-1/owner", "jobs/1.claim", "jobs/1.jsonl", "workers-1.jsonl"]
    assert opened_by(FolderReader(running).read, running) == always
    found = FolderReader(running).read()
    assert {number: (job.node, job.began) for number, job in found.jobs.items()} == {
        0: ("n2", 5.0),
        1: ("n2", 5.0),
    }
    assert found.claims == {0: JobId("7", 0), 1: JobId("7", 1)}
    assert (
        found.jobs[0].alive == found.jobs[1].alive == (running / "head-1/heartbeat").stat().st_mtime
    )


def test_a_running_job_tells_its_setup_and_its_lost_nodes(running: Path) -> None:
    """The first by its workers, the others in files of their own: that of the job is not read."""
    write_events(running, connected("a", run={**RUN, "setup": "false failed"}))
    for run, number in ((RUN["name"], 3), ("1-n9-9", 4)):
        line = {"event": "node lost", "run": run, "number": number, "reason": f"lost {number}"}
        (running / f"jobs/0-n{number}.jsonl").write_text(f"\n{json.dumps(line)}\n")
    found = FolderReader(running).read()
    assert {n: job.setup for n, job in found.jobs.items() if job.setup} == {0: "false failed"}
    assert [node.reason for node in found.lost_nodes.values()] == ["lost 3"]


def test_a_report_names_the_damaged_file_of_a_running_job(running: Path) -> None:
    file = running / "jobs" / "0.jsonl"
    file.write_text("{\n" + file.read_text())
    assert not FolderReader(running).read().damaged
    found = FolderReader(running, in_full=True).read()
    assert any(str(file) in problem for problem in findings.problems(found))
    assert (found.jobs[0].node, found.jobs[0].began) == ("n2", 5.0)


@pytest.mark.parametrize("how", ["silent", "ended", "gone"])
def test_files_of_a_job_are_read_when_its_workers_prove_nothing(running: Path, how: str) -> None:
    (running / "jobs/0.claim").write_text("8[0]\n")  # it starts again
    if how == "silent":
        os.utime(running / "head-1/heartbeat", (1.0, 1.0))
    elif how == "ended":
        (running / "ended").write_text('{"kind": "done", "exit_code": 0}')
    else:
        write_events(running, disconnected("a"))
    assert FolderReader(running).read().claims[0] == JobId("8", 0)


@pytest.mark.parametrize("text", ["-1", "--me", "7 8", "$(id)", "7;rm"])
def test_a_worker_cannot_smuggle_an_option_into_the_ids(running: Path, text: str) -> None:
    write_events(running, connected("a", run={**RUN, "id": text}))
    found = FolderReader(running).read()
    assert 0 not in found.claims and "jobs/0.claim is damaged" in found.damaged[0]


# -- the writer ------------------------------------------------------------------------------------
def test_a_worker_that_restarts_again_and_again_writes_once_a_minute_in_the_end() -> None:
    queue, written = EventQueue(most=10), []
    for second in range(600):
        for event in (connected("a", float(second)), disconnected("a", second + 0.5)):
            queue.add(event)
        if second == 300:
            queue.add(connected("b"))
        written += queue.take(float(second))
    assert written[:10] == [
        event
        for second in range(5)
        for event in (connected("a", float(second)), disconnected("a", second + 0.5))
    ]
    assert connected("b") in written  # another one need not wait
    assert 18 <= len(written) <= 22 and queue
    assert queue.take(600.0, everything=True) == [disconnected("a", 599.5)] and not queue
    assert fold(*written).gone and "b" in fold(*written).connected


def test_why_the_cluster_ends_never_waits() -> None:
    queue, end = EventQueue(most=0), Event(event="idle", reason="no tasks")
    for event in (Event(event="idle", ends_at=1.0), Event(event="idle", ends_at=2.0), end):
        queue.add(event)
        queue.take(5.0)
    queue.add(end)
    assert queue.take(5.0) == [end]


def test_two_threads_read_each_event_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`jobs` of a Python cluster reads while its watch does; an event that is missed is missed for good."""
    folder = tmp_path / "svd-1"
    (folder / "jobs").mkdir(parents=True)
    folder.chmod(0o700)
    write_events(folder, OPENED)
    reader = FolderReader(folder)
    assert reader.read().dask.address == OPENED["address"]
    names = [f"svd-{number}" for number in range(4)]
    write_events(folder, *map(connected, names))
    both = threading.Barrier(2)

    class Slow:
        def __init__(self, file: Any) -> None:
            self.seek = file.seek
            self._file = file

        def __iter__(self) -> Iterator[bytes]:
            lines = list(self._file)
            # Until the other thread has read these lines, too, if it may.
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(patience(0.5))
            return iter(lines)

    @contextlib.contextmanager
    def slowly(path: Path, size: int) -> Iterator[Slow]:
        with bounded(path, size) as file:
            yield Slow(file)

    with monkeypatch.context() as patch:
        patch.setattr("gpujobs.injob.events.bounded", slowly)
        threads = [threading.Thread(target=reader.read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [*reader.read().dask.connected] == names
    write_events(folder, *map(disconnected, names))
    found = reader.read()
    assert not found.dask.connected and not found.damaged
