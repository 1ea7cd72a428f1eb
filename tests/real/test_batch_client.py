"""What every batch scheduler must do with jobs that wait, through the code that talks with it.

The jobs are held, so that they need no free node, and start nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.batch.client import SchedulerClient
from gpujobs.clusters.submit import intent_of
from gpujobs.planning.render import render
from gpujobs.schedulers import JobId, JobState, get_scheduler

from ..support.backend import Backend
from ..support.cli import text_of
from ..support.processes import patience, until
from ..unit.support import plan

pytestmark = pytest.mark.conformance
Submit = Callable[[int], list[JobId]]
NOWHERE = {JobState.CANCELLED, JobState.UNKNOWN}
"""States of a job that was cancelled while it waited; some batch schedulers forget it."""


@pytest.fixture
def batch(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> SchedulerClient:
    for name, value in backend.env().items():
        monkeypatch.setenv(name, value)
    site = backend.site()
    scheduler = get_scheduler(site["scheduler"])(site.get("cluster"))
    return SchedulerClient(scheduler, site.get("commands", {}), timeout=patience(20.0))


@pytest.fixture
def name() -> str:
    """The name of this test's jobs."""
    return f"held-{secrets.token_hex(2)}"


@pytest.fixture
def submit(
    backend: Backend, batch: SchedulerClient, name: str, shared_folder: Path, tmp_path: Path
) -> Iterator[Submit]:
    """Return a function that submits held jobs; all are cancelled at the end."""
    (tmp_path / "here.yaml").write_text(text_of(backend.site()))
    if templates := backend.templates():
        (tmp_path / "templates").symlink_to(templates)
    jobs: list[JobId] = []
    submissions: list[str] = []

    def go(count: int) -> list[JobId]:
        profile = {"gpus": count, "gpus_per_job": 1, "directives": [backend.hold]}
        made = plan(tmp_path, profile, str(tmp_path / "here.yaml"))
        limit = batch.array_limit() or batch.scheduler.largest_array
        found: list[JobId] = []
        for script in render(made, name, limit=limit, site_folder=tmp_path):
            number = batch.submit(script.text, name, submissions, shared_folder)
            submissions.append(number)
            sent = replace(intent_of(script, ""), id=number)
            sent = replace(sent, first_index=batch.scheduler.first_index)
            found.extend(sent.jobs.values())
            jobs.extend(sent.jobs.values())
        return found

    yield go
    batch.cancel(jobs, [name])


def states(batch: SchedulerClient, jobs: list[JobId], name: str) -> set[JobState]:
    return {status.state for status in batch.status(jobs, [name]).values()}


@pytest.mark.conformance("sge", "pbs")
def test_three_submissions_are_answered_by_one_query(
    batch: SchedulerClient, submit: Submit, name: str
) -> None:
    jobs = [*submit(1), *submit(2), *submit(1)]
    found = batch.status(jobs, [name])
    assert {str(job): status.state for job, status in found.items()} == dict.fromkeys(
        map(str, jobs), JobState.PENDING
    )
    assert batch.find(name) == {job.submission for job in jobs}


def test_arrays_and_lone_jobs_are_cancelled_while_they_wait(
    batch: SchedulerClient, submit: Submit, name: str
) -> None:
    array, lone = submit(2), submit(1)
    more, other = submit(3), submit(1)
    batch.cancel([*array, *lone], [name])
    assert states(batch, [*array, *lone], name) <= NOWHERE
    assert states(batch, [*more, *other], name) == {JobState.PENDING}
    batch.cancel([*more, *other], [name])
    assert states(batch, [*more, *other], name) <= NOWHERE
    batch.cancel([*array, *lone], [name])  # again: no error


@pytest.mark.conformance("sge", "pbs")
def test_given_up_members_of_two_arrays_leave_the_others_pending(
    batch: SchedulerClient, submit: Submit, name: str
) -> None:
    first, second, lone = submit(4), submit(6), submit(1)
    kept = [*first[:3], second[0], second[4]]
    given_up = [second[2], *lone, second[1], first[3], second[5], second[3]]
    batch.cancel(given_up, [name], kept)
    assert states(batch, kept, name) == {JobState.PENDING}
    assert states(batch, given_up, name) <= NOWHERE


def test_a_shown_id_is_one_for_the_commands_of_the_batch_scheduler(
    backend: Backend, batch: SchedulerClient, submit: Submit, name: str
) -> None:
    array, lone = submit(3), submit(1)
    for job in (array[1], *lone):
        backend.kill_job(batch.scheduler.show_id(job))
    until(lambda: states(batch, [array[1], *lone], name) <= NOWHERE, 20)
    assert states(batch, [array[0], array[2]], name) == {JobState.PENDING}
