"""Keywords of the cluster classes → the same document that a profile file gives.

A keyword is a key of the profile, or one of dask-jobqueue's that says the same. Those that cannot mean anything here
are refused with the name of what does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.document import Document, Loc
from ..config.fields import count, positive, sequence, size
from ..config.model import build, key_names, keys_of, suggest
from ..config.profile import Profile, Workers
from ..config.site import Site
from ..config.sitefiles import NoSiteHereError, SiteFile
from ..config.spec import ClusterSpec, make_spec
from ..errors import InputError, Position, Problem

# dask-jobqueue's names for keys of the profile.
SAME: dict[str, Loc] = {
    "job_extra_directives": ("directives",),
    "local_directory": ("workers", "local_directory"),
    "python": ("environment", "python"),
    "interface": ("network", "interface"),
    "worker_memory": ("workers", "memory"),
    "worker_threads": ("workers", "threads"),
    "worker_class": ("workers", "worker_class"),
}
REFUSED = {
    "project": "account",
    "job_cpu": "cores",
    "job_mem": "memory",
    "ncpus": "cores",
    "mem": "memory",
    "resource_spec": "`request` of the site file",
    "job_extra": "directives",
    "extra": "worker_options",
    "env_extra": "environment={'setup': …}, or env={…}",
    "header_skip": "`request` of the site file: what is not in it is not asked for",
    "job_directives_skip": "`request` of the site file: what is not in it is not asked for",
    "shebang": "`shell` of the site file",
    "nanny": "worker_class",
    "worker_command": "worker_class",
    "shared_temp_directory": "`directory` of the site file: certificates are in the cluster's folder",
    "security": "network={'encryption': …}: each cluster makes its own certificate",
    "host": "scheduler_options={'host': …}",
    "dashboard_address": "scheduler_options={'dashboard_address': …}",
    "scheduler_cls": "scheduler_options",
    "job_cls": "site",
    "config_name": "site",
    "gpus": "n_workers",
    "run": "`gpujobs submit`, which runs a command in the cluster",
    "start_workers": "wait_for_workers",
}
PER_JOB = ("cores", "memory", "processes")
OWN = (
    "worker_options",
    "worker_extra_args",
    "job_script_prologue",
    "death_timeout",
    "protocol",
    *PER_JOB,
)


def spec_of(
    keywords: Mapping[str, Any],
    site: str | None,
    n_workers: int,
    batch_schedulers: tuple[str, ...] = (),
) -> ClusterSpec:
    """Return the order that keywords ask for; its GPUs are whole jobs that together have ``n_workers`` or more."""
    if not isinstance(n_workers, int) or isinstance(n_workers, bool) or n_workers < 0:
        raise InputError(f"n_workers: {n_workers!r} is not a number of workers (0, 1, 2, …)")
    document = document_of(keywords)
    value: dict[str, Any] = dict(document.value)
    if value.get("gpus") == 0:
        value["workers"] = {**value.get("workers", {}), "count": n_workers or 1}
    elif n_workers or "gpus_per_job" in value:
        per_job = positive(value.get("gpus_per_job", 1))
        value["gpus"] = max(1, math.ceil(n_workers / per_job)) * per_job
    elif value.get("layout") == "mpi":
        raise InputError(
            "layout='mpi' is one allocation: say how many GPUs it has", hint="n_workers=8"
        )
    document = Document(value, document.positions, document.keys, document.source)
    try:
        spec = make_spec(document, site=site)
    except NoSiteHereError:
        if not batch_schedulers or "queue" not in keywords:
            raise
        spec = make_spec(document, site=_site_of(keywords, document, batch_schedulers[0]))
    found = spec.site.site.scheduler
    if batch_schedulers and found not in batch_schedulers:
        hint = "use GPUJobQueueCluster, which takes any site"
        raise InputError(
            f"site {spec.site.name} has {found}, not {' or '.join(batch_schedulers)}", hint=hint
        )
    return spec


def _site_of(
    keywords: Mapping[str, Any], document: Document, batch_scheduler: str
) -> SiteFile:
    """Return a site as far as keywords tell, for those who come from dask-jobqueue: a queue with jobs of one shape."""
    queue: dict[str, Any] = {
        "cpus_per_node": keywords.get("cores"),
        "memory_per_node": keywords.get("memory"),
    }
    if document.value.get("gpus") != 0:
        queue["gpus_per_node"] = document.value.get("gpus_per_job", 1)
    queue = {key: item for key, item in queue.items() if item is not None}
    site = {
        "description": "from keywords",
        "scheduler": batch_scheduler,
        "queues": {str(keywords["queue"]): queue},
    }
    described = Document(site, source="keywords (no site file)")
    return SiteFile("none", Path.cwd() / "none.yaml", build(Site, described), described)


def document_of(keywords: Mapping[str, Any], source: str = "keyword") -> Document:
    """Return what ``keywords`` ask for as a document, each value at a position that names its keyword."""
    known = [*(name for name in keys_of(Profile) if name not in REFUSED), *SAME, *OWN]
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    positions: dict[Loc, Position] = {}

    def put(loc: Loc, value: Any, keyword: str) -> None:
        here: dict[Any, Any] = values
        for step in loc[:-1]:
            here = here.setdefault(step, {})
        here[loc[-1]] = value
        for n in range(1, len(loc) + 1):
            positions[loc[:n]] = Position(f"{source} {keyword}")

    for name, value in keywords.items():
        place = Position(f"{source} {name}")
        try:
            if name in REFUSED:
                problems.append(Problem("has no meaning here", place, hint=f"use {REFUSED[name]}"))
            elif value is None or name in PER_JOB:
                continue
            elif name == "gpus_per_job" and count(value) == 0:
                put(("gpus",), 0, name)
            elif name in SAME:
                put(SAME[name], value, name)
            elif name in OWN:
                for loc, item in _own(name, value):
                    put(loc, item, name)
            elif name in known:
                put((name,), value, name)
            else:
                problems.append(Problem("unknown keyword", place, hint=_suggestion(name, known)))
        except ValueError as error:
            problems.append(Problem(str(error), place))
    try:
        for loc, value in _per_job(keywords):
            put(loc, value, "/".join(name for name in PER_JOB if keywords.get(name) is not None))
    except ValueError as error:
        problems.append(Problem(str(error), Position(f"{source}s cores, memory, processes")))
    if problems:
        raise InputError(problems)
    return Document(values, positions, dict(positions), f"{source}s")


def _suggestion(name: str, known: list[str]) -> str:
    return suggest(name, known, [*known, *(f"workers.{key}" for key in key_names(Workers))])


def _own(name: str, value: Any) -> list[tuple[Loc, Any]]:
    if name == "job_script_prologue":
        lines = [value] if isinstance(value, str) else [str(line) for line in sequence(value)]
        return [(("environment", "setup"), "\n".join(lines))]
    if name == "death_timeout":  # seconds, in dask-jobqueue
        return [(("workers", "death_timeout"), f"{value}s" if isinstance(value, int) else value)]
    if name == "protocol":
        scheme = str(value).removesuffix("://")
        encrypted = {"tls": ("tcp", True), "wss": ("ws", True)}.get(scheme)
        if encrypted:
            return [(("network", "protocol"), encrypted[0]), (("network", "encryption"), True)]
        return [(("network", "protocol"), scheme)]
    options = _extra_args(value) if name == "worker_extra_args" else dict(value)
    fields = keys_of(Workers)
    own = [
        (("workers", key), item)
        for key, item in options.items()
        if key in fields and key != "options"
    ]
    return own + [
        (("workers", "options", key), item) for key, item in options.items() if key not in fields
    ]


def _extra_args(value: Any) -> dict[str, Any]:
    """Return ``["--lifetime", "1h", "--no-x", "--y=2"]`` as options."""
    found: dict[str, Any] = {}
    last = ""
    for word in sequence(value):
        if str(word).startswith("--"):
            name, equals, text = str(word)[2:].partition("=")
            last = name.replace("-", "_")
            if equals:
                found[last] = text
            elif last.startswith("no_"):
                found[last.removeprefix("no_")] = False
            else:
                found[last] = True
        elif last and found.get(last) is True:
            found[last] = str(word)
        else:
            raise ValueError(f"{word!r} does not follow an option")
    return found


def _per_job(keywords: Mapping[str, Any]) -> list[tuple[Loc, Any]]:
    """Return what dask-jobqueue's numbers of one job mean for each of its workers."""
    given = {name: keywords[name] for name in PER_JOB if keywords.get(name) is not None}
    gpus = keywords.get("gpus_per_job")
    cpu_workers = gpus is not None and count(gpus) == 0
    found: list[tuple[Loc, Any]] = []
    workers = 1 if cpu_workers else positive(gpus) if gpus is not None else None
    if "processes" in given:
        processes = positive(given["processes"])
        if workers is not None and processes != workers:
            what = (
                "a job of CPU workers has one"
                if cpu_workers
                else f"gpus_per_job is {workers}, one worker per GPU"
            )
            raise ValueError(f"processes is {processes}, but {what}")
        workers = processes
        found.append((("gpus_per_job",), processes))
    workers = workers or 1
    if "cores" in given:
        cores = positive(given["cores"])
        if cores < workers:
            raise ValueError(f"{cores} cores are too few for {workers} workers of a job")
        found.append((("workers", "threads"), cores // workers))
    if "memory" in given:
        found.append((("workers", "memory"), f"{size(given['memory']) // workers}B"))
    return found if not cpu_workers else [item for item in found if item[0] != ("gpus_per_job",)]
