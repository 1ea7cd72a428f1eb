"""What real batch schedulers do in time: signals that come early, jobs that stay listed after a cancel."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpujobs.batch.client import SchedulerClient
from gpujobs.schedulers import JobId, JobState

from ..conftest import FAKES
from ..support.fakes import FakeBackend
from ..support.processes import until

pytestmark = pytest.mark.parametrize("backend", FAKES, indirect=True)


@pytest.fixture
def submit(submit_body: Callable[[str, dict[str, int]], str]) -> Callable[[str], JobId]:
    """Return a function that submits a job of ten minutes with a body of its own."""
    return lambda body: JobId(submit_body(body, {"gpus": 1}))


def state(batch: SchedulerClient, job: JobId, name: str) -> JobState:
    return batch.status([job], [name])[job].state


def test_the_signal_of_the_walltime_comes_early(
    backend: FakeBackend, submit: Callable[[str], JobId], tmp_path: Path
) -> None:
    backend.quirk(early_signal=598)
    got = tmp_path / "got"
    submit(f"trap 'echo signal >> {got}' TERM USR2\nwhile true; do sleep 60 & wait; done")
    until(got.exists, 20, "the signal")
    time.sleep(1)
    assert got.read_text() == "signal\n"  # once


def test_a_cancelled_job_stays_listed_until_it_is_killed(
    backend: FakeBackend, batch: SchedulerClient, submit: Callable[[str], JobId], name: str
) -> None:
    backend.quirk(kill_delay=3)
    job = submit("sleep 600")
    until(lambda: state(batch, job, name) is JobState.RUNNING, 20)
    batch.cancel([job], [name])  # no error: it runs, and its processes are gone
    assert state(batch, job, name) is JobState.RUNNING
    until(lambda: state(batch, job, name) is JobState.CANCELLED, 30)
