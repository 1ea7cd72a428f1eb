"""Clusters of a Python process over hours, on a simulated Slurm: adaptive scaling, walltimes, lost replies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gpujobs.batch.client import SchedulerClient
from gpujobs.clusters.ledger import Submission
from gpujobs.clusters.monitor import RECOVERY_AGE, ClusterMonitor, recover_submission
from gpujobs.clusters.progress import LibraryProgress
from gpujobs.clusters.report import JobPhase
from gpujobs.deploy.elastic import JobAdaptive, check_bounds, check_options
from gpujobs.deploy.scaler import wait_for
from gpujobs.errors import GpujobsError, InputError, JobFailedError, RefusedError
from gpujobs.injob.folder import Ended, EndKind, Folder
from gpujobs.schedulers import CommandResult
from gpujobs.schedulers.slurm import Slurm

from ..conftest import slow_variant
from ..support.churn import CPU_QUEUE, GROUPS
from ..support.elastic import PROFILE, SITE, SimulatedCluster, simulate, slurm_of
from ..support.jobevents import facts_of, write_job
from ..support.simulated import REFUSED, SimulatedSlurm

Story = Callable[[SimulatedCluster, SimulatedSlurm], Any]


def run(folder: Path, story: Story, slurm: SimulatedSlurm | None = None, **options: Any) -> None:
    """Run ``story`` with a new cluster in jobs of two workers, and check that no rule was broken."""
    host = slurm or slurm_of(folder)

    async def play() -> None:
        cluster = SimulatedCluster(folder, host, **options)
        await story(cluster, host)
        cluster.stop()

    simulate(host, play)
    assert not host.faults


def numbers(cluster: SimulatedCluster) -> list[int]:
    return sorted(job.report.number for job in cluster.counting())


def test_the_maximum_is_a_number_of_whole_jobs(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.demand = lambda group: 100
        adaptive = cluster.adapt(minimum=0, maximum=5)
        await asyncio.sleep(120)
        assert len(slurm.alive) == 2  # of two workers
        adaptive.maximum = 1
        with pytest.raises(InputError, match="no number of jobs of 2 workers has 0 to 1 workers"):
            check_bounds(adaptive, cluster._pool.groups[""])

    run(tmp_path, story)


def test_jobs_above_a_new_maximum_leave_within_seconds_although_they_are_busy(
    tmp_path: Path,
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.demand = lambda group: 100
        adaptive = cluster.adapt(minimum=0, maximum=6)
        await asyncio.sleep(120)
        assert numbers(cluster) == [0, 1, 2]
        adaptive.maximum = 2
        await asyncio.sleep(4)
        assert len(numbers(cluster)) == 1 and len(cluster.released) == 2
        await asyncio.sleep(120)
        assert len(slurm.alive) == 1
        assert slurm.faults
        slurm.faults.clear()  # busy jobs were released

    run(tmp_path, story)


def test_a_job_whose_workers_leave_early_is_replaced_before_it_ends(tmp_path: Path) -> None:
    """It counts no more, also when they have left and Slurm still has it."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(2)
        await asyncio.sleep(120)
        assert numbers(cluster) == [0, 1]
        cluster.dask.leaving = {*slurm.alive[0].workers}
        await asyncio.sleep(120)
        assert numbers(cluster) == [1, 2] and len(slurm.alive) == 3
        slurm.retired.update(cluster.dask.leaving)
        cluster.dask.leaving = set()
        await asyncio.sleep(20)
        assert numbers(cluster) == [1, 2]
        await asyncio.sleep(300)
        assert [job.number for job in slurm.alive] == [1, 2]

    run(tmp_path, story)


def test_a_job_whose_workers_stay_after_all_counts_again(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(2)
        await asyncio.sleep(120)
        cluster.dask.leaving = {*slurm.alive[0].workers}
        await asyncio.sleep(10)
        assert numbers(cluster) == [1, 2]
        cluster.dask.leaving = set()
        await asyncio.sleep(120)
        assert len(numbers(cluster)) == 2 == len(slurm.alive)

    run(tmp_path, story)


def test_a_minimum_above_the_maximum_is_said_in_these_words(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        adaptive = cluster.adapt(minimum=6, maximum=2)
        message = "adapt: the minimum of 6 workers is above the maximum of 2"
        with pytest.raises(InputError, match=message):
            check_bounds(adaptive, cluster._pool.groups[""])

    run(tmp_path, story)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("maximun", "did you mean maximum"), ("gpus", "adapt has Adaptive, grace, group")],
)
def test_an_unknown_keyword_of_adapt_is_an_error(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"adapt: unknown keyword {name}") as error:
        check_options(["minimum", "maximum_memory", "interval", "hold", "wait_count", name])
    assert hint in (error.value.problems[0].hint or "")


def test_a_moment_of_less_demand_cancels_no_pending_job(tmp_path: Path) -> None:
    demand = [8]

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.demand, slurm.wait = lambda group: demand[0], lambda: 7200.0
        cluster.adapt(minimum=0, maximum=8)
        await asyncio.sleep(600)
        before = numbers(cluster)
        demand[0] = 0
        await asyncio.sleep(20)
        demand[0] = 8
        await asyncio.sleep(60)
        assert numbers(cluster) == before == [0, 1, 2, 3]
        demand[0] = 2
        await asyncio.sleep(60)
        assert len(slurm.alive) == 1

    run(tmp_path, story)


def test_an_idle_job_that_is_lost_is_not_replaced(tmp_path: Path) -> None:
    demand = [8]

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.demand = lambda group: demand[0]
        cluster.adapt(minimum=2, maximum=8, hold="30m")
        await asyncio.sleep(120)
        demand[0] = 0
        await asyncio.sleep(120)
        slurm.end(slurm.running[3], "PREEMPTED", 143)
        await asyncio.sleep(300)
        assert len(slurm.jobs) == 4 and len(slurm.alive) == 3  # idle ones are kept for half an hour
        slurm.end(slurm.running[2], "PREEMPTED", 143)
        slurm.end(slurm.running[1], "PREEMPTED", 143)
        slurm.end(slurm.running[0], "PREEMPTED", 143)
        await asyncio.sleep(300)
        assert len(slurm.running) == 1  # the minimum

    run(tmp_path, story)


def test_jobs_that_wait_for_a_pause_are_not_submitted_without_demand(tmp_path: Path) -> None:
    demand = [4]

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.demand = lambda group: demand[0]
        cluster.adapt(minimum=0, maximum=8)
        await asyncio.sleep(120)
        slurm.away_until = slurm.seconds + 300
        demand[0] = 8
        await asyncio.sleep(200)
        demand[0] = 4
        await asyncio.sleep(1200)
        assert len(slurm.alive) == 2

    run(tmp_path, story)


@pytest.mark.parametrize("state", ["NODE_FAIL", "CANCELLED", "COMPLETED"])
def test_a_replaced_job_that_is_requeued_counts_again(tmp_path: Path, state: str) -> None:
    """Slurm may requeue a job that it has reported as ended; the surplus is removed."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(3)
        await asyncio.sleep(120)
        lost = slurm.running[1]
        slurm.end(lost, state, None if state == "NODE_FAIL" else 0)
        await asyncio.sleep(120)
        assert len(slurm.running) == 3 and lost.state == state
        slurm.restore(lost)
        await asyncio.sleep(20)
        assert not cluster.orphans
        await asyncio.sleep(120)
        assert len(slurm.alive) == len(cluster.counting()) == 3 and len(slurm.connected) == 6

    run(tmp_path, story)


def test_a_requeued_job_is_taken_back_when_its_replacement_is_lost(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(2)
        await asyncio.sleep(120)
        lost = slurm.running[0]
        slurm.refuse_until = slurm.seconds + 12
        slurm.end(lost, "NODE_FAIL", None)
        await asyncio.sleep(6)
        slurm.restore(lost)
        await asyncio.sleep(300)
        assert numbers(cluster) == [0, 1] and len(slurm.jobs) == 2 and len(slurm.connected) == 4
        reports = cluster._job_reports()
        assert [job.number for job in reports] == [0, 1]

    run(tmp_path, story)


def test_jobs_that_leave_after_their_tasks_are_taken_back_before_new_ones_are_submitted(
    tmp_path: Path,
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        cluster.dask.task_seconds = 300.0
        await cluster.scale_to(3)
        await asyncio.sleep(120)
        await cluster.scale_to(1)
        await asyncio.sleep(5)
        assert numbers(cluster) == [0]
        cluster.dask.moving = {slurm.jobs[2].workers[1]}  # the other one leaves with it
        await cluster.scale_to(4)
        await asyncio.sleep(60)
        assert numbers(cluster) == [0, 1, 3, 4] and len(slurm.jobs) == 5
        assert cluster.ledger.get(cluster.id).removed == (2,)
        await asyncio.sleep(400)
        assert [job.number for job in slurm.running] == [0, 1, 3, 4]

    run(tmp_path, story)


@pytest.mark.parametrize("task_seconds", [60.0, float("inf")], ids=["ends", "hangs"])
def test_jobs_on_a_node_that_turned_bad_are_replaced_once(
    tmp_path: Path, task_seconds: float
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        cluster.dask.task_seconds = task_seconds
        await cluster.scale_to(2)
        await asyncio.sleep(120)
        await cluster.scale_to(3)
        await asyncio.sleep(10)
        slurm.fail(slurm.jobs[2], "worker x ended: killed; Xid 79 at 0000:09:00")
        await asyncio.sleep(30)
        assert numbers(cluster) == [3, 4, 5] and len(slurm.alive) == 5
        await asyncio.sleep(600)  # the new ones have started there although it is bad
        assert numbers(cluster) == [3, 4, 5] == [job.number for job in slurm.alive]

    run(tmp_path, story)


def test_a_job_whose_successor_is_due_is_not_taken_back(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        cluster.dask.task_seconds = 600.0
        await cluster.scale_to(1)
        await asyncio.sleep(1000)
        await cluster.scale_to(0)
        await asyncio.sleep(60)
        await cluster.scale_to(1)
        assert numbers(cluster) == [1]

    run(tmp_path, story, site={"defaults": {"walltime": "20m"}})


def test_a_removed_job_that_is_requeued_is_cancelled_again(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(3)
        await asyncio.sleep(120)
        await cluster.scale_to(2)
        await asyncio.sleep(120)
        (removed,) = (job for job in slurm.jobs if not job.alive)
        slurm.restore(removed)
        await asyncio.sleep(120)
        assert len(slurm.alive) == 2 and numbers(cluster) == [0, 1]

    run(tmp_path, story)


def test_the_first_start_that_fails_is_repeated_without_a_pause(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(1)
        while not slurm.running:
            await asyncio.sleep(1)
        slurm.end(slurm.running[0], "FAILED", 1)
        while not cluster.pool.jobs.past:
            await asyncio.sleep(0.1)
        await asyncio.sleep(5)  # less than the next look
        assert len(slurm.jobs) == 2

    run(tmp_path, story, interval=20.0)


def test_a_job_that_slurm_holds_after_a_failed_launch_is_replaced(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(3)
        await asyncio.sleep(120)
        slurm.fail_launch(slurm.running[1])
        await asyncio.sleep(120)
        assert len(slurm.running) == len(cluster.counting()) == 3
        assert not [job for job in slurm.alive if job.state == "PENDING"]
        (past,) = (job for job in cluster._job_reports() if not job.active)
        assert past.failed and past.reason.startswith("launch failed requeued held")

    run(tmp_path, story)


def test_an_id_that_slurm_gives_twice_is_another_job(tmp_path: Path) -> None:
    """A controller that loses its last job in a crash starts again with the id of that job."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(1)
        await asyncio.sleep(5)
        slurm.forget(slurm.jobs[0])
        await asyncio.sleep(300)
        first, second = slurm.jobs
        assert first.id == second.id and second.state == "RUNNING"
        assert numbers(cluster) == [1] and len(slurm.connected) == 2
        await cluster.scale_to(2)
        await asyncio.sleep(120)
        assert len(slurm.running) == 2 and second.state == "RUNNING"

    run(tmp_path, story)


def test_a_report_from_before_a_submission_does_not_end_the_wait_for_its_reply(
    tmp_path: Path,
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(1)
        pool, lock = cluster.pool, asyncio.Lock()
        async with lock:
            refresh = asyncio.ensure_future(pool.refresh(None, lock))
            await asyncio.sleep(1)  # its report is made
            cluster.ledger.begin_submission(cluster.id, Submission("", 1, 1, time=slurm.time()))
            pool.unanswered = True
        await refresh
        assert pool.unanswered

    run(tmp_path, story)


def test_after_a_refused_scale_the_present_jobs_are_kept(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(2)
        await asyncio.sleep(120)
        slurm.refuse_until = slurm.seconds + 10
        with pytest.raises(RefusedError):
            await cluster.scale_to(4)
        await asyncio.sleep(60)
        slurm.end(slurm.running[0], "PREEMPTED", 143)
        await asyncio.sleep(120)
        assert len(cluster.counting()) == len(slurm.running) == 2

    run(tmp_path, story)


def test_the_whole_reason_of_a_refused_replacement_is_shown_until_it_is_accepted(
    tmp_path: Path,
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(2)
        await asyncio.sleep(120)
        slurm.refuse_until = slurm.seconds + 12
        slurm.end(slurm.running[0], "NODE_FAIL", None)
        await asyncio.sleep(8)
        (shown,) = (
            ClusterMonitor([cluster.pool.record], cluster.ledger, system=slurm).report().errors
        )
        assert shown == f"no more jobs: slurm refused the job: {' '.join(REFUSED.split())}"
        await asyncio.sleep(300)
        assert len(slurm.running) == 2
        assert (
            not ClusterMonitor([cluster.pool.record], cluster.ledger, system=slurm).report().errors
        )

    run(tmp_path, story)


def test_workers_of_a_job_that_slurm_has_cancelled_too_early_are_retired(tmp_path: Path) -> None:
    """A job that is cancelled while it is launched may run all the same, unknown to Slurm."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(3)
        await asyncio.sleep(6)
        await cluster.scale_to(2)
        await asyncio.sleep(60)
        (removed,) = (job for job in slurm.jobs if not job.alive)
        for event in ("script", "started"):
            write_job(cluster.folder, removed.number, event, run="again")
        slurm.connected.update(dict.fromkeys(removed.workers, removed))
        slurm.on_connect()
        await asyncio.sleep(10)
        assert slurm.retired.issuperset(removed.workers)

    run(tmp_path, story)


def test_a_requeued_job_of_a_cluster_without_jobs_is_released(tmp_path: Path) -> None:
    demand = [2]

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.demand = lambda group: demand[0]
        cluster.adapt(minimum=0, maximum=8, hold="1m")
        await asyncio.sleep(300)
        demand[0] = 0
        await asyncio.sleep(300)
        assert not slurm.alive and len(slurm.jobs) == 1
        slurm.restore(slurm.jobs[0])
        await asyncio.sleep(300)
        assert not slurm.alive and len(slurm.jobs) == 1

    run(tmp_path, story)


@pytest.mark.parametrize("limited", ["adapt", *map(slow_variant, ("site", "gpus", "slurm"))])
def test_jobs_at_the_maximum_are_replaced_at_their_walltimes(tmp_path: Path, limited: str) -> None:
    """The successor waits until the job has left; the cluster goes on over many walltimes."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.demand = lambda group: 8
        most: list[int] = []
        slurm.watchers.append(lambda: most.append(sum(job.occupies for job in slurm.alive)))
        if limited == "adapt":
            cluster.adapt(minimum=8, maximum=8)
        else:
            slurm.max_jobs = 4 if limited == "slurm" else slurm.max_jobs
            await cluster.scale_to(4)
        for _ in range(6):
            await asyncio.sleep(3600)
            assert not cluster.pool.errors
        await asyncio.sleep(300)
        assert max(most) == 4 and len(slurm.running) == 4

    queue = {"gpus_per_node": 4, "cpus_per_node": 8, "max_walltime": "1d"}
    queue |= {"site": {"max_jobs": 4}, "gpus": {"max_gpus_per_user": 8}}.get(limited, {})
    run(tmp_path, story, site={"queues": {"gpu": queue}}, interval=10.0)


def test_scale_of_a_cluster_that_has_ended_fails_while_its_jobs_are_still_there(
    tmp_path: Path,
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(2)
        await asyncio.sleep(60)
        Folder(cluster.pool.record.path).end(Ended(EndKind.SHUTDOWN, 0, "a client shut it down", 0))
        while not cluster.pool.errors:
            await asyncio.sleep(1)
        assert len(cluster.counting()) == 2
        with pytest.raises(JobFailedError, match="has ended: a client shut it down"):
            await cluster.scale_to(2)

    run(tmp_path, story)


@pytest.mark.parametrize(
    ("kind", "shown"),
    [(EndKind.IDLE, True), (EndKind.SHUTDOWN, True), (EndKind.WALLTIME, False)],
)
def test_an_end_that_was_asked_for_is_shown_and_another_one_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: EndKind, shown: bool
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(1)
        await asyncio.sleep(60)
        Folder(cluster.pool.record.path).end(Ended(kind, 0, "this is why", 0))
        await asyncio.sleep(60)
        said = [line for line in cluster.dask.messages if "this is why" in line]
        errors = [r.getMessage() for r in caplog.records if "this is why" in r.getMessage()]
        assert (len(said), len(errors)) == (int(shown), int(not shown)), (said, errors)

    run(tmp_path, story)


def test_a_look_that_outlives_the_begin_of_a_close_says_and_submits_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`close` does not wait for a call such as `jobs` that asks the batch scheduler meanwhile."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(2)
        await asyncio.sleep(60)
        cluster.dask.messages.clear()
        caplog.clear()
        async with cluster._scaler._refreshing:
            look = asyncio.ensure_future(cluster._scaler.refresh())
            await asyncio.sleep(0.5)
            cluster._scaler.stop()
            cluster.pool.end(EndKind.CLOSED, "closed by its owner")
            for job in slurm.running:
                slurm.end(job, "COMPLETED", 0)
        await look
        await cluster._scaler.refresh()
        await asyncio.sleep(120)
        assert not cluster.dask.messages and not caplog.messages
        assert not slurm.alive and len(slurm.jobs) == 2

    run(tmp_path, story)


def test_jobs_are_removed_by_scale_but_not_as_idle_while_dask_is_silent(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        async def silent() -> None:
            return None

        await cluster.scale_to(3)
        await asyncio.sleep(60)
        cluster.dask.load = silent  # type: ignore[method-assign, assignment]
        await cluster._scaler.release(cluster.dask.connected or ())
        assert len(cluster.counting()) == 3
        await cluster.scale_to(1)
        assert len(cluster.counting()) == 1

    run(tmp_path, story)


def test_a_step_of_adapt_that_was_stopped_keeps_the_target_of_scale(tmp_path: Path) -> None:
    """The widget of a cluster stops `adapt` when its button to scale is pressed."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        adaptive = JobAdaptive(cluster, interval=0, minimum=0, maximum=8)
        adaptive.state = "starting"  # without an interval it can only be asked for single steps
        cluster.adaptives[""] = adaptive
        answers, asks = asyncio.Event(), cluster.dask.load

        async def load() -> dict[str, int]:
            await answers.wait()
            return await asks()

        cluster.dask.load = load  # type: ignore[method-assign]
        step = asyncio.ensure_future(adaptive.adapt())
        await asyncio.sleep(1)
        adaptive.stop()
        await cluster.scale_to(2)
        answers.set()
        await step
        await asyncio.sleep(60)
        slurm.end(slurm.running[0], "NODE_FAIL", 1)
        await asyncio.sleep(200)
        assert len(slurm.alive) == 2

    run(tmp_path, story)


def test_a_submission_that_is_accepted_during_a_close_is_cancelled(tmp_path: Path) -> None:
    """Its reply comes after `close` has read which jobs there are."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.watchers.append(cluster.pool.end_all)
        await cluster.scale_to(2)
        await asyncio.sleep(60)
        assert len(slurm.jobs) == 2 and not slurm.alive
        assert not cluster.pool.record.finished  # `status` asks the batch scheduler how they ended
        assert cluster.pool.may_have_jobs

    run(tmp_path, story)


def test_arrays_that_were_not_submitted_before_a_close_are_not_submitted(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.watchers.append(lambda: slurm.calls["sbatch"] == 2 and cluster.pool.end_all())
        await cluster.scale_to(5)
        await asyncio.sleep(60)
        assert slurm.calls["sbatch"] == 2 and not slurm.alive

    run(tmp_path, story, site={"max_array_size": 1})


def test_the_jobs_of_a_closed_cluster_have_ended_by_its_close(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(2)
        await asyncio.sleep(60)
        await cluster.pool.end_jobs()
        found = [(job.phase, job.reason) for job in cluster.pool.latest(())]
        assert found == [(JobPhase.ENDED, "the cluster was closed")] * 2
        assert not slurm.running

    run(tmp_path, story)


def test_a_job_whose_successor_has_come_does_not_count_as_wanted(tmp_path: Path) -> None:
    """A group that adapts keeps its idle jobs, but not one that leaves before its walltime."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.demand = lambda group: 2
        cluster.adapt(minimum=2, maximum=8, hold="2h")
        await asyncio.sleep(3500)
        assert len(slurm.alive) == 2  # of two workers, and one of them leaves
        assert cluster.ledger.get(cluster.id).group("").workers == 2

    run(tmp_path, story)


def test_a_cancel_without_a_reply_is_repeated(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.wait = lambda: 3600.0
        await cluster.scale_to(4)
        await asyncio.sleep(60)
        slurm.away_until = slurm.seconds + 150
        with pytest.raises(GpujobsError):
            await cluster.scale_to(1)
        await asyncio.sleep(900)
        assert len(slurm.alive) == 1 and not cluster.orphans

    run(tmp_path, story)


def test_workers_that_connect_while_their_cancel_has_no_reply_are_retired(tmp_path: Path) -> None:
    """They must not get tasks: the repeated cancel would end them in the middle."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.wait, slurm.demand = lambda: 300.0, lambda group: 100
        await cluster.scale_to(4)
        await asyncio.sleep(60)
        slurm.away_until = slurm.seconds + 500
        with pytest.raises(GpujobsError):
            await cluster.scale_to(1)
        late = [job for job in slurm.jobs if job.number > 0]
        await asyncio.sleep(400 - slurm.seconds)
        assert slurm.seconds < slurm.away_until and late[0].connected > 0
        assert slurm.busy == set(slurm.jobs[0].workers)
        await asyncio.sleep(30)
        assert {job.state for job in late} == {"COMPLETED"} and len(slurm.running) == 1

    run(tmp_path, story)


def test_a_lost_job_whose_cancel_failed_is_cancelled_again(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(2)
        await asyncio.sleep(120)
        lost = slurm.running[0]
        slurm.start_up = 1e6
        slurm.hang(lost)
        await asyncio.sleep(50)
        slurm.start_up = 20.0
        slurm.away_until = slurm.seconds + 200
        await asyncio.sleep(1500)
        assert lost.state == "CANCELLED" and len(slurm.running) == 2

    run(tmp_path, story)


def test_a_submission_without_a_reply_is_found(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.accept_while_away, slurm.away_until = 1.0, slurm.seconds + 100
        with pytest.raises(GpujobsError):
            await cluster.scale_to(3)
        await asyncio.sleep(180)  # they are found, and cancelled: the call has failed
        assert len(slurm.jobs) == 3 and not slurm.alive and not cluster.orphans
        await cluster.scale_to(3)
        await asyncio.sleep(120)
        assert len(slurm.running) == 3 and not cluster.orphans

    run(tmp_path, story)


def test_a_job_that_a_monitor_has_found_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    """Its name is that of all jobs of the cluster; both would have its id, and one would be lost."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(1)
        await asyncio.sleep(60)
        before = cluster.pool.record
        await cluster.scale_to(2)
        await asyncio.sleep(60)
        pool = cluster.pool
        pool.groups[""].target, pool.record = 3, before
        slurm.accept_while_away, slurm.away_until = 1.0, slurm.seconds + 1
        await pool.submit(pool.groups[""], 1)
        await asyncio.sleep(120)
        sent = [submission.id for submission in pool.record.submissions]
        assert sent == [job.id for job in slurm.running] and len(slurm.jobs) == 3

    run(tmp_path, story)


@dataclass
class LossySlurm(SimulatedSlurm):
    """Its next answers about a name lack rows at the end: so many each."""

    lost: list[int] = field(default_factory=list)

    def _answer(self, words: tuple[str, ...], stdin: str) -> CommandResult:
        result = super()._answer(words, stdin)
        if words[-1] != "%F|%j" or not self.lost:
            return result
        rows = result.stdout.splitlines(keepends=True)
        return replace(result, stdout="".join(rows[: len(rows) - self.lost.pop(0)]))


def test_answers_that_lack_rows_do_not_submit_a_job_twice(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        assert isinstance(slurm, LossySlurm)
        await cluster.scale_to(1)
        await asyncio.sleep(60)
        slurm.lost = [1, 2]
        slurm.accept_while_away, slurm.away_until = 1.0, slurm.seconds + 1
        await cluster.scale_to(2)
        assert len(slurm.jobs) == len(slurm.alive) == 2 and not slurm.lost

    run(tmp_path, story, LossySlurm(tmp_path, Random(0)))


def test_answers_that_lack_the_same_row_do_not_submit_a_job_twice(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        assert isinstance(slurm, LossySlurm)
        await cluster.scale_to(1)
        await asyncio.sleep(60)
        slurm.lost = [1] * 8
        slurm.accept_while_away, slurm.away_until = 1.0, slurm.seconds + 1
        await cluster.scale_to(2)
        assert len(slurm.jobs) == len(slurm.alive) == 2 and not slurm.lost

    run(tmp_path, story, LossySlurm(tmp_path, Random(0)))


@dataclass
class CachedSlurm(SimulatedSlurm):
    """A wrapper of squeue keeps each answer for a minute, as some sites have it."""

    kept: dict[tuple[str, ...], tuple[float, CommandResult]] = field(default_factory=dict)

    def _answer(self, words: tuple[str, ...], stdin: str) -> CommandResult:
        if words[0] != "squeue":
            return super()._answer(words, stdin)
        until, result = self.kept.get(words, (0.0, None))
        if result is None or self.seconds >= until:
            result = super()._answer(words, stdin)
            self.kept[words] = self.seconds + 60, result
        return result


def test_answers_from_before_a_submission_do_not_submit_it_twice(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(1)
        await asyncio.sleep(60)
        client = SchedulerClient(Slurm(), system=slurm)
        client.find(cluster.id)  # which is kept
        slurm.accept_while_away, slurm.away_until = 1.0, slurm.seconds + 1
        await cluster.scale_to(2)
        assert len(slurm.jobs) == len(slurm.alive) == 2

    run(tmp_path, story, CachedSlurm(tmp_path, Random(0)))


def test_a_job_that_has_left_the_queue_before_it_was_found_is_not_submitted_again(
    tmp_path: Path,
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(1)
        await asyncio.sleep(60)
        (sent,) = cluster.pool.record.submissions
        slurm.vanish(slurm.jobs[0])
        intent = replace(sent, id="", time=slurm.time() - RECOVERY_AGE)
        record = cluster.ledger.update(cluster.id, submissions=(), intent=intent)
        record = recover_submission(record, cluster.ledger, system=slurm)
        assert [found.id for found in record.submissions] == [sent.id] and record.intent is None

    run(tmp_path, story)


def test_a_job_that_has_started_is_not_submitted_again_though_nothing_lists_it(
    tmp_path: Path,
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        assert isinstance(slurm, LossySlurm)
        await cluster.scale_to(1)
        await asyncio.sleep(60)
        slurm.lost = [1] * 1000
        slurm.accept_while_away, slurm.away_until = 1.0, slurm.seconds + 1
        await cluster.scale_to(2)
        assert len(slurm.jobs) == len(slurm.alive) == 2 and slurm.lost

    run(tmp_path, story, LossySlurm(tmp_path, Random(0)))


def test_an_answer_that_lacks_a_row_does_not_give_up_an_interrupted_submission(
    tmp_path: Path,
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        assert isinstance(slurm, LossySlurm)
        await cluster.scale_to(1)
        (sent,) = cluster.pool.record.submissions
        intent = replace(sent, id="", time=slurm.time() - RECOVERY_AGE)
        record = cluster.ledger.update(cluster.id, submissions=(), intent=intent)
        slurm.lost = [1]
        record = recover_submission(record, cluster.ledger, system=slurm)
        assert [found.id for found in record.submissions] == [sent.id] and not slurm.lost

    run(tmp_path, story, LossySlurm(tmp_path, Random(0)))


def test_an_interrupted_submission_is_looked_for_with_pauses_while_there_is_no_answer(
    tmp_path: Path,
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(1)
        (sent,) = cluster.pool.record.submissions
        intent = replace(sent, id="", time=slurm.time() - RECOVERY_AGE)
        record = cluster.ledger.update(cluster.id, submissions=(), intent=intent)
        slurm.broken_how, slurm.broken_until = "empty", slurm.seconds + 60
        before = slurm.calls["squeue"]
        assert recover_submission(record, cluster.ledger, system=slurm).intent == intent
        assert slurm.calls["squeue"] - before <= 6

    run(tmp_path, story)


def test_a_long_outage_at_the_first_submission_does_not_end_the_cluster(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.away_until = slurm.seconds + 400
        with pytest.raises(GpujobsError):
            await cluster.scale_to(2)
        await asyncio.sleep(900)
        await cluster.scale_to(2)
        await asyncio.sleep(120)
        assert len(slurm.running) == 2

    run(tmp_path, story)


def test_jobs_found_when_all_others_have_ended_are_watched(tmp_path: Path) -> None:
    """The cluster must not count as finished while a submission has no reply."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(1)
        await asyncio.sleep(120)
        await cluster.scale_to(0)
        await asyncio.sleep(60)
        assert not slurm.alive
        slurm.accept_while_away, slurm.away_until = 1.0, slurm.seconds + 85
        await cluster.scale_to(2)
        await asyncio.sleep(120)
        slurm.vanish(slurm.running[0])
        await asyncio.sleep(300)
        assert len(slurm.running) == 2 and len(slurm.jobs) == 4

    run(tmp_path, story)


def test_a_job_that_starts_and_hangs_in_an_outage_is_replaced(tmp_path: Path) -> None:
    """The last answer of the batch scheduler, that it waits, is no requeue."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.wait = lambda: 300.0
        await cluster.scale_to(1)
        await asyncio.sleep(250)
        slurm.away_until = slurm.seconds + 400
        await asyncio.sleep(200)
        slurm.hang(slurm.running[0])
        slurm.wait = lambda: 0.0
        await asyncio.sleep(420)
        assert slurm.jobs[0].state == "CANCELLED" and len(slurm.connected) == 2

    run(tmp_path, story, interval=10.0)


def test_requeues_do_not_make_successors_come_early(tmp_path: Path) -> None:
    """A requeued job has waited since then; if nobody saw it wait, its walltime begins again."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(2)
        await asyncio.sleep(3000)
        first, second = slurm.running
        slurm.requeue(first)
        await asyncio.sleep(100)
        slurm.away_until = slurm.seconds + 100
        slurm.requeue(second)
        await asyncio.sleep(3000)
        assert len(slurm.jobs) == 2  # of one hour each
        await asyncio.sleep(700)
        assert len(slurm.jobs) == 4 and len(slurm.running) == 2

    run(tmp_path, story, interval=20.0)


def test_a_requeued_job_that_has_a_successor_is_removed(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(2)
        await asyncio.sleep(3500)
        assert numbers(cluster) == [2, 3] and len(slurm.alive) == 4
        slurm.requeue(slurm.alive[0])
        await asyncio.sleep(120)
        assert numbers(cluster) == [2, 3] and slurm.jobs[0].state == "CANCELLED"

    run(tmp_path, story)


def test_a_wait_that_times_out_has_the_reason_of_the_last_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.broken = [""]
        await cluster.scale_to(1)
        while not cluster.pool.jobs.past:
            await asyncio.sleep(1)
        waiting = wait_for(cluster._scaler, 1, 0.001, LibraryProgress(quiet=True))
        with pytest.raises(TimeoutError, match=r": (1 \w+|no jobs); the last job that failed: \w+"):
            await waiting
        await asyncio.sleep(1800)
        (error,) = cluster.pool.errors
        (logged,) = [r.getMessage() for r in caplog.records if "in a row" in r.getMessage()]
        assert logged in " ".join(str(error).split()) and "\n" not in logged

    run(tmp_path, story)


def test_a_group_that_adapts_and_gets_no_more_jobs_changes_its_target_no_more(
    tmp_path: Path,
) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.broken, slurm.demand = [""], lambda group: 8
        cluster.adapt(minimum=0, maximum=8)
        await asyncio.sleep(1800)
        assert cluster.pool.errors
        before = cluster.ledger.targets(cluster.pool.record).changes
        await asyncio.sleep(60)
        assert cluster.ledger.targets(cluster.pool.record).changes == before

    run(tmp_path, story)


def test_a_line_of_setup_that_failed_is_said_once(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        await cluster.scale_to(2)
        await asyncio.sleep(30)
        for number in range(2):
            run, text = facts_of(cluster.folder, number).run, "false failed (exit code 1)"
            write_job(cluster.folder, number, "setup failed", run=run, text=text)
        await asyncio.sleep(30)
        said = [line for line in cluster.dask.messages if "setup" in line]
        assert said == ["setup: false failed (exit code 1)"]

    run(tmp_path, story)


# -- groups --------------------------------------------------------------------------------------------
def test_failures_of_one_group_do_not_stop_the_others(tmp_path: Path) -> None:
    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.broken = ["prep"]
        await cluster.scale_to(2, "gpu")
        await cluster.scale_to(2, "prep")
        await asyncio.sleep(1800)
        assert len(slurm.jobs) < 2 + 2 * 4 and {job.group for job in slurm.running} == {"gpu"}
        slurm.end(slurm.running[0], "PREEMPTED", 143)
        await asyncio.sleep(120)
        assert len(slurm.running) == 2  # it was replaced
        await cluster.scale_to(3, "gpu")  # which does not submit jobs of the other group
        await asyncio.sleep(120)
        assert Counter(job.group for job in slurm.alive) == {"gpu": 3}
        message = "group prep: 4 jobs in a row ended before their workers connected"
        (shown,) = cluster.pool.monitor.latest(None).errors
        report = ClusterMonitor([cluster.pool.record], cluster.ledger, system=slurm).report()
        for text in (
            shown,
            report.notes[-1],
            f"no more jobs: {report.record.group('prep').error}",
        ):
            assert text.startswith(f"no more jobs: {message}"), text
        slurm.broken = []
        await cluster.scale_to(1, "prep")
        await asyncio.sleep(120)
        assert Counter(job.group for job in slurm.running) == {"gpu": 3, "prep": 1}
        assert not cluster.pool.errors and not any(
            group.error for group in cluster.pool.record.groups
        )

    queues = {**SITE["queues"], "cpu": dict(CPU_QUEUE)}
    profile = {"groups": GROUPS, "network": PROFILE["network"]}
    run(tmp_path, story, site={"queues": queues}, profile=profile)


def test_a_refused_group_does_not_keep_another_one_from_its_jobs(tmp_path: Path) -> None:
    """Both are scaled in one call; a refusal is an answer, and no submission without one."""

    async def story(cluster: SimulatedCluster, slurm: SimulatedSlurm) -> None:
        slurm.max_jobs = 2
        cluster._scaler.set_targets({"gpu": 3, "prep": 2})
        with pytest.raises(RefusedError):
            await cluster._scaler.reach_targets()
        assert Counter(job.group for job in slurm.alive) == {"prep": 2}

    queues = {**SITE["queues"], "cpu": dict(CPU_QUEUE)}
    profile = {"groups": GROUPS, "network": PROFILE["network"]}
    run(tmp_path, story, site={"queues": queues}, profile=profile)
