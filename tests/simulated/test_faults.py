"""Faults of batch schedulers, switched on in the fakes, and how `SchedulerClient` handles them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpujobs.batch.client import SchedulerClient
from gpujobs.errors import RefusedError, UnavailableError
from gpujobs.schedulers import JobId, JobState

from ..conftest import FAKES, slow_variant
from ..support.cli import Cli
from ..support.fakes import FakeBackend
from ..support.processes import patience, until

pytestmark = [
    pytest.mark.conformance("pbs"),
    pytest.mark.parametrize("backend", FAKES, indirect=True),
]
Submit = Callable[..., str]


@pytest.fixture
def submit(submit_body: Callable[[str, dict[str, int]], str]) -> Submit:
    """Return a function that submits jobs which sleep for long, with the directives of real ones."""

    def go(jobs: int = 2, gpus_per_job: int = 1) -> str:
        return submit_body("sleep 600", {"gpus": jobs * gpus_per_job, "gpus_per_job": gpus_per_job})

    return go


def ids(batch: SchedulerClient, number: str, jobs: int = 2) -> list[JobId]:
    """Return the ids of the jobs of a submission."""
    if jobs == 1:
        return [JobId(number)]
    return [JobId(number, n + batch.scheduler.first_index) for n in range(jobs)]


def states(batch: SchedulerClient, jobs: list[JobId]) -> set[JobState]:
    return {status.state for status in batch.status(jobs, []).values()}


def taken(backend: FakeBackend) -> int:
    """Return how many submissions the batch scheduler has taken and not ended."""
    return len({job["id"] for job in backend.jobs() if job["state"] != "done"})


# -- submit ------------------------------------------------------------------------------------------------------
def test_a_refused_submission_leaves_no_job(backend: FakeBackend, submit: Submit) -> None:
    backend.fault("refuse", "submit")
    with pytest.raises(RefusedError, match="refused the job"):
        submit()
    assert taken(backend) == 0


@pytest.mark.parametrize("jobs", [slow_variant(1), 2])
def test_a_job_whose_reply_never_comes_is_adopted_once(
    backend: FakeBackend, batch: SchedulerClient, submit: Submit, jobs: int
) -> None:
    backend.fault("timeout", "submit", times=1)
    number = submit(jobs)
    assert taken(backend) == 1
    assert states(batch, ids(batch, number, jobs)) <= {JobState.RUNNING, JobState.PENDING}


def test_a_job_with_a_garbled_reply_is_adopted_once(
    backend: FakeBackend, batch: SchedulerClient, submit: Submit
) -> None:
    backend.fault("garble", "submit", times=1)
    number = submit()
    assert taken(backend) == 1
    assert states(batch, ids(batch, number)) <= {JobState.RUNNING, JobState.PENDING}


@pytest.mark.parametrize("fault", ["busy", "down"])
def test_a_submission_is_tried_again_until_the_batch_scheduler_is_there(
    backend: FakeBackend, batch: SchedulerClient, submit: Submit, fault: str
) -> None:
    backend.fault(fault, "submit", times=1)
    number = submit()
    assert taken(backend) == 1
    assert states(batch, ids(batch, number)) <= {JobState.RUNNING, JobState.PENDING}


@pytest.mark.waits
def test_a_batch_scheduler_that_stays_away_is_unavailable(
    backend: FakeBackend, submit: Submit
) -> None:
    backend.fault("down")
    with pytest.raises(UnavailableError):
        submit()
    backend.fault("")
    assert taken(backend) == 0


# -- watch -------------------------------------------------------------------------------------------------------
def test_a_job_that_is_not_listed_is_not_finished(
    backend: FakeBackend, batch: SchedulerClient, submit: Submit
) -> None:
    jobs = ids(batch, submit())
    until(lambda: states(batch, jobs) == {JobState.RUNNING}, 20)
    backend.fault("forget", "query")
    assert states(batch, jobs) == {JobState.UNKNOWN}
    backend.fault("")
    assert states(batch, jobs) == {JobState.RUNNING}


@pytest.mark.parametrize("fault", ["down", "busy", "timeout", "garble"])
def test_no_answer_says_nothing_of_the_jobs(
    backend: FakeBackend, batch: SchedulerClient, submit: Submit, fault: str
) -> None:
    jobs = ids(batch, submit())
    backend.fault(fault, "query")
    with pytest.raises(UnavailableError):
        replace(batch, timeout=patience(2.0)).status(jobs, [])
    backend.fault("")
    assert states(batch, jobs) <= {JobState.RUNNING, JobState.PENDING}


def test_pending_jobs_of_an_array_that_has_begun_have_a_reason(
    backend: FakeBackend, batch: SchedulerClient, submit: Submit
) -> None:
    full = backend.nodes * backend.gpus_per_node // 4
    jobs = ids(batch, submit(full + 2, gpus_per_job=4), full + 2)
    until(lambda: states(batch, jobs) == {JobState.RUNNING, JobState.PENDING}, 20)
    found = batch.status(jobs, [])
    assert [found[job].state for job in jobs].count(JobState.PENDING) == 2
    assert all(found[job].reason for job in jobs[-2:]) and all(found[job].node for job in jobs[:-2])


# -- cancel ------------------------------------------------------------------------------------------------------
def test_a_cancel_of_a_member_leaves_the_others(
    backend: FakeBackend, batch: SchedulerClient, submit: Submit, name: str
) -> None:
    number = submit(3)
    jobs = ids(batch, number, 3)
    until(lambda: states(batch, jobs) == {JobState.RUNNING}, 20)
    batch.cancel([jobs[1]], [name], [jobs[0], jobs[2]])
    until(lambda: batch.status(jobs, [])[jobs[1]].state is JobState.CANCELLED, 20)
    assert states(batch, [jobs[0], jobs[2]]) == {JobState.RUNNING}
    batch.cancel(jobs, [name])
    until(lambda: states(batch, jobs) == {JobState.CANCELLED}, 20)
    batch.cancel(jobs, [name])  # again: fine


def test_a_cancel_without_an_answer_is_tried_again(
    backend: FakeBackend, batch: SchedulerClient, submit: Submit, name: str
) -> None:
    jobs = ids(batch, submit())
    backend.fault("down", "delete", times=1)
    batch.cancel(jobs, [name])
    until(lambda: taken(backend) == 0, 20)


def test_a_cancel_that_is_refused_is_told(
    backend: FakeBackend, batch: SchedulerClient, submit: Submit, name: str
) -> None:
    jobs = ids(batch, submit())
    backend.fault("refuse", "delete")
    with pytest.raises(RefusedError, match="did not cancel"):
        batch.cancel(jobs, [name])
    assert taken(backend) == 1


def test_a_job_over_its_walltime_has_timed_out(
    backend: FakeBackend, batch: SchedulerClient, submit: Submit
) -> None:
    number = submit(1)
    job = ids(batch, number, 1)
    until(lambda: states(batch, job) == {JobState.RUNNING}, 20)
    backend.expire(number)
    until(lambda: states(batch, job) == {JobState.TIMEOUT}, 20)


# -- all of it ---------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_cluster_whose_submission_lost_its_reply_has_its_jobs_once(
    cli: Cli, backend: FakeBackend
) -> None:
    backend.fault("timeout", "submit", times=1)
    cluster = cli.submit({"gpus": 4, "gpus_per_job": 2})
    until(lambda: len(cli.status(cluster)["workers"]["connected"]) == 4, 90)
    assert len([line for line in backend.queue() if cluster in line]) == 2
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(30, cluster)
