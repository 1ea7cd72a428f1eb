"""The command lines of a job: supervisor, dask scheduler, workers, and the user's command."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from ..injob.idle import rules_text
from ..injob.names import ARCHIVE, HEAD, dashboard_address
from .bash import Bash, command
from .isolation import single_job
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


def roles_of(plan: Plan, jobs: JobGroup) -> JobRoles:
    """Return the roles of ``jobs`` in a cluster without an owner."""
    may_be_head = plan.may_be_head(jobs)
    return JobRoles(scheduler=may_be_head, workers=jobs.group != HEAD, run=may_be_head)


def warning(walltime: int | None) -> int:
    """Return how many seconds before its walltime a job starts to shut down: a tenth of it."""
    if not walltime:
        return LONGEST_WARNING
    return min(LONGEST_WARNING, max(SHORTEST_WARNING, walltime // 10))


def supervise(plan: Plan, jobs: JobGroup, roles: JobRoles, attempt: int = 1) -> list[Bash]:
    """Return the options of the job's supervisor, one line each."""
    lines = []
    if jobs.shape.gpus:
        gpus = [f"--gpus={jobs.shape.gpus}", f"--visible-devices={jobs.visible_devices}"]
        if "ucxx" in plan.transport.protocols:
            gpus += _ucxx_options(plan, jobs)
        options = plan.layout_of(jobs).supervisor_options(jobs.shape)
        lines.append(" ".join([*gpus, *options]))
    if jobs.walltime:
        lines.append(f"--walltime={jobs.walltime} --warning={warning(jobs.walltime)}")
    lines.append(" ".join(_start_options(plan, jobs, roles)))
    if plan.lifetime.attempts > 1:
        lines.append(" ".join(_attempt_options(plan, attempt)))
    if options := _process_options(plan, jobs, roles):
        lines.append(" ".join(options))
    if roles.scheduler:
        lines += _head_options(plan, jobs)
    if roles.client_owns:
        lines.append("--client-owns")
        if roles.scheduler:
            lines[-1] += f" --lease={LEASE}"
    return [Bash(line) for line in lines]


def _ucxx_options(plan: Plan, jobs: JobGroup) -> list[str]:
    """Return what the choice of the protocol, and of settings of UCX, depends on."""
    memory, options = jobs.profile.workers.gpu_memory, []
    if memory != "plain":
        options.append(f"--gpu-memory={memory}")
    if single_job(plan):
        options.append("--single-job")
    return options


def _start_options(plan: Plan, jobs: JobGroup, roles: JobRoles) -> list[str]:
    options = [f"--start-timeout={plan.profile.start_timeout}"]
    if roles.workers and jobs.group:
        options.append(f"--group={jobs.group}")
    if roles.run and plan.profile.run:
        options.append(f"--start-workers={plan.start_workers}")
        if groups := [f"{name}={n}" for name, n in plan.start_groups.items()]:
            options.append(f"--start-groups={','.join(groups)}")
    return options


def _attempt_options(plan: Plan, attempt: int) -> list[str]:
    options = [f"--attempt={attempt}", f"--attempts={plan.lifetime.attempts}"]
    if plan.profile.walltime_exit:
        options.append(f"--walltime-exit={plan.profile.walltime_exit}")
    return options


def _process_options(plan: Plan, jobs: JobGroup, roles: JobRoles) -> list[str]:
    # With a launcher, the batch script is a process of another node.
    options = [] if jobs.launcher else ['--batch-script="$$@$(readlink /proc/self/ns/pid)"']
    if jobs.container and (python := Path(jobs.python)).is_absolute():
        options.append(f"--python-folder={shlex.quote(str(python.parent))}")
    if asks_outside(plan, jobs, roles):
        options.append("--ask-outside")
    return options


def _head_options(plan: Plan, jobs: JobGroup) -> list[str]:
    protocols = f"--schemes={','.join(plan.transport.protocols)}"
    lines = [" ".join([protocols, *plan.transport_of(jobs).interface_option()])]
    if plan.profile.run_on == "ranks":
        lines.append("--run-on=ranks")
    if plan.lifetime.end_after:
        lines.append(f"--end-after={rules_text(plan.lifetime.end_after)}")
    if plan.scheduler.cancel_waiting and not jobs.container:  # whose image has no such command
        lines.append(f"--cancel={shlex.quote(plan.scheduler.cancel_waiting)}")
    return lines


def asks_outside(plan: Plan, jobs: JobGroup, roles: JobRoles) -> bool:
    """Return whether the batch script runs the supervisor's queries, as in a container it cannot.

    The only job of an MPI allocation has no others to ask about.
    """
    return jobs.container is not None and not roles.client_owns and not plan.working_ranks


def commands(plan: Plan, jobs: JobGroup, roles: JobRoles) -> dict[str, Bash]:
    """Return the commands that the supervisor starts, by name: scheduler, workers, run."""
    profile = plan.profile
    found = {}
    if roles.scheduler:
        found["scheduler"] = command(_scheduler_words(plan, jobs))
    if roles.workers:
        found["workers"] = _workers(plan, jobs)
    if roles.run and profile.run and profile.run_on == "head":
        found["run"] = command(shlex.quote(word) for word in profile.run)
    return found


def launcher(plan: Plan, jobs: JobGroup) -> Bash:
    """Return the command that starts MPI outside of the container; "" if the supervisor does."""
    if jobs.container and plan.working_ranks and jobs.shape.gpus:
        return _worker_command(plan, jobs)
    return Bash("")


def _workers(plan: Plan, jobs: JobGroup) -> Bash:
    if launcher(plan, jobs):
        return Bash(f'"$python" "$GPUJOBS_FOLDER/{ARCHIVE}" launch')
    return _worker_command(plan, jobs)


def _worker_command(plan: Plan, jobs: JobGroup) -> Bash:
    transport = plan.transport_of(jobs)
    return command(plan.layout_of(jobs).worker_words(jobs, transport, plan.workdir))


def _scheduler_words(plan: Plan, jobs: JobGroup) -> list[str]:
    dashboard = plan.profile.network.dashboard
    return [
        '"$python" -m distributed.cli.dask_scheduler',
        "--port=0",
        f"--dashboard-address={dashboard_address(dashboard)}",
        *(["--no-dashboard"] if dashboard == "off" else []),
        *plan.transport_of(jobs).listen_options(plan.scheduler),
        SCHEDULER_FILE,
        PRELOAD_OPTION,
    ]
