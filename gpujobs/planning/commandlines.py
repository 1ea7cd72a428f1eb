"""The command lines of a job: its supervisor, the dask scheduler, the workers, the user's command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..text import size_text
from . import workeroptions
from .plan import JobGroup, Plan

WIDTH = 110


class Bash(str):
    """Text that is bash already."""

    __slots__ = ()


@dataclass(frozen=True)
class JobRoles:
    """What the jobs of a script do, and who decides when one fails: the cluster itself, or a client in Python."""

    scheduler: bool = True
    workers: bool = True
    run: bool = True
    client_owns: bool = False


def warning(walltime: int | None) -> int:
    """Return how many seconds before the walltime a job begins to leave: a minute, less for short jobs."""
    return min(60, max(10, (walltime or 600) // 10))


def supervise(plan: Plan, jobs: JobGroup, roles: JobRoles) -> list[Bash]:
    """Return the options of the job's supervisor, in lines."""
    lines, ranks = [], plan.ranks
    if jobs.shape.gpus:
        how = f" --ranks={ranks.working}" if ranks else ""
        how += " --each-gpu" if plan.profile.workers.worker_class == "nanny" and not ranks else ""
        lines.append(f"--gpus={jobs.shape.gpus} --visible-devices={jobs.visible_devices}{how}")
    if jobs.walltime:
        lines.append(f"--walltime={jobs.walltime} --warning={warning(jobs.walltime)}")
    lines.append(f"--start-timeout={plan.profile.start_timeout}")
    if roles.run and plan.profile.run:
        lines[-1] += f" --start-workers={plan.start_workers}"
    if roles.scheduler:
        interface = (
            f" --interface={shlex.quote(plan.transport.interface)}"
            if plan.transport.interface
            else ""
        )
        lines.append(f"--schemes={','.join(plan.transport.schemes)}{interface}")
        if plan.profile.run_on == "ranks":
            lines.append("--run-on=ranks")
        if plan.scheduler.cancel_waiting:
            lines.append(f"--cancel={shlex.quote(plan.scheduler.cancel_waiting)}")
    if roles.client_owns:
        lines.append("--client-owns" + (" --lease=60" if roles.scheduler else ""))
    return [Bash(line) for line in lines]


def commands(plan: Plan, jobs: JobGroup, roles: JobRoles) -> dict[str, Bash]:
    """Return the commands that it starts, by name: scheduler, workers, run."""
    found = {}
    if roles.scheduler:
        found["scheduler"] = _wrapped(_scheduler_words(plan))
    if roles.workers:
        words = _rank_words(plan, jobs) if plan.ranks else _worker_words(plan, jobs)
        found["workers"] = _wrapped(words)
    if roles.run and plan.profile.run and plan.profile.run_on == "head":
        found["run"] = _wrapped(shlex.quote(word) for word in plan.profile.run)
    return found


def _scheduler_words(plan: Plan) -> list[str]:
    return [
        '"$python" -m distributed.cli.dask_scheduler',
        "--port=0",
        "--dashboard-address=:0",
        *_listen(plan),
        '--scheduler-file="$GPUJOBS_FOLDER/scheduler.json"',
        "--preload=gpujobs_injob.preload",
    ]


def _worker_words(plan: Plan, jobs: JobGroup) -> list[str]:
    workers, gpus = plan.profile.workers, jobs.shape.gpus
    module = (
        "dask_cuda.cli"
        if gpus and workers.worker_class == "cuda"
        else "distributed.cli.dask_worker"
    )
    words = [f'"$python" -m {module}', f"--nthreads={workers.threads}", *_memory_limit(jobs)]
    resources = workeroptions.resources(workers, bool(gpus))
    if resources:
        words.append(shlex.quote(f"--resources={resources}"))
    words += [shlex.quote(word) for word in workeroptions.words(workers)]
    words += [
        f"--local-directory={_local_directory(plan)}",
        f"--death-timeout={workers.death_timeout or 60}",
        "--no-dashboard",
        *_listen(plan),
        '--scheduler-file="$GPUJOBS_FOLDER/scheduler.json"',
        "--preload=gpujobs_injob.preload",
    ]
    return words


def _rank_words(plan: Plan, jobs: JobGroup) -> list[str]:
    """Return the launcher of MPI and what each rank is: dask-mpi, or the user's script."""
    ranks, workers = plan.ranks, plan.profile.workers
    assert ranks is not None  # noqa: S101 - the caller's condition
    cuda = workers.worker_class == "cuda"
    words = [
        *(shlex.quote(word) for word in ranks.command),
        '"$python" -m mpi4py "$GPUJOBS_FOLDER/injob.pyz" rank',
    ]
    on_node = ranks.working // jobs.shape.nodes
    words += [
        '--folder="$GPUJOBS_FOLDER"',
        f"--size={ranks.started}",
        f"--gpus={ranks.gpus}",
        f"--on-node={on_node}",
        f"--visible-devices={jobs.visible_devices}",
    ]
    worker = [
        f"--worker-class={'dask_cuda.CUDAWorker' if cuda else 'distributed.Nanny'}",
        f"--nthreads={workers.threads}",
        *_memory_limit(jobs),
        f"--local-directory={_local_directory(plan)}",
        *(
            [f"--interface={shlex.quote(plan.transport.interface)}"]
            if plan.transport.interface
            else []
        ),
        "--worker-options",
        shlex.quote(json.dumps(workeroptions.keywords(workers, cuda))),
    ]
    if plan.profile.run_on == "ranks":
        script, *arguments = plan.profile.run
        path = script if Path(script).is_absolute() else str(Path(plan.workdir) / script)
        return [
            *words,
            "--script",
            *worker,
            "--",
            *(shlex.quote(word) for word in (path, *arguments)),
        ]
    return [
        *words,
        '-- dask_mpi.cli --no-scheduler --scheduler-file="$GPUJOBS_FOLDER/scheduler.json"',
        *worker,
    ]


def _memory_limit(jobs: JobGroup) -> list[str]:
    memory = jobs.shape.worker_memory
    return [f"--memory-limit={size_text(memory // 2**20 * 2**20)}"] if memory else []


def _local_directory(plan: Plan) -> str:
    own = plan.profile.workers.local_directory
    return shlex.quote(own) if own else f'"{plan.site.scratch}"'


def _listen(plan: Plan) -> list[str]:
    if plan.transport.interface:
        return [f"--interface={shlex.quote(plan.transport.interface)}"]
    return ["--host=127.0.0.1"] if plan.scheduler.on_this_machine else []


def _wrapped(words: Iterable[str]) -> Bash:
    """Join ``words`` on lines of at most WIDTH characters."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > WIDTH - 20:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return Bash(" \\\n        ".join(lines))
