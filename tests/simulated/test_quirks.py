"""What real batch schedulers do in time: signals that come early, jobs that stay listed after a cancel."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpujobs.batch.client import SchedulerClient
from gpujobs.planning.render import render
from gpujobs.schedulers import JobId, JobState, get_scheduler

from ..conftest import FAKES
from ..support.cli import text_of
from ..support.fakes import FakeBackend
from ..support.processes import until
from ..unit.support import plan

pytestmark = pytest.mark.parametrize("backend", FAKES, indirect=True)


@pytest.fixture
def batch(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> SchedulerClient:
    for name, value in backend.env().items():
        monkeypatch.setenv(name, value)
    return SchedulerClient(get_scheduler(backend.name)(), timeout=6.0)


@pytest.fixture
def name() -> str:
    return f"quirk-{secrets.token_hex(2)}"


@pytest.fixture
def submit(
    backend: FakeBackend, batch: SchedulerClient, name: str, tmp_path: Path
) -> Iterator[Callable[[str], JobId]]:
    """Return a function that submits a job of ten minutes with a body of its own."""
    (tmp_path / "here.yaml").write_text(text_of(backend.site()))

    def go(body: str) -> JobId:
        text = render(plan(tmp_path, {"gpus": 1}, str(tmp_path / "here.yaml")), name)[0].text
        return JobId(batch.submit(text.partition("\n\n")[0] + f"\n{body}\n", name, (), tmp_path))

    yield go
    backend.clean()


def state(batch: SchedulerClient, job: JobId, name: str) -> JobState:
    return batch.status([job], [name])[job].state


def test_signal_of_the_walltime_comes_early(
    backend: FakeBackend, submit: Callable[[str], JobId], tmp_path: Path
) -> None:
    backend.quirk(early_signal=598)
    got = tmp_path / "got"
    submit(f"trap 'echo signal >> {got}' TERM USR2\nwhile true; do sleep 60 & wait; done")
    until(got.exists, 20, "the signal")
    time.sleep(1)
    assert got.read_text() == "signal\n"  # once


def test_cancelled_job_stays_listed_until_it_is_killed(
    backend: FakeBackend, batch: SchedulerClient, submit: Callable[[str], JobId], name: str
) -> None:
    backend.quirk(kill_delay=3)
    job = submit("sleep 60")
    until(lambda: state(batch, job, name) is JobState.RUNNING, 20)
    batch.cancel([job], [name])  # no error: it runs, and its processes are gone
    assert state(batch, job, name) is JobState.RUNNING
    until(lambda: state(batch, job, name) is JobState.CANCELLED, 30)
