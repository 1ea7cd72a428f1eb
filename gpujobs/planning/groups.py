"""The jobs of one group of workers: their number, queue, shape and directives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..injob.names import HEAD
from . import workeroptions
from .containers import PYTHON, plan_container
from .demand import find_demand
from .diagnostics import Diagnostics
from .directives import DirectiveWriter
from .launcher import workers_launcher
from .layout import Layout
from .limits import QueuedJobs
from .machine import Machine
from .queues import QueueChooser
from .samerequests import SameRequests, report_same_requests
from .shape import JobGroup, JobShape, Software
from .staging import choose_staging


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
        self._software(self.diagnostics)  # its problems are reported even if no queue fits
        demand, per_job = find_demand(self.diagnostics, machine), self.profile.gpus_per_job
        if elastic and per_job and "gpus" not in self.profile.given:
            demand = replace(demand, gpus=per_job)  # one job, for its shape
        asked = {"gpus", "gpus_per_job"} & self.profile.given
        chooser = QueueChooser(
            self.diagnostics,
            self.layout,
            machine=machine,
            others=others,
            smallest=elastic and not asked,
        )
        key, shape = chooser.choose(demand.gpus, demand.cpu_workers)
        of_machine = machine.gpu_memory if machine else None
        gpu_memory = self.site.queues[key].gpu_memory or of_machine
        workeroptions.check(self.diagnostics, shape, gpu_memory)
        return self._jobs(name, key, shape)

    def plan_head(self, key: str, shape: JobShape) -> JobGroup:
        """Return the head's own job, of this ``shape`` in the queue ``key``."""
        walltime = self.profile.head.walltime if self.profile.head else None
        return self._jobs(HEAD, key, shape, walltime)

    def _jobs(self, name: str, key: str, shape: JobShape, walltime: int | None = None) -> JobGroup:
        scheduler, queue = self.layout.scheduler, self.site.queues[key]
        diagnostics = self.diagnostics.in_queue(key)
        profile = diagnostics.spec.profile
        walltime = walltime or profile.walltime
        if not walltime and not scheduler.on_this_machine:
            message = "`walltime` is needed: the site has no default"
            if "walltime" in diagnostics.spec.document.value:
                message = "`walltime` is empty"
            diagnostics.profile_error(message, "walltime", hint="walltime: 1h")
        writer = DirectiveWriter(diagnostics, scheduler, key, shape, walltime)
        for note in queue.notes:
            self.diagnostics.note(f"queue {key}: {note}")
        lines, visible_devices = writer.lines(), ""
        if shape.gpus:
            visible_devices = writer.visible_devices()
            same = SameRequests(self.diagnostics.spec, scheduler, key, shape, walltime)
            report_same_requests(self.diagnostics, same)
        software = self._software(diagnostics)
        return JobGroup(
            group=name,
            profile=profile,
            shape=shape,
            queue=self.site.queue_name(key),
            queue_key=key,
            walltime=walltime,
            lines=lines,
            visible_devices=visible_devices,
            software=software,
            launcher=workers_launcher(diagnostics, self.layout, shape, software, key),
            submit_arguments=writer.submit_arguments(),
            account=writer.account(),
        )

    def _software(self, diagnostics: Diagnostics) -> Software:
        container = plan_container(diagnostics, self.root)
        staging = None if container else choose_staging(diagnostics)
        return Software("python" if staging else self._python(), container, staging)

    def _python(self) -> str:
        """Return the jobs' interpreter: the image's, or after a setup, the one on its PATH."""
        environment = self.profile.environment
        if environment.container:
            return environment.python or PYTHON
        if environment.setup and not environment.python:
            self.diagnostics.note(
                "the profile's `setup` selects the Python of the jobs: `python` on its PATH, not "
                f"{self.this_python}; set `environment.python` to choose another"
            )
            return "python"
        return environment.python or self.this_python
