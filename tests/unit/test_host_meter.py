"""CPU time and memory of a job's processes, on a host that has those of others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpujobs.injob.children import HostMeter

from ..support.processes import until
from .test_events import opened_by

TICKS = os.sysconf("SC_CLK_TCK")
JOBS, PROCESSES = 4, 8
"""Of a host; a job has a batch script without marks, and processes of workers."""
FOLDER = "/shared/svd-7f3a"


class Host:
    """A stand-in for /proc. The processes of a job have the session of its script."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.sessions: dict[int, int] = {}

    def add(
        self, pid: int, session: int, parent: int = 1, job: int | None = None, seconds: float = 0
    ) -> None:
        folder = self.proc / str(pid)
        folder.mkdir()
        marks = "" if job is None else f"GPUJOBS_FOLDER={FOLDER}\0GPUJOBS_JOB={job}\0"
        (folder / "environ").write_text(f"HOME=/home/ada\0{marks}")
        ticks = round(seconds * TICKS)
        (folder / "stat").write_text(f"{pid} (a) S {parent} {' '.join('0' * 9)} {ticks} 0 0 0 20")
        (folder / "status").write_text("VmRSS:\t 2048 kB\nRssFile:\t 1024 kB\n")
        self.sessions[pid] = session

    def meter(self, job: int) -> HostMeter:
        return HostMeter(FOLDER, job, self.proc, self.session)

    def session(self, pid: int) -> int:
        if pid not in self.sessions:
            raise ProcessLookupError
        return self.sessions[pid]


def script_of(job: int) -> int:
    return 1000 + 100 * job


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(tmp_path)
    for job in range(JOBS):
        script = script_of(job)
        host.add(script, session=script)
        for pid in range(script + 1, script + PROCESSES):
            host.add(pid, session=script, parent=script, job=job)
    run_in(host, monkeypatch, job=0)
    return host


def run_in(host: Host, monkeypatch: pytest.MonkeyPatch, job: int) -> None:
    """Let this process be the sampler of a job, which the first process below its script starts."""
    own = script_of(job) + PROCESSES
    if own not in host.sessions:
        host.add(own, session=script_of(job), parent=script_of(job) + 1, job=job)
    monkeypatch.setattr(os, "getpid", lambda: own)
    monkeypatch.setattr(os, "getppid", lambda: script_of(job) + 1)


def test_meters_of_all_jobs_of_a_host_cost_less_than_one_look_at_all_processes(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    for job in range(JOBS):
        run_in(host, monkeypatch, job)
        opened += opened_by(lambda job=job: host.meter(job), host.proc)  # type: ignore[misc]
    looked_at = [name for name in opened if name.endswith("/environ")]
    assert len(looked_at) == JOBS * (JOBS - 1)  # one of each other job
    assert len(looked_at) < JOBS * PROCESSES


def test_a_later_look_costs_only_new_sessions(host: Host) -> None:
    meter = host.meter(0)
    host.add(5000, session=script_of(1), parent=script_of(1), job=1)
    assert not [name for name in opened_by(meter.measure, host.proc) if "environ" in name]
    host.add(5001, session=5001, job=1)
    looked_at = [name for name in opened_by(meter.measure, host.proc) if "environ" in name]
    assert looked_at == ["5001/environ"]


def test_a_process_in_a_session_of_its_own_is_the_jobs_by_its_marks(host: Host) -> None:
    meter = host.meter(0)
    assert meter.measure()[0] == 0
    host.add(6000, session=6000, job=0, seconds=2)  # its parent has exited
    host.add(6001, session=6000, seconds=3)  # and its child without marks
    host.add(6002, session=6002, job=1, seconds=5)
    assert meter.measure()[0] == 5


def test_a_session_that_jobs_share_is_divided_by_the_marks(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a terminal with `run --here`, whose shell is no part of the job."""
    for pid in list(host.sessions):
        host.sessions[pid] = 900
    host.add(900, session=900, seconds=1)
    host.add(7000, session=900, job=1, seconds=2)
    meter = host.meter(0)
    host.add(7001, session=900, job=0, seconds=4)
    host.add(7002, session=900, job=1, seconds=8)
    assert meter.measure()[0] == 4


def test_the_session_of_a_supervisor_is_the_jobs_also_for_a_meter_in_its_process(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = script_of(0)
    host.add(9000, session=script, parent=script, seconds=2)  # without marks
    monkeypatch.setattr(os, "getpid", lambda: script)
    for supervisor in (script, script + 1):  # a launcher has started it, or the batch script
        meter = HostMeter(FOLDER, 0, host.proc, host.session, supervisor=supervisor)
        host.add(9001 + supervisor, session=script, parent=script, seconds=3)
        assert meter.measure()[0] == 3


def test_the_number_of_a_session_that_has_ended_is_looked_at_again(host: Host) -> None:
    host.add(8000, session=8000, job=1)
    meter = host.meter(0)
    assert meter.measure()[0] == 0
    for path in (host.proc / "8000").iterdir():
        path.unlink()
    (host.proc / "8000").rmdir()
    assert meter.measure()[0] == 0
    host.add(8000, session=8000, job=0, seconds=3)
    assert meter.measure()[0] == 3


def test_memory_is_measured_for_a_small_part_of_the_time(host: Host) -> None:
    """The CPU time of one look at it is 3 thousandths of the time until the next one."""
    process = host.proc / str(script_of(0) + 1)
    (process / "status").write_text("VmRSS:\t 2048 kB\n" + "Other:\t 0 kB\n" * 10_000)
    (process / "later").write_text("VmRSS:\t 4096 kB\n")
    meter, began = host.meter(0), time.process_time()
    memory = meter.measure()[1]
    cost = time.process_time() - began
    (process / "later").rename(process / "status")
    soon = time.monotonic() + 5 * cost
    while time.monotonic() < soon:
        assert meter.measure()[1] == memory
    until(lambda: meter.measure()[1] > memory, 60)


def test_memory_is_that_of_all_processes_without_mapped_files(host: Host) -> None:
    assert host.meter(0).measure()[1] == (PROCESSES + 1) * 2**20
