"""The batch job that this process is in, as a site: its nodes and GPUs, and no submission."""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.document import Document
from ..config.model import build
from ..config.profile import DIRECTIVE_KEYS
from ..config.site import Site
from ..config.sitefiles import NoSiteHereError, SiteFile, load_site
from ..config.spec import ClusterSpec, choose_site, make_spec
from ..errors import InputError
from ..injob.gpus import visible_devices
from ..injob.network import job_nodes
from ..planning.bash import without
from ..schedulers import Scheduler, usable_schedulers
from ..schedulers.jobs import Granted
from ..schedulers.local import INHERIT
from ..text import plural
from .freequeues import this_machine

_OF_SITE = ("contact", "containers", "directory", "environment", "environments",
            "environments_only", "mpi", "network", "scratch", "setup", "shell")  # fmt: skip
"""Keys of a site, or a queue, that are not about the submission of jobs."""
_OF_QUEUE = ("env", "gpu_memory")
_OF_JOB = ("account", "after", "cpus_per_job", "directives", "gpu_type", "gpus", "gpus_per_job",
           "head", "layout", "memory_per_job", "options", "queue", "requeue", "walltime",
           "walltime_exit", *DIRECTIVE_KEYS)  # fmt: skip
"""Keys of a profile that this job has decided."""
_SHORTEST_WALLTIME = 60


@dataclass(frozen=True)
class JobHere:
    """The job that this process is in."""

    scheduler: type[Scheduler]
    id: str
    queue: str
    nodes: int
    granted: Granted

    def __str__(self) -> str:
        return f"job {self.id} of {self.scheduler.name}"


def find_job(environ: Mapping[str, str] = os.environ) -> JobHere:
    """Return the job that a process with ``environ`` is in. Raises InputError if there is none."""
    known = usable_schedulers()
    needed = {one: {one.job_variable, one.job_mark or one.job_variable} for one in known}
    found = [one for one, names in needed.items() if names <= {*environ}]
    if not found:
        hint = (
            "`gpujobs submit PROFILE` starts jobs; --here is for salloc, qsub -I or a batch script"
        )
        raise InputError("this process is in no job of a batch scheduler", hint=hint)
    scheduler = max(found, key=lambda one: len(one.__mro__))  # Torque, of which PBS is a base
    granted = scheduler.granted(environ)
    try:
        nodes = granted.nodes or len(job_nodes(environ))
    except LookupError:  # nothing lists the only node
        nodes = 1
    queue = environ.get(scheduler.queue_variable, "")
    return JobHere(scheduler, environ[scheduler.job_variable], queue, nodes, granted)


def enter_words(job: JobHere) -> list[str]:
    """Return the command that runs another one on a node of the job, with the GPUs of the node."""
    gpus = job.granted.gpus_per_node
    options = [text.format(gpus_per_node=gpus) for text in job.scheduler.step_gpus if gpus]
    return [*job.scheduler.enter, *options]


def unset_words(job: JobHere, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the words before `enter_words` that hide the request of the job from the step."""
    hidden = without(name for name in job.scheduler.job_request if name in environ)
    return " ".join(hidden).split()


def cluster_here(
    document: Document, *, site: str | None = None, base: Path | None = None, name: str = "here"
) -> tuple[ClusterSpec, tuple[str, ...], str]:
    """Return the specification of a cluster on all nodes of this job, its GPUs here, and a note.

    ``document`` is a profile, the other arguments are those of `make_spec`. Without a site, the
    defaults of the batch scheduler are used. Raises InputError.
    """
    job = find_job()
    if not job.granted.on_node:
        hint = shlex.join([*unset_words(job), *enter_words(job), "python", "…"])
        raise InputError(f"{job} has no process on {socket.gethostname()}", hint=hint)
    try:
        of_host = choose_site(document, site, base)
    except NoSiteHereError:
        of_host = load_site("local")
    described = _site_document(of_host.document, job)
    devices: tuple[str, ...] = ()
    if str(document.value.get("gpus")) != "0":
        devices = _devices(described.value["visible_devices"])
    settings = _settings(job, len(devices))
    own = Document(settings, source=str(job)).over(document.without(*_OF_JOB))
    here = SiteFile(of_host.name, of_host.path, build(Site, described), described)
    note = _note(job, len(devices), document, settings)
    return make_spec(own, site=here, base=base, name=name), devices, note


def _site_document(site: Document, job: JobHere) -> Document:
    """Return the local site that this job is, with the values of its queue in ``site``."""
    value: dict[str, Any] = {"visible_devices": job.scheduler.visible_devices or "scheduler"}
    if job.nodes > 1:
        value["node_launcher"] = [*job.scheduler.node_launcher, *job.scheduler.step_gpus]
    names = [*_OF_SITE]
    if site.value.get("scheduler") == job.scheduler.name:
        names += value
    queue = _queue(site, job.queue)
    value |= _only(queue, names).over(_only(site, names)).value
    shape: dict[str, object] = {
        "nodes": job.nodes,
        "exclusive": value["visible_devices"] == "exclusive",
    }
    if memory := job.granted.memory_per_node:
        shape["memory_per_node"] = f"{memory}MiB"
    value |= {
        "description": str(job),
        "scheduler": "local",
        "submit_arguments": [INHERIT],
        "queues": {job.queue or "here": {**_only(queue, _OF_QUEUE).value, **shape}},
        "defaults": site.section("defaults").without(*_OF_JOB).value,
    }
    return Document(value, source=str(job))


def _only(document: Document, names: Iterable[str]) -> Document:
    return Document({name: document.value[name] for name in names if name in document.value})


def _queue(site: Document, name: str) -> Document:
    """Return the queue of a site that the batch scheduler calls ``name``; empty if it has none."""
    queues = site.section("queues")
    named = (key for key in queues.value if name in (queues.section(key).value.get("name"), key))
    return queues.section(next(named, ""))


def _devices(source: object) -> tuple[str, ...]:
    """Return the GPUs of this job on this node, as ``source`` lists them, else the free ones."""
    if isinstance(source, Mapping):  # {variable: NAME} or {file: NAME}
        source = ":".join(*source.items())
    with suppress(LookupError):
        if (listed := visible_devices(str(source), os.environ)) is not None:
            return this_machine(tuple(listed)).gpus
    return this_machine().gpus


def _settings(job: JobHere, gpus: int) -> dict[str, object]:
    """Return the keys of the profile that this job decides; ``gpus``: on each node."""
    settings: dict[str, object] = {"gpus": "auto"}
    if gpus:
        settings = {"gpus": gpus * job.nodes, "layout": "allocation"}
    elif job.nodes > 1:
        message = f"{job} has {job.nodes} nodes, and no GPU on {socket.gethostname()}"
        raise InputError(message, hint="CPU workers are possible in a job of one node")
    left = int(job.granted.end - time.time())
    if left >= _SHORTEST_WALLTIME:
        settings["walltime"] = f"{left}s"
    return settings


def _note(job: JobHere, gpus: int, document: Document, settings: Mapping[str, object]) -> str:
    """Return the nodes and GPUs of this job, and which keys of the profile differ."""
    known = {**settings, "queue": job.queue}
    given = _only(document, _OF_JOB).value.items()
    differ = [f"`{key}`" for key, value in given if str(value) != str(known.get(key))]
    shown = f"{job}: {plural(job.nodes, 'node')} with {plural(gpus, 'GPU')}"
    return f"{shown}; not used: {', '.join(differ)} of the profile" if differ else shown
