"""The jobs of one group of workers, and the head's own: their number, queue, shape, directives."""

from __future__ import annotations

from collections.abc import Sequence

from ..config.document import Document
from ..config.profile import Head
from ..config.site import Site
from ..config.sitequeue import Queue
from ..config.spec import ClusterSpec, with_settings
from ..injob.names import HEAD
from . import workeroptions
from .bash import Diagnostics
from .containers import PYTHON, Container, Staging, choose_staging, plan_container
from .directives import DirectiveWriter
from .environments import check_environment, check_in_queue, named_environment
from .hostmemory import MemoryRequest, cpu_share, requested_memory
from .layouts import Layout
from .lifetime import check_task_time
from .limits import QueuedJobs
from .queues import QueueChooser
from .requested import Machine, find_demand
from .samerequests import report_same_requests
from .shape import JobGroup, JobShape, QueueMismatch


class GroupPlanner:
    """Plans the jobs of one group; ``diagnostics`` and ``layout`` are those of its profile.

    ``this_python`` is the interpreter that runs gpujobs, ``root`` the folder of the clusters'
    folders.
    """

    def __init__(
        self, diagnostics: Diagnostics, layout: Layout, this_python: str, root: str
    ) -> None:
        self.diagnostics, self.layout = diagnostics, layout
        self.this_python, self.root = this_python, root
        self.profile, self.site = diagnostics.spec.profile, diagnostics.spec.site.site

    def plan(
        self,
        name: str,
        machine: Machine | None,
        others: Sequence[QueuedJobs],
        *,
        elastic: bool,
    ) -> JobGroup:
        """Return the jobs of the group ``name``; see `QueueChooser` for ``others``.

        Raises InputError if no queue fits; reports other problems.
        """
        check_environment(self.diagnostics)
        if not self.profile.environment.name:  # else it may depend on the queue
            self._software(self.diagnostics)  # its problems are reported even if no queue fits
        gpus, cpu_workers = find_demand(self.diagnostics, machine)
        if elastic and self.profile.gpus_per_job and "gpus" not in self.profile.given:
            gpus = self.profile.gpus_per_job  # one job, for its shape
        asked = {"gpus", "gpus_per_job"} & self.profile.given
        chooser = QueueChooser(
            self.diagnostics,
            self.layout,
            machine,
            others,
            smallest=elastic and not asked,
            gpus=gpus,
            count=cpu_workers,
        )
        chosen = chooser.choose()
        self.diagnostics.note(*chosen.notes)
        queue = self.site.queues[chosen.key]
        if machine:
            queue = machine.complete(queue)
        workeroptions.check(self.diagnostics, chosen.shape, queue.gpu_memory)
        keys, notes = chooser.equal_queues(chosen)
        self.diagnostics.note(*notes)
        queues = list(dict.fromkeys(self.site.queue_name(key) for key in keys))
        group = self._jobs(name, chosen.key, chosen.shape, queues=queues)
        check_task_time(self.diagnostics, group.walltime)
        return group

    def plan_head(self, key: str, shape: JobShape) -> JobGroup:
        """Return the head's own job, of this ``shape`` in the queue ``key``."""
        walltime = self.profile.head.walltime if self.profile.head else None
        check_environment(self.diagnostics)
        in_queue = self.diagnostics.in_queue(key)
        try:
            check_in_queue(in_queue.spec, self.site.queues[key], gpus=0)
        except QueueMismatch as mismatch:
            self.diagnostics.profile_error(f"queue {key}: {mismatch}", "environment")
        return self._jobs(HEAD, key, shape, walltime)

    def _jobs(
        self,
        name: str,
        key: str,
        shape: JobShape,
        walltime: int | None = None,
        queues: Sequence[str] = (),
    ) -> JobGroup:
        scheduler, queue = self.layout.scheduler, self.site.queues[key]
        diagnostics = self.diagnostics.in_queue(key)
        profile = diagnostics.spec.profile
        walltime = walltime or profile.walltime
        if not walltime and not scheduler.on_this_machine:
            _report_no_walltime(diagnostics)
        writer = DirectiveWriter(diagnostics, scheduler, shape, walltime, queues)
        self.diagnostics.note(*(f"queue {key}: {note}" for note in queue.notes))
        if note := workeroptions.memory_note(profile.workers, shape):
            self.diagnostics.note(note)
        lines, visible_devices = writer.lines(), ""
        if shape.gpus:
            visible_devices = writer.visible_devices()
            report_same_requests(self.diagnostics, scheduler, key, shape, walltime)
        python, container, staging = self._software(diagnostics)
        return JobGroup(
            group=name,
            profile=profile,
            site=diagnostics.spec.site.site,
            shape=shape,
            queue=",".join(queues) or self.site.queue_name(key),
            queue_key=key,
            walltime=walltime,
            lines=lines,
            visible_devices=visible_devices,
            python=python,
            container=container,
            staging=staging,
            launcher=writer.launcher(container),
            run_launcher=writer.run_launcher(container),
            submit_arguments=writer.submit_arguments(),
            account=writer.account,
            cuda=self._cuda(diagnostics),
        )

    def _cuda(self, diagnostics: Diagnostics) -> str:
        """Return the CUDA version that the environment needs, "" if it states none."""
        environment = named_environment(diagnostics.spec)
        return (environment and environment.gpu) or ""

    def _software(self, diagnostics: Diagnostics) -> tuple[str, Container | None, Staging | None]:
        """Return the jobs' interpreter, and the container or the staging that has it."""
        container = plan_container(diagnostics, self.root)
        staging = None if container else choose_staging(diagnostics)
        return "python" if staging else self._python(diagnostics), container, staging

    def _python(self, diagnostics: Diagnostics) -> str:
        """Return the jobs' interpreter: the image's, or after a setup, the one on its PATH."""
        environment = diagnostics.spec.profile.environment
        if environment.container:
            return environment.python or PYTHON
        if environment.setup and not environment.python:
            if environment.name:  # whose setup the user has not written
                return "python"
            self.diagnostics.note(
                "the profile's `setup` selects the Python of the jobs: `python` on its PATH, not "
                f"{self.this_python}; set `environment.python` to choose another"
            )
            return "python"
        return environment.python or self.this_python


def _report_no_walltime(diagnostics: Diagnostics) -> None:
    message = "`walltime` is needed: the site has no default"
    if "walltime" in diagnostics.spec.document.value:
        message = "`walltime` is empty"
    diagnostics.profile_error(message, "walltime", hint="walltime: 1h")


def head_queue(diagnostics: Diagnostics) -> str | None:
    """Return the key of the queue of the head's own job; None if it has none or no queue fits."""
    head, site = diagnostics.spec.profile.head, diagnostics.spec.site.site
    if head is None or head.group:
        return None
    key = head.queue or _queue_without_gpus(site)
    if key in site.queues:
        return key
    hint = f"head: {{queue: …}}, one of {', '.join(site.queues)}"
    message = "the head needs a queue without GPUs"
    diagnostics.profile_error(message, "head", "queue", hint=hint)
    return None


def head_shape(head: Head, queue: Queue, texts: tuple[str, ...]) -> JobShape:
    """Return the shape of the head's own job in ``queue``, whose directives are ``texts``.

    Raises QueueMismatch if the nodes of the queue have too little memory.
    """
    request = MemoryRequest(texts, nodes=1, cpus=head.cpus, gpus=0)
    share = cpu_share(queue, head.cpus)
    memory = requested_memory(queue, request, "head.memory", head.memory, share)
    return JobShape(jobs=1, nodes=1, gpus=0, cpus=head.cpus, memory=memory)


def head_spec(spec: ClusterSpec, head: Head) -> ClusterSpec:
    """Return the specification for the head's own job, which may have an account of its own."""
    if not head.account:
        return spec
    account = Document(head.account, spec.position("head", "account"))
    return with_settings(spec, Document({"account": account}))


def _queue_without_gpus(site: Site) -> str | None:
    return next(
        (key for key, queue in site.queues.items() if not queue.worker_gpus and queue.auto), None
    )
