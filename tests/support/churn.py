"""Random churn of a simulated cluster, and the rules that hold after each step of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

from .elastic import SITE, SimulatedCluster, simulate, slurm_of
from .simulated import SimulatedJob, SimulatedSlurm

STEP = 20.0
"""Seconds between two looks of the owner."""
QUIET = 1800.0
"""Seconds without faults at the end: longer than the longest pauses."""
MOST_JOBS, SIZE = 8, 2
CALLS_PER_HOUR = 1200
"""Commands of the batch scheduler: a query at each step is up to three."""


class Churn:
    """One seed: an adapting or a fixed cluster, and a batch scheduler with faults."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.adapts = self.random.random() < 0.7
        self.maximum = self.random.randint(2, MOST_JOBS)
        self.minimum = self.random.randint(0, self.maximum)
        self.limited = self.random.random() < 0.3
        self.demand = 0
        slow = self.random.choice((0.0, 60.0, 600.0))
        self.slurm = slurm_of(
            folder,
            seed,
            wait=lambda: self.random.expovariate(1 / slow) if slow else 0.0,
            start_up=self.random.uniform(5, 60),
            demand=lambda: self.demand,
            accept_while_away=0.5,
            capacity=self.random.choice((3, MOST_JOBS, 100)),
        )
        walltime = self.random.choice(("20m", "1h", "8h"))
        queue = dict(SITE["queues"]["gpu"]) | ({"max_jobs": MOST_JOBS} if self.limited else {})
        self.site: dict[str, Any] = {"queues": {"gpu": queue}, "defaults": {"walltime": walltime}}
        self.cluster: SimulatedCluster
        self.orphaned: dict[str, float] = {}
        self.slurm.watchers.append(self.check)

    def check(self) -> None:
        """Note a broken rule; called after each submission and each step of the time.

        It is raised later, because it would be an error inside of the code under test.
        """
        jobs = [job for job in self.slurm.alive if job.occupies]
        if self.limited:
            self.check_number(jobs, MOST_JOBS)
        if self.adapts:
            self.check_number(jobs, self.maximum)
        else:  # each job may have a successor; a lost one is replaced while it is cancelled
            released = self.cluster.released
            self.check_number([job for job in jobs if job.id not in released], 2 * self.maximum)

    def check_number(self, jobs: list[SimulatedJob], most: int) -> None:
        """Note a fault if there are more than ``most`` jobs."""
        if len(jobs) > most:
            states = ", ".join(f"{job.number} {job.state}" for job in jobs)
            self.slurm.faults.append(f"at {self.slurm.seconds:.0f} s, {most} allowed: {states}")

    def check_orphans(self) -> None:
        """Assert that each job is known to the pool, at the latest when a lost reply is found."""
        assert not self.slurm.faults, self.slurm.faults[0]
        now = self.slurm.seconds
        orphans = self.cluster.orphans
        self.orphaned = {job: self.orphaned.get(job, now) for job in orphans}
        faults = self.slurm.away_until
        for job, since in self.orphaned.items():
            assert now - max(since, faults) < 400, f"job {job} is an orphan since {since}"

    # -- faults ------------------------------------------------------------------------------------
    def disturb(self) -> None:
        """Let one thing go wrong, or change the load."""
        slurm, random = self.slurm, self.random
        running = [job for job in slurm.running if job.occupies]
        kind = random.choice(
            ("load", "load", "preempt", "node", "vanish", "requeue", "hang", "away", "refuse")
        )
        if kind == "load":
            self.demand = random.choice((0, random.randint(0, 2 * MOST_JOBS * SIZE)))
        elif kind == "away":
            slurm.away_until = slurm.seconds + random.expovariate(1 / 120)
        elif kind == "refuse":
            slurm.refuse_until = slurm.seconds + random.expovariate(1 / 60)
        elif running:
            job = random.choice(running)
            if kind == "preempt":
                slurm.end(job, "PREEMPTED", 143)
            elif kind == "node":
                slurm.end(job, "NODE_FAIL", None)
            else:
                getattr(slurm, kind)(job)

    async def play(self, folder: Path, hours: float) -> None:
        """Run: churn, then a time without faults, at whose end the target is met."""
        slurm = self.slurm
        self.cluster = cluster = SimulatedCluster(folder, slurm, site=self.site, interval=STEP)
        if self.adapts:
            cluster.adapt(minimum=self.minimum * SIZE, maximum=self.maximum * SIZE)
        else:
            await cluster.scale_to(self.maximum)
        end = slurm.seconds + hours * 3600
        while slurm.seconds < end:
            await asyncio.sleep(self.random.expovariate(1 / 120))
            self.check_orphans()
            if slurm.seconds < end:
                self.disturb()
        await self.settle()
        cluster.stop()

    async def settle(self) -> None:
        """Assert the end: the target is met, no job is left over, few commands were run."""
        slurm, cluster = self.slurm, self.cluster
        slurm.away_until = slurm.refuse_until = 0.0
        slurm.capacity, slurm.wait = 100, lambda: 0.0
        for job in slurm.alive:
            job.eligible = min(job.eligible, slurm.seconds)
        self.demand = self.maximum * SIZE
        if cluster.pool.error is not None:  # too many failures in a row: bounded, and reported
            cluster.pool.forget_failures()
            if not self.adapts:
                await cluster.scale_to(self.maximum)
        await asyncio.sleep(QUIET)
        self.check_orphans()
        assert not cluster.orphans, f"orphans at the end: {cluster.orphans}"
        assert cluster.pool.error is None, f"at the end: {cluster.pool.error}"
        wanted = self.maximum
        for _ in range(10):  # at a limit, a successor is submitted when a job has left
            if len(slurm.connected) >= wanted * SIZE:
                break
            await asyncio.sleep(60)
        assert len(slurm.connected) >= wanted * SIZE, f"{len(slurm.connected)} of {wanted * SIZE}"
        hours = slurm.seconds / 3600
        calls = slurm.calls.total()
        assert calls < CALLS_PER_HOUR * hours, f"{calls} commands in {hours:.1f} hours"


def churn(folder: Path, seed: int, hours: float = 0.7) -> SimulatedSlurm:
    """Run one seed; raises AssertionError if a rule is broken."""
    run = Churn(folder, seed)
    simulate(run.slurm, lambda: run.play(folder, hours))
    return run.slurm
