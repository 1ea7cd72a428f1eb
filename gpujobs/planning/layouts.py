"""Layouts: how workers are divided into jobs, named and started."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..config import placeholders
from ..config.profile import Profile
from ..config.site import Site
from ..config.sitequeue import Queue
from ..injob.names import ARCHIVE, EXTRA_RANKS, NODE, RANK_SCRIPT, job_file
from ..schedulers import Scheduler
from ..schedulers.local import MACHINE_LAUNCHER
from ..text import plural
from . import workeroptions
from .bash import Diagnostics, with_variables
from .containers import names_directory, runtime_of, scratch_word
from .protocols import Transport
from .shape import JobGroup, JobShape, QueueMismatch


def report_run_on(diagnostics: Diagnostics) -> None:
    """Report `run_on: ranks` without MPI or without a script."""
    message = "`run_on: ranks` needs `layout: mpi` and a script in `run`"
    diagnostics.profile_error(message, "run_on")


def check_whole_nodes(gpus: int, queue: Queue, reason: str) -> None:
    """Raise QueueMismatch unless ``gpus`` GPUs are whole nodes; ``reason``: why they must be."""
    per_node = queue.gpus_per_node or 1
    if gpus % per_node == 0:
        return
    fewer = max(1, gpus // per_node) * per_node
    more = (gpus // per_node + 1) * per_node
    choices = " or ".join(str(number) for number in sorted({fewer, more}))
    message = f"{reason} of {plural(per_node, 'GPU')}"
    raise QueueMismatch("gpus", message, limit="gpus_per_node", hint=f"gpus: {choices}")


# -- the values of `layout`, each a class ----------------------------------------------------------
SCHEDULER_FILE = '--scheduler-file="$GPUJOBS_FOLDER/scheduler.json"'


@dataclass(frozen=True)
class Layout:
    """How the workers of a cluster are divided into jobs, named and started.

    This class is `layout: workers`: equal jobs that start and end independently.
    """

    profile: Profile
    site: Site
    scheduler: Scheduler

    name: ClassVar[str] = "workers"
    elastic: ClassVar[bool] = True
    """Whether equal jobs come and go on any nodes (see `ClusterRecord.elastic`)."""

    @property
    def setup(self) -> str:
        """Bash text that runs before the workers start."""
        return ""

    def check(self, diagnostics: Diagnostics) -> None:
        """Report keys of the profile that contradict the layout."""
        self._check_run(diagnostics)
        if self.profile.keep_going and self.name != "allocation":
            diagnostics.profile_error("`keep_going` needs `layout: allocation`", "keep_going")

    def _check_run(self, diagnostics: Diagnostics) -> None:
        if self.profile.run_on == "ranks":  # which needs MPI
            report_run_on(diagnostics)

    def divide(self, gpus: int, queue: Queue, most: int | None) -> tuple[int, int]:
        """Return GPUs and nodes of one job, for ``gpus`` GPUs in all.

        ``most`` limits the GPUs of a job if the profile does not state them. Raises QueueMismatch.
        """
        per_job = self.profile.gpus_per_job or self._default_gpus_per_job(gpus, queue, most)
        if queue.exclusive:
            check_whole_nodes(gpus, queue, "it gives whole nodes")
        self._check_gpus_per_job(gpus, per_job, queue)
        return per_job, 1

    def _default_gpus_per_job(self, gpus: int, queue: Queue, most: int | None) -> int:
        per_node = queue.gpus_per_node or 1
        if queue.exclusive:
            return per_node
        most = min(gpus, per_node, most or per_node)
        own = self.profile.workers.gpus_per_worker
        whole = [n for n in range(own, most + 1, own) if gpus % n == 0] or [own]
        # If the queue allows none of them, `fit` reports the largest one.
        return max([n for n in whole if n in queue.gpus_per_job] or whole)

    def _check_gpus_per_job(self, gpus: int, per_job: int, queue: Queue) -> None:
        per_node = queue.gpus_per_node or 1
        if per_job > per_node:
            message = f"its nodes have {plural(per_node, 'GPU')}"
            hint = f"gpus_per_job: {per_node}, or layout: mpi for one job of several nodes"
            raise QueueMismatch("gpus_per_job", message, limit="gpus_per_node", hint=hint)
        if queue.exclusive and per_job != per_node:
            message = f"it gives whole nodes of {plural(per_node, 'GPU')}"
            raise QueueMismatch("gpus_per_job", message, limit="exclusive")
        if gpus % per_job:
            fewer = max(per_job, gpus // per_job * per_job)
            more = (gpus // per_job + 1) * per_job
            message = f"{gpus} GPUs are not whole jobs of {per_job}"
            raise QueueMismatch("gpus_per_job", message, hint=f"gpus: {fewer} or {more}")

    def hint(self, limit: str, queue: Queue) -> str:
        """Return the cure for jobs that break ``limit`` of the queue, if there is one."""
        if limit == "max_gpus":
            return f"gpus_per_job: {queue.max_gpus}"
        return "layout: mpi asks for all nodes in one job" if limit == "min_nodes" else ""

    def default_start_workers(self, n_workers: int) -> int:
        """Return `start_workers` of a profile that does not set it, for ``n_workers`` in all."""
        return 1

    def working_ranks(self, shape: JobShape) -> int:
        """Return the number of nodes or MPI ranks that a launcher starts for workers; else 0."""
        return 0

    def supervisor_options(self, shape: JobShape) -> list[str]:
        """Return the options of a job's supervisor: plain workers are one process for each GPU."""
        each = ["--each-gpu"] if self.profile.workers.worker_class == "nanny" else []
        workers = self.profile.workers
        return [*each, *workeroptions.size_options(workers), *workeroptions.mps_options(workers)]

    def worker_words(self, jobs: JobGroup, transport: Transport, workdir: str) -> list[str]:
        """Return the words of the command that starts a job's workers, as bash."""
        workers, gpus = self.profile.workers, jobs.shape.gpus
        cuda = gpus and workers.worker_class == "cuda"
        module = "dask_cuda.cli" if cuda else "distributed.cli.dask_worker"
        explicit = names_directory(workers, self.site)
        directory = f"--local-directory={scratch_word(workers, self.site)}"
        return [
            f'"$python" "$GPUJOBS_FOLDER/{ARCHIVE}" workers',
            *workeroptions.default_resources(workers, bool(gpus)),
            *([] if explicit else [directory]),
            f"-- {module}",
            f"--nthreads={jobs.shape.worker_threads}",
            *workeroptions.memory_limit(jobs.shape),
            *(shlex.quote(word) for word in workeroptions.words(workers, bool(gpus))),
            *([directory] if explicit else []),
            f"--death-timeout={workeroptions.death_timeout(self.profile)}",
            "--no-dashboard",
            *transport.listen_options(self.site),
            SCHEDULER_FILE,
        ]

    def head_text(self, shape: JobShape, own_head: bool) -> str:
        """Return where the dask scheduler runs, for people."""
        if own_head:
            return "in a job of its own"
        return "in the job that starts first"


class AllocationLayout(Layout):
    """`layout: allocation`: one job, with a supervisor of workers on each of its nodes."""

    name = "allocation"
    elastic = False

    def check(self, diagnostics: Diagnostics) -> None:
        """Report keys that one job with all GPUs cannot have. Raises InputError."""
        super().check(diagnostics)
        profile = self.profile
        for key, given in (("head", profile.head), ("gpus_per_job", profile.gpus_per_job)):
            if given:
                message = f"`{key}` has no meaning in `layout: {self.name}`: one job has all GPUs"
                diagnostics.profile_error(message, key)
        if profile.gpus in (0, "auto"):
            diagnostics.profile_error(f"`layout: {self.name}` needs a number of GPUs", "gpus")
        diagnostics.raise_problems()

    def divide(self, gpus: int, queue: Queue, most: int | None) -> tuple[int, int]:
        """Return all GPUs, on as few nodes as possible; several nodes must be whole ones."""
        per_node = queue.gpus_per_node or 1
        if queue.exclusive:
            check_whole_nodes(gpus, queue, "it gives whole nodes")
        if gpus > per_node or self.site.machines:
            check_whole_nodes(gpus, queue, "a job of several nodes has whole nodes")
            self._check_launcher(per_node)
        return gpus, -(-gpus // per_node)

    def _check_launcher(self, per_node: int) -> None:
        """Raise QueueMismatch if nothing starts the processes of several nodes."""
        words, message = self.launcher_command, ""
        if not words:
            message = "the site has no `node_launcher`, which starts processes on several nodes"
        elif self.profile.environment.container and NODE in words:
            message = f"{words[0]} cannot start containers on several nodes"
        if message:
            hint = "" if self.site.machines else f"gpus: {per_node}, or layout: mpi"
            raise QueueMismatch("gpus", message, hint=hint)

    def default_start_workers(self, n_workers: int) -> int:
        return n_workers

    def working_ranks(self, shape: JobShape) -> int:
        """Return the number of nodes that a launcher starts: 0 for this node alone."""
        return shape.nodes if shape.nodes > 1 or self.site.machines else 0

    @property
    def launcher_command(self) -> tuple[str, ...]:
        """The launcher of the site, else of the batch scheduler, with placeholders."""
        if self.site.machines:
            return MACHINE_LAUNCHER
        return self.site.node_launcher or self.scheduler.node_launcher

    def launcher(self, shape: JobShape) -> list[str]:
        """Return the words of the command that starts the nodes, with variables of the job."""
        values: dict[str, int | float | str | None] = {
            "ranks": shape.nodes,
            "nodes": shape.nodes,
            "ranks_per_node": 1,
            "gpus_per_node": shape.gpus_per_node,
            "node": NODE,
            "kill": int(not self.profile.keep_going),
        }
        return [placeholders.expand(word, values) for word in self.launcher_command]

    def supervisor_options(self, shape: JobShape) -> list[str]:
        """Return the number of nodes, after the options of each of them."""
        options = super().supervisor_options(shape)
        if not self.working_ranks(shape):
            return options
        return [
            *options,
            f"--ranks={shape.nodes}",
            f"--nodes={shape.nodes}",
            *self._rank_env(),
            *(["--keep-going"] if self.profile.keep_going else []),
        ]

    def _rank_env(self) -> list[str]:
        return [f"--rank-env={','.join(self.profile.env)}"] if self.profile.env else []

    def worker_words(self, jobs: JobGroup, transport: Transport, workdir: str) -> list[str]:
        """Return the launcher, and the supervisor of each node with its command of workers."""
        words = super().worker_words(jobs, transport, workdir)
        if not self.working_ranks(jobs.shape):
            return words
        return [
            *self._launched(jobs),
            f'"$python" "$GPUJOBS_FOLDER/{ARCHIVE}" node',
            f"--nodes={jobs.shape.nodes}",
            f"--gpus={jobs.shape.gpus_per_node}",
            f"--visible-devices={jobs.visible_devices}",
            *([f"--cuda={jobs.cuda}"] if jobs.cuda else []),
            *super().supervisor_options(jobs.shape),
            f"--start-timeout={self.profile.start_timeout}",
            "--",
            *words,
        ]

    def _launched(self, jobs: JobGroup) -> list[str]:
        """Return the launcher, and the script with the environment of the job, as bash."""
        launcher = [with_variables(word) for word in self.launcher(jobs.shape)]
        if self.launcher_command in (self.scheduler.node_launcher, self.scheduler.mpi_command):
            gpus = {"gpus_per_node": jobs.shape.gpus_per_node}
            request = self.scheduler.step_request(jobs.lines)
            launcher += [placeholders.expand(word, gpus) for word in request]
        runtime = runtime_of(self.profile.environment.container, self.site)
        words = runtime.around(launcher) if runtime else launcher
        return [*words, f'sh "$GPUJOBS_FOLDER/{job_file("$GPUJOBS_JOB", RANK_SCRIPT)}"']

    def head_text(self, shape: JobShape, own_head: bool) -> str:
        if not self.working_ranks(shape):
            return "in the job"
        nodes, place = plural(shape.nodes, "node"), "on the first node"
        if self.site.machines:
            nodes, place = plural(shape.nodes, "machine"), "on this machine"
        return f"{place}; {nodes} started by {self.launcher(shape)[0]}"


class MpiLayout(AllocationLayout):
    """`layout: mpi`: an allocation whose nodes, or ranks with a script, are started by MPI."""

    name = "mpi"

    @property
    def setup(self) -> str:
        return self.site.mpi.setup

    def working_ranks(self, shape: JobShape) -> int:
        """Return the number of nodes; the launcher of MPI starts a single one, too."""
        return shape.nodes

    @property
    def launcher_command(self) -> tuple[str, ...]:
        """The launcher of MPI, with placeholders."""
        return self.site.mpi.command or self.scheduler.mpi_command


@dataclass(frozen=True)
class Ranks:
    """The ranks of an MPI job. ``started`` counts all ranks, ``working`` those that own GPUs."""

    working: int
    started: int
    per_node: int
    """Started on each node."""
    gpus: int
    """GPUs of each working rank."""


class RanksLayout(MpiLayout):
    """`layout: mpi` with `run_on: ranks`: the user's script in all ranks of MPI."""

    def _check_run(self, diagnostics: Diagnostics) -> None:
        """Report a `run` that is not a script."""
        run = self.profile.run
        if not run:
            report_run_on(diagnostics)
        elif Path(run[0]).name.startswith("python"):
            message = "`run_on: ranks` takes a Python script, without `python`"
            diagnostics.profile_error(message, "run", hint=f"run: [{', '.join(run[1:])}]")

    def ranks(self, shape: JobShape) -> Ranks:
        """Return the ranks of a job of this shape."""
        size = self.profile.workers.size
        working, gpus = size.workers(shape.gpus_per_node), size.gpus  # one plain worker each
        if self.profile.workers.worker_class == "cuda":
            working, gpus = 1, shape.gpus_per_node  # it starts all of dask-cuda's workers
        per_node = working + EXTRA_RANKS  # the dask scheduler and the client
        return Ranks(
            working=working * shape.nodes,
            started=per_node * shape.nodes,
            per_node=per_node,
            gpus=gpus,
        )

    def working_ranks(self, shape: JobShape) -> int:
        return self.ranks(shape).working

    def launcher(self, shape: JobShape) -> list[str]:
        """Return the words of the command that starts the ranks, with variables of the job."""
        ranks = self.ranks(shape)
        values = {
            "ranks": ranks.started,
            "nodes": shape.nodes,
            "ranks_per_node": ranks.per_node,
        }
        return [placeholders.expand(word, values) for word in self.launcher_command]

    def supervisor_options(self, shape: JobShape) -> list[str]:
        """Return the number of ranks with workers, of nodes, and of ranks on each node."""
        ranks = self.ranks(shape)
        return [
            f"--ranks={ranks.working}",
            f"--nodes={shape.nodes}",
            f"--ranks-per-node={ranks.per_node}",
            *workeroptions.size_options(self.profile.workers),
            *self._rank_env(),
        ]

    def worker_words(self, jobs: JobGroup, transport: Transport, workdir: str) -> list[str]:
        """Return the launcher and the program of each rank: the user's script."""
        ranks = self.ranks(jobs.shape)
        return [
            *self._launched(jobs),
            f'"$python" -m mpi4py "$GPUJOBS_FOLDER/{ARCHIVE}" rank',
            '--folder="$GPUJOBS_FOLDER"',
            f"--size={ranks.started}",
            f"--gpus={ranks.gpus}",
            *workeroptions.size_options(self.profile.workers),
            f"--on-node={ranks.working // jobs.shape.nodes}",
            f"--nodes={jobs.shape.nodes}",
            f"--visible-devices={jobs.visible_devices}",
            *([f"--cuda={jobs.cuda}"] if jobs.cuda else []),
            f"--dashboard={self.profile.network.dashboard}",
            *(["--encryption=required"] if transport.encryption_required else []),
            *self._worker_options(jobs.shape, transport),
            "--",
            *self._script_words(workdir),
        ]

    def _worker_options(self, shape: JobShape, transport: Transport) -> list[str]:
        workers = self.profile.workers
        cuda = workers.worker_class == "cuda"
        worker_class = "dask_cuda.CUDAWorker" if cuda else "distributed.Nanny"
        keywords = workeroptions.keywords(self.profile, cuda)
        directory = "--local-directory" if names_directory(workers, self.site) else "--scratch"
        return [
            f"--worker-class={worker_class}",
            f"--nthreads={shape.worker_threads}",
            *workeroptions.memory_limit(shape),
            f"{directory}={scratch_word(workers, self.site)}",
            *workeroptions.default_resources(workers, True),
            *transport.interface_option(),
            "--worker-options",
            shlex.quote(json.dumps(keywords)),
        ]

    def _script_words(self, workdir: str) -> list[str]:
        script, *arguments = self.profile.run
        return [shlex.quote(word) for word in (str(Path(workdir) / script), *arguments)]

    def head_text(self, shape: JobShape, own_head: bool) -> str:
        return "rank 0; the client is rank 1"


def layout_of(profile: Profile, site: Site, scheduler: Scheduler) -> Layout:
    """Return the layout of a profile."""
    if profile.run_on == "ranks" and profile.layout == "mpi":
        return RanksLayout(profile, site, scheduler)
    return LAYOUTS[profile.layout](profile, site, scheduler)


LAYOUTS: dict[str, type[Layout]] = {
    layout.name: layout for layout in (Layout, AllocationLayout, MpiLayout)
}
"""By the profile's `layout`."""
