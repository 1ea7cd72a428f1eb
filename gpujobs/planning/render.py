"""From a plan to batch scripts, through the Jinja templates."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from ..injob.names import ENVIRONMENT
from .bash import Bash, command, with_variables
from .commandlines import JobRoles, asks_outside, commands, launcher, roles_of, supervise, warning
from .plan import Plan
from .shape import JobGroup, JobShape
from .templates import fill, load_template


@dataclass(frozen=True)
class Script:
    """One submission: ``count`` jobs, numbered from ``first``."""

    text: str
    jobs: JobGroup
    first: int
    count: int
    devices: tuple[str, ...] = ()
    """GPUs of this machine for these jobs, in order; empty if a batch scheduler assigns them."""
    attempt: int = 1
    """Which start of the cluster they are for, from 1."""

    @property
    def array(self) -> bool:
        """Whether the jobs are members of an array; else there is one plain job."""
        return self.count > 1


def render(
    plan: Plan, cluster_id: str, *, limit: int | None = None, site_folder: Path | None = None
) -> list[Script]:
    """Return the scripts of the whole cluster, at most ``limit`` jobs each.

    Those of the first attempt come first, and in each attempt those of the head.
    """
    return [
        script
        for attempt in range(1, plan.lifetime.attempts + 1)
        for script in _render_attempt(plan, cluster_id, attempt, limit, site_folder)
    ]


def _render_attempt(
    plan: Plan, cluster_id: str, attempt: int, limit: int | None, site_folder: Path | None
) -> list[Script]:
    scripts = []
    first, devices = (attempt - 1) * sum(jobs.shape.jobs for jobs in plan.all_jobs), plan.devices
    number_of_head = first + plan.jobs_with_workers
    for jobs in plan.all_jobs:
        scripts += render_jobs(
            plan,
            cluster_id,
            jobs,
            roles_of(plan, jobs),
            # Jobs with workers come first, the number of the head's own job follows.
            first=number_of_head if jobs is plan.head else first,
            count=jobs.shape.jobs,
            limit=limit,
            site_folder=site_folder,
            devices=devices,
            attempt=attempt,
        )
        if jobs is not plan.head:
            first, devices = first + jobs.shape.jobs, devices[jobs.gpus :]
    return scripts


def render_jobs(
    plan: Plan,
    cluster_id: str,
    jobs: JobGroup,
    roles: JobRoles,
    first: int,
    count: int,
    *,
    limit: int | None = None,
    site_folder: Path | None = None,
    devices: tuple[str, ...] = (),
    attempt: int = 1,
) -> list[Script]:
    """Return the scripts of ``count`` jobs numbered from ``first``, one script per array.

    ``limit``: most jobs of an array. ``devices``: GPUs of this machine for these jobs.
    """
    most = limit or plan.site.max_array_size or plan.scheduler.largest_array
    template = load_template(plan.scheduler.name, site_folder)
    gpus = jobs.shape.gpus
    scripts = []
    for start in range(0, count, most):
        end = min(count, start + most)
        own_devices = devices[start * gpus : end * gpus]
        script = Script("", jobs, first + start, end - start, own_devices, attempt)
        context = _context(plan, cluster_id, roles, script)
        scripts.append(replace(script, text=fill(template, context)))
    return scripts


def cluster_folder(plan: Plan, cluster_id: str) -> Path:
    """Return the cluster's folder, which login and compute nodes share."""
    return Path(plan.root) / cluster_id


def _context(plan: Plan, cluster_id: str, roles: JobRoles, script: Script) -> dict[str, object]:
    """Return the variables of the templates."""
    number_of_index_0 = script.first
    if script.array:
        number_of_index_0 -= plan.scheduler.first_index
    return {
        **_directive_variables(plan, cluster_id, script),
        **_environment_variables(plan, script),
        "jobs": _TemplateJobs(script.jobs, roles),
        "group": "" if script.jobs is plan.head else script.jobs.group,
        "root": plan.root,
        "first": number_of_index_0,
        "first_number": script.first,
        "client_owns": roles.client_owns,
        "asks": asks_outside(plan, script.jobs, roles),
        "cancel": Bash(plan.scheduler.cancel_waiting),
        "supervise": supervise(plan, script.jobs, roles, script.attempt),
        "workers_launcher": command(map(with_variables, script.jobs.launcher)),
        "commands": commands(plan, script.jobs, roles),
        **_container_variables(plan, script),
    }


def _directive_variables(plan: Plan, cluster_id: str, script: Script) -> dict[str, object]:
    scheduler, walltime = plan.scheduler, script.jobs.walltime
    attempts = plan.lifetime.attempts
    return {
        "shell": Bash(plan.site.shell),
        "name": cluster_id,
        "output": Bash(scheduler.output(plan.root, cluster_id, script.array)),
        "walltime": Bash(scheduler.walltime(walltime)) if walltime else "",
        "warning": warning(walltime),
        "array": Bash(scheduler.array(script.count)) if script.array else "",
        "attempt": script.attempt if attempts > 1 else 0,
        "again": script.attempt < attempts,
    }


def _environment_variables(plan: Plan, script: Script) -> dict[str, object]:
    jobs = script.jobs
    python, profile = Path(jobs.python), jobs.profile
    layout = plan.layout_of(jobs)
    on_path = python.is_absolute() and not jobs.container
    return {
        "workdir": plan.workdir,
        "modules": plan.modules,
        "site_setup": Bash(layout.site.setup),
        "setup": Bash(profile.environment.setup),
        "mpi_setup": Bash(layout.setup),
        "environment_file": ENVIRONMENT if plan.working_ranks else "",
        "staging": jobs.software.staging,
        "python": jobs.python,
        "python_folder": str(python.parent) if on_path else "",
        "env": profile.env,
        "loopback": plan.transport_of(jobs).loopback,
        "ports": layout.site.network.ports or "",
        "devices": Bash(shlex.join(script.devices)),
    }


def _container_variables(plan: Plan, script: Script) -> dict[str, object]:
    container, gpus = script.jobs.container, bool(script.jobs.shape.gpus)
    if container is None:
        return {"container": None, "launcher": "", "run_log": False}
    runtime = container.runtime
    return {
        "container": {
            "program": runtime.program,
            "image": Bash(container.image_word),
            "is_path": container.is_path,
            "scratch": Bash(container.scratch_word),
            "prepare": [Bash(line) for line in container.prepare(gpus)],
            "environment": container.environment(gpus),
            "command": command(container.words(gpus)),
            "supervisor": command(runtime.supervisor()),
        },
        "launcher": launcher(plan, script.jobs),
        "run_log": plan.profile.run_on == "ranks",
    }


@dataclass(frozen=True)
class _TemplateJobs:
    """The variable ``jobs`` of the templates."""

    source: JobGroup
    roles: JobRoles

    @property
    def lines(self) -> list[Bash]:
        """Return the directives, which were checked when they were planned."""
        return [Bash(line) for line in self.source.lines]

    @property
    def shape(self) -> JobShape:
        """Return the numbers of one job."""
        return self.source.shape

    @property
    def scheduler(self) -> bool:
        """Return whether the jobs may start the dask scheduler."""
        return self.roles.scheduler
