"""Random churn of a simulated cluster, and the rules that hold after each step of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from gpujobs.clusters.judge import lost_job_status
from gpujobs.deploy.group import Scope

from .elastic import PROFILE, SITE, SimulatedCluster, simulate, slurm_of
from .simulated import BROKEN, SimulatedJob, SimulatedSlurm

STEP = 20.0
"""Seconds between two looks of the owner."""
REFUSAL_TIME = 600.0
"""Seconds after a refusal in which `adapt` requests no more jobs than were accepted."""
QUIET = 1800.0
"""Seconds without faults at the end: longer than the longest pauses."""
SHORTEST_HOLD, HOLD = 120.0, 1800.0
"""Seconds for which idle jobs are kept at least and at most."""
SHORTAGE = 400.0
"""Seconds within which jobs that a fault has ended are replaced, if no fault prevents that."""
GRACE = 30.0
"""Seconds for which `adapt` leaves a job in the queue, whatever the demand is."""
MOST_JOBS = 8
CALLS_PER_HOUR = 1200
"""Commands of the batch scheduler: a query at each step is up to three."""

CPU_QUEUE = {"cpus_per_node": 8, "memory_per_node": "64GiB", "max_walltime": "1d"}
GROUPS: dict[str, Any] = {
    "gpu": {"gpus": 2, "gpus_per_job": 2},
    "prep": {"gpus": 0, "workers": {"count": 1, "threads": 2, "memory": "4GiB"}},
}
"""Two workers a job, and one; each in a queue of its own."""


@dataclass
class GroupChurn:
    """What a group of workers is to do: adapt, or keep a number of jobs."""

    name: str
    size: int
    """Workers of a job."""
    adapts: bool
    maximum: int
    """Jobs: of `adapt`, or wanted all the time."""
    minimum: int
    demand: int = 0
    """Workers that its tasks need."""

    @classmethod
    def draw(cls, random: Random, name: str, most: int) -> GroupChurn:
        """Return a group of at most ``most`` jobs."""
        adapts = random.random() < 0.7
        maximum = random.randint(2, most)
        size = 1 if name == "prep" else 2
        return cls(name, size, adapts, maximum, random.randint(0, maximum))

    def of(self, jobs: Iterable[SimulatedJob]) -> list[SimulatedJob]:
        """Return those of ``jobs`` that are in this group."""
        return [job for job in jobs if job.group == self.name]

    def connected(self, slurm: SimulatedSlurm) -> int:
        """Return how many workers are connected, and not about to leave."""
        ready = (job for name, job in slurm.connected.items() if name not in slurm.retired)
        return len(self.of(ready))

    async def start(self, cluster: SimulatedCluster) -> None:
        """Let the cluster do it from now on."""
        if self.adapts:
            workers = {"minimum": self.minimum * self.size, "maximum": self.maximum * self.size}
            cluster.adapt(self.name, **workers)
        else:
            await cluster.scale_to(self.maximum, self.name)


class Churn:
    """One seed: a cluster of ``groups``, and a batch scheduler with faults."""

    def __init__(self, folder: Path, seed: int, groups: tuple[str, ...] = ("",)) -> None:
        self.random = Random(seed)
        most = MOST_JOBS // len(groups)
        self.groups = {name: GroupChurn.draw(self.random, name, most) for name in groups}
        self.limited = self.random.random() < 0.3
        slow = self.random.choice((0.0, 60.0, 600.0))
        self.slurm = slurm_of(
            folder,
            seed,
            wait=lambda: self.random.expovariate(1 / slow) if slow else 0.0,
            start_up=self.random.uniform(5, 60),
            demand=lambda group: self.groups[group].demand,
            accept_while_away=0.5,
            capacity=self.random.choice((3, MOST_JOBS, 100)),
        )
        walltime = self.random.choice(("20m", "1h", "8h"))
        queues = {"gpu": dict(SITE["queues"]["gpu"])}
        self.profile = PROFILE
        if groups != ("",):
            queues["cpu"] = dict(CPU_QUEUE)
            self.profile = {"groups": GROUPS, "network": PROFILE["network"]}
        limit = {"max_queued_jobs": MOST_JOBS} if self.limited else {}
        self.site: dict[str, Any] = {"queues": queues, "defaults": {"walltime": walltime}, **limit}
        self.cluster: SimulatedCluster
        self.orphaned: dict[str, float] = {}
        self.short: dict[str, float] = {}
        """Since when groups have fewer jobs than their minimum."""
        self.refused_until = 0.0
        """Until when refusals limit the number of jobs."""
        self.slurm.watchers.append(self.check)
        self.slurm.scattered = self.random.random() < 0.5

    def check(self) -> None:
        """Note a broken rule; called after each submission and each step of the time.

        It is raised later, because it would be an error inside of the code under test.
        """
        present = [job for job in self.slurm.alive if job.occupies]
        jobs = [job for job in present if not job.restored]
        if self.limited:
            self.check_number(jobs, MOST_JOBS)
        for group in self.groups.values():
            own = group.of(jobs)
            if group.adapts:
                self.check_number(own, group.maximum)
                self.check_minimum(group, group.of(present))
            else:  # each job may have a successor; a lost one is replaced while it is cancelled
                released = self.cluster.released
                self.check_number([job for job in own if job.id not in released], 2 * group.maximum)

    def check_minimum(self, group: GroupChurn, jobs: list[SimulatedJob]) -> None:
        """Note a fault if a group has long had fewer jobs than its minimum without a reason."""
        slurm, workers = self.slurm, self.cluster.pool.groups[group.name]
        prevented = any(halt.jobs == 0 for halt in self.cluster.pool.halts(workers))
        if prevented or len(jobs) >= group.minimum:
            self.short.pop(group.name, None)
            return
        since = self.short.setdefault(group.name, slurm.seconds)
        since = max(since, slurm.faulty_until, self.refused_until)
        if slurm.seconds - since > SHORTAGE:
            slurm.faults.append(f"{len(jobs)} of {group.minimum} jobs since {since:.0f} s")

    def check_release(self, jobs: list[SimulatedJob]) -> None:
        """Note a fault if `adapt` releases jobs below the minimum of their group."""
        released = {job.number for job in jobs}
        for group in self.groups.values():
            counting = {job.report.number for job in self.cluster.counting(group.name)}
            left = len(counting - released)
            if group.of(jobs) and left < group.minimum:
                numbers = ", ".join(str(job.number) for job in group.of(jobs))
                message = f"{numbers} released, {left} jobs left of at least {group.minimum}"
                self.slurm.faults.append(f"at {self.slurm.seconds:.0f} s: {message}")

    def is_surplus(self, job: SimulatedJob) -> bool:
        """Return whether a job has to leave, busy or not, because one that had ended came back.

        Its group is then above the maximum of `adapt`, which is a limit at any time. No other job
        of the group is less busy.
        """
        group, busy = self.groups[job.group], self.slurm.busy
        leaving = self.cluster.released - {job.id}
        present = [one for one in group.of(self.slurm.alive) if one.occupies]
        present = [one for one in present if one.id not in leaving]
        least = min(len(busy.intersection(one.workers)) for one in present)
        returned = any(one.restored for one in present)
        is_least_busy = len(busy.intersection(job.workers)) == least
        return returned and len(present) > group.maximum and is_least_busy

    def check_number(self, jobs: list[SimulatedJob], most: int) -> None:
        """Note a fault if there are more than ``most`` jobs."""
        if len(jobs) > most:
            states = ", ".join(f"{job.group}{job.number} {job.state}" for job in jobs)
            self.slurm.faults.append(f"at {self.slurm.seconds:.0f} s, {most} allowed: {states}")

    def check_jobs(self) -> None:
        """Assert the rules, and that the pool knows each job when a lost reply has been found."""
        assert not self.slurm.faults, self.slurm.faults[0]
        for adaptive in self.cluster.adaptives.values():
            assert SHORTEST_HOLD <= adaptive.hold <= HOLD
        self.check_given_up()
        self.check_ids()
        now = self.slurm.seconds
        orphans = self.cluster.orphans
        self.orphaned = {job: self.orphaned.get(job, now) for job in orphans}
        faults = self.slurm.faulty_until
        for job, since in self.orphaned.items():
            assert now - max(since, faults) < SHORTAGE, f"job {job} is an orphan since {since}"

    def check_given_up(self) -> None:
        """Assert that no job was given up as lost that the batch scheduler has all the time."""
        reasons = {lost_job_status(started).reason for started in (True, False)}
        lost = {job.number for job in self.cluster.pool.jobs.past if job.reason in reasons}
        for job in self.slurm.alive:
            assert job.number not in lost or job.restored or not job.listed, f"{job.id} was lost"

    def check_ids(self) -> None:
        """Assert that the pool has no id of another job."""
        own = {job.submission for job in self.slurm.jobs}
        for sent in self.cluster.pool.record.submissions:
            assert sent.id in own, f"{sent.id} is another job"

    def check_young(self) -> None:
        """Assert that `adapt` has not cancelled a job that had been in the queue for a moment."""
        # A job that came back after its end is one above the maximum: a waiting one then leaves.
        restored = {job.group for job in self.slurm.jobs if job.restored}
        for job in self.slurm.jobs:
            excused = job.hung or job.unanswered or not self.groups[job.group].adapts
            excused = excused or job.group in restored
            if job.cancelled_waiting is not None and not excused:
                assert job.cancelled_waiting - job.submitted >= GRACE, f"{job.id} was cancelled"

    # -- faults ------------------------------------------------------------------------------------
    def disturb(self) -> None:
        """Let one thing go wrong, or change the load."""
        slurm, random = self.slurm, self.random
        running = [job for job in slurm.running if job.occupies]
        kind = random.choice(
            [
                "load",
                "load",
                "preempt",
                "node",
                "vanish",
                "requeue",
                "fail_launch",
                "hang",
                "away",
                "broken",
                "torn",
                "torn",
                "refuse",
                "restore",
            ]
        )
        if kind == "load":
            for group in self.groups.values():
                most = 2 * MOST_JOBS * group.size
                group.demand = random.choice((0, random.randint(0, most)))
        elif kind == "away":
            slurm.away_until = slurm.seconds + random.expovariate(1 / 120)
        elif kind == "broken":
            slurm.broken_until = slurm.seconds + random.expovariate(1 / 240)
            slurm.broken_how = random.choice(BROKEN)
        elif kind == "torn":
            slurm.broken_until = slurm.seconds + random.expovariate(1 / 240)
            slurm.broken_how = kind
        elif kind == "refuse":
            slurm.refuse_until = slurm.seconds + random.expovariate(1 / 60)
            self.refused_until = slurm.refuse_until + REFUSAL_TIME
        elif kind == "restore":
            if ended := [job for job in slurm.jobs if job.listed and not job.alive]:
                slurm.restore(random.choice(ended[-MOST_JOBS:]))
        elif running:
            job = random.choice(running)
            if kind == "preempt":
                slurm.end(job, "PREEMPTED", 143)
            elif kind == "node":
                slurm.end(job, "NODE_FAIL", None)
            else:
                getattr(slurm, kind)(job)

    async def play(self, folder: Path, hours: float) -> None:
        """Run: churn, then a time without faults: of much work, then perhaps of none."""
        slurm = self.slurm
        self.cluster = cluster = SimulatedCluster(
            folder, slurm, site=self.site, profile=self.profile, interval=STEP
        )
        cluster.dask.on_release = self.check_release
        cluster.dask.surplus = self.is_surplus
        for group in self.groups.values():
            await group.start(cluster)
        end = slurm.seconds + hours * 3600
        while slurm.seconds < end:
            await asyncio.sleep(self.random.expovariate(1 / 120))
            self.check_jobs()
            if slurm.seconds < end:
                self.disturb()
        await self.settle()
        if any(group.adapts for group in self.groups.values()):
            await self.rest()
        self.check_young()
        cluster.stop()

    async def settle(self) -> None:
        """Assert that the targets are met, no job is left over, few commands were run."""
        slurm, cluster = self.slurm, self.cluster
        slurm.away_until = slurm.broken_until = slurm.refuse_until = 0.0
        self.short.clear()  # the faults that have ended just now explain what is missing
        slurm.capacity, slurm.wait = 100, lambda: 0.0
        for job in slurm.alive:
            if job.eligible < float("inf"):
                job.eligible = min(job.eligible, slurm.seconds)
        for group in self.groups.values():
            group.demand = group.maximum * group.size
        await self.scale_again()
        await asyncio.sleep(QUIET)
        if cluster.pool.errors:  # by the last faults, which the owner had not yet seen
            await self.scale_again()
            await asyncio.sleep(QUIET)
        self.check_jobs()
        assert not cluster.orphans, f"orphans at the end: {cluster.orphans}"
        assert not cluster.pool.errors, f"at the end: {cluster.pool.errors}"
        # At a limit, a successor is submitted when a job has left.
        await self.expect(lambda group: group.connected(slurm) >= group.maximum * group.size)
        hours = slurm.seconds / 3600
        calls = slurm.calls.total()
        assert calls < CALLS_PER_HOUR * hours, f"{calls} commands in {hours:.1f} hours"

    async def scale_again(self) -> None:
        """Do as the user after too many failures in a row, which are bounded and reported."""
        for group in self.groups.values():
            workers = self.cluster.pool.groups[group.name]
            if Scope.GROUP not in workers.halts:
                continue
            workers.forget_failures()
            if not group.adapts:
                await group.start(self.cluster)

    async def rest(self) -> None:
        """Assert that without work all groups that adapt shrink to their minimum, and keep it."""
        for group in self.groups.values():
            group.demand = 0
        await asyncio.sleep(HOLD)
        self.check_jobs()

        def rests(group: GroupChurn) -> bool:
            # Fewer count while jobs leave at the maximum: their workers are connected all the same.
            released = len(self.cluster.counting(group.name)) <= group.minimum
            kept = group.connected(self.slurm) >= group.minimum * group.size
            return not group.adapts or (released and kept)

        await self.expect(rests)

    async def expect(self, met: Callable[[GroupChurn], bool]) -> None:
        """Assert that each group meets a condition within ten minutes."""
        for _ in range(10):
            if all(map(met, self.groups.values())):
                return
            await asyncio.sleep(60)
        for group in self.groups.values():
            assert met(group), f"{group.connected(self.slurm)} workers of {group}"


def churn(
    folder: Path,
    seed: int,
    hours: float = 0.7,
    groups: tuple[str, ...] = ("",),
) -> None:
    """Run one seed; raises AssertionError if a rule is broken."""
    run = Churn(folder, seed, groups)
    simulate(run.slurm, lambda: run.play(folder, hours))
