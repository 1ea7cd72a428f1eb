"""The command lines of a job: supervisor, dask scheduler, workers, and the user's command."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from .bash import Bash, command
from .layouts import PRELOAD_OPTION, SCHEDULER_FILE
from .plan import Plan
from .shape import JobGroup

SHORTEST_WARNING, LONGEST_WARNING = 10, 60
"""Bounds of `warning`, in seconds."""
LEASE = 60
"""Seconds after which the head's job ends if the owning process no longer renews its lease."""


@dataclass(frozen=True)
class JobRoles:
    """The roles of the jobs of a script."""

    scheduler: bool = True
    """They may start the dask scheduler."""
    workers: bool = True
    run: bool = True
    client_owns: bool = False
    """A Python process handles the jobs' failures; else a failure ends the cluster."""


def warning(walltime: int | None) -> int:
    """Return how many seconds before its walltime a job starts to shut down: a tenth of it."""
    if not walltime:
        return LONGEST_WARNING
    return min(LONGEST_WARNING, max(SHORTEST_WARNING, walltime // 10))


def supervise(plan: Plan, jobs: JobGroup, roles: JobRoles) -> list[Bash]:
    """Return the options of the job's supervisor, one line each."""
    lines = []
    if jobs.shape.gpus:
        gpus = [f"--gpus={jobs.shape.gpus}", f"--visible-devices={jobs.visible_devices}"]
        lines.append(" ".join([*gpus, *plan.layout.supervisor_options(jobs.shape)]))
    if jobs.walltime:
        lines.append(f"--walltime={jobs.walltime} --warning={warning(jobs.walltime)}")
    lines.append(" ".join(_start_options(plan, roles)))
    if roles.scheduler:
        lines += _head_options(plan)
    if roles.client_owns:
        lines.append("--client-owns")
        if roles.scheduler:
            lines[-1] += f" --lease={LEASE}"
    return [Bash(line) for line in lines]


def _start_options(plan: Plan, roles: JobRoles) -> list[str]:
    options = [f"--start-timeout={plan.profile.start_timeout}"]
    if roles.run and plan.profile.run:
        options.append(f"--start-workers={plan.start_workers}")
    return options


def _head_options(plan: Plan) -> list[str]:
    protocols = f"--schemes={','.join(plan.transport.protocols)}"
    lines = [" ".join([protocols, *plan.transport.interface_option()])]
    if plan.profile.run_on == "ranks":
        lines.append("--run-on=ranks")
    if plan.scheduler.cancel_waiting:
        lines.append(f"--cancel={shlex.quote(plan.scheduler.cancel_waiting)}")
    return lines


def commands(plan: Plan, jobs: JobGroup, roles: JobRoles) -> dict[str, Bash]:
    """Return the commands that the supervisor starts, by name: scheduler, workers, run."""
    profile = plan.profile
    found = {}
    if roles.scheduler:
        found["scheduler"] = command(_scheduler_words(plan))
    if roles.workers:
        found["workers"] = command(plan.layout.worker_words(jobs, plan.transport, plan.workdir))
    if roles.run and profile.run and profile.run_on == "head":
        found["run"] = command(shlex.quote(word) for word in profile.run)
    return found


def _scheduler_words(plan: Plan) -> list[str]:
    return [
        '"$python" -m distributed.cli.dask_scheduler',
        "--port=0",
        "--dashboard-address=:0",
        *plan.transport.listen_options(plan.scheduler),
        SCHEDULER_FILE,
        PRELOAD_OPTION,
    ]
