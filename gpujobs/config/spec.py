"""The specification of a cluster: a site and a profile, with the position of each value."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from ..errors import InputError, Position, Problem
from ..injob.folder import parse_json, read_file
from ..text import with_home
from .document import Document, parse_value, read
from .model import build
from .profile import Profile, Workers
from .site import Site
from .sitefiles import NoSuchSiteError, SiteFile, load_site, site_of_this_host, working_folder
from .userdefaults import user_defaults

PROGRAMS = (".py", ".sh", ".ipynb", ".sbatch", ".slurm", ".pbs", ".job", ".R", ".jl")
"""Ends of names that no profile has."""


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster as it was requested: a site, a profile, and the position of each value."""

    site: SiteFile
    profile: Profile
    document: Document
    """The profile's document, laid over the site's defaults."""
    name: str
    """First part of the cluster's id."""
    workdir: Path
    modules: str = ""
    """Folder of the program, from which workers import, too; "" if that is `workdir`."""
    dask_files: Mapping[str, str] = field(default_factory=dict)
    """Variables of this shell that name files of dask's configuration."""
    python: str = sys.executable
    """The interpreter that runs gpujobs."""
    from_site: frozenset[str] = frozenset()
    """Keys of the profile whose values are the site's `defaults`; of `env`, also each variable."""
    queue_order: tuple[str, ...] = ()
    """Keys of queues that `queue: auto` tries first, in this order; the others follow."""
    notes: tuple[str, ...] = ()
    """About the keywords in Python that it was made of."""
    queue_key: str = ""
    """The queue whose values the site and the profile have (see `in_queue`)."""

    def position(self, *loc: str | int) -> Position:
        """Return the position of the profile's value at ``loc``."""
        return self.document.position(loc)

    def check_batch_scheduler(self, wanted: tuple[str, ...]) -> None:
        """Raise InputError if the site's batch scheduler is not one of ``wanted``; (): any."""
        if wanted and self.site.site.scheduler not in wanted:
            uses = f"site {self.site.name} uses {self.site.site.scheduler}"
            hint = "use GPUJobQueueCluster, which takes any site"
            raise InputError(f"{uses}, not {' or '.join(wanted)}", hint=hint)

    def in_queue(self, key: str) -> ClusterSpec:
        """Return the specification of jobs in the site's queue ``key``, with the queue's values.

        Values of the queue override those of the site, not those of the profile itself.
        """
        queue, profile = self.site.site.queues[key], self.profile
        walltime = profile.walltime
        if queue.walltime and (walltime is None or "walltime" in self.from_site):
            walltime = queue.walltime
        of_queue = {name for name in queue.env if f"env.{name}" in self.from_site}
        own = {name: value for name, value in profile.env.items() if name not in of_queue}
        site = self.site.site.in_queue(key)
        environment = site.with_environment(profile.environment)
        return replace(
            self,
            site=replace(self.site, site=site),
            profile=replace(
                profile, walltime=walltime, env={**queue.env, **own}, environment=environment
            ),
            queue_key=key,
        )

    def site_position(self, *loc: str | int) -> Position:
        """Return the position of the site's value at ``loc``: of the queue, if it has its own."""
        document, own = self.site.document, ("queues", self.queue_key, *loc)
        keys = tuple(step for step in own if isinstance(step, str))
        if self.queue_key and document.value_at(keys) is not None:
            return document.position(own)
        return document.position(loc)


def load_spec(
    profile: Path, *, site: str | None = None, settings: Document | None = None
) -> ClusterSpec:
    """Load the profile at the path ``profile``, with ``settings`` laid over it.

    ``site`` is as in `make_spec`. InputError with all problems of the first file that has any.
    """
    if profile.suffix in PROGRAMS:
        message = f"{profile} is a program; is this a profile?"
        run = f"run: [python, {profile.name}]" if profile.suffix == ".py" else f"run: [{profile}]"
        raise InputError(message, hint=f"write a profile, such as job.yaml, with gpus: 1 and {run}")
    document = laid_over(settings or Document({}), read(profile))
    return make_spec(document, site=site, base=profile.parent, name=default_name(profile.stem))


def make_spec(
    document: Document,
    *,
    site: str | SiteFile | None = None,
    base: Path | None = None,
    name: str = "dask",
    of_user: bool = True,
) -> ClusterSpec:
    """Return the specification that the profile ``document`` describes.

    The site is ``site``, else the one in the document (a path is relative to ``base``), else
    ``$GPUJOBS_SITE``, else the one that matches this host. ``name`` is the default of its name.
    Below the profile are the defaults of the user, unless not ``of_user``, then those of the site.
    """
    site_file = site if isinstance(site, SiteFile) else choose_site(document, site, base)
    if of_user:
        own = user_defaults(site_file.site)
        document = laid_over(document, _default_environment(document, own))
    defaults = _site_defaults(site_file, document)
    whole = laid_over(document, _default_environment(document, defaults))
    profile = build(Profile, whole)
    return ClusterSpec(
        site=site_file,
        profile=profile,
        document=whole,
        name=profile.name or name,
        workdir=_workdir(profile.workdir or ""),
        from_site=given_names(defaults) - given_names(document),
    )


def _site_defaults(site_file: SiteFile, document: Document) -> Document:
    """Return the site's defaults that the profile ``document`` may have."""
    defaults = site_file.document.section("defaults")
    if document.value.get("groups"):  # each of which has its own number
        defaults = defaults.without("gpus")
    if document.value.get("run"):  # which ends the cluster
        defaults = defaults.without("idle_timeout", "client_timeout")
    return defaults


def laid_over(upper: Document, lower: Document) -> Document:
    """Return the profile ``upper`` laid over ``lower``: keys of an environment beside its name."""
    return _with_names(upper).over(_with_names(lower))


def _with_names(document: Document) -> Document:
    """Return a profile, or a group of it, with `environment: NAME` as ``{name: NAME}``."""
    if not document.is_mapping:
        return document
    items = dict(document.items)
    found = items.get("environment")
    if found and isinstance(found.plain, str):
        items["environment"] = Document({"name": found}, found.place, found.key)
    if document.section("groups").items:
        groups = document.items["groups"]
        items["groups"] = groups.having(
            {name: _with_names(group) for name, group in groups.items.items()}
        )
    return document.having(items)


def _default_environment(document: Document, defaults: Document) -> Document:
    """Return the defaults of a profile without their environment, if it chooses another one.

    A name replaces all of it, a Python or a container of its own only the name.
    """
    own = _with_names(document).section("environment").value
    defaults = _with_names(defaults)
    environment = defaults.section("environment")
    if own.get("name"):
        environment = Document({})
    elif "name" not in own and {"python", "container"} & set(own):
        environment = environment.without("name")
    if not environment.items:
        return defaults.without("environment")
    return defaults.having({**defaults.items, "environment": environment})


def _workdir(text: str) -> Path:
    path = Path(with_home(text))
    return path if path.is_absolute() or text.startswith("~") else working_folder() / path


def given_names(document: Document) -> frozenset[str]:
    """Return the keys that a profile's ``document`` has, and `env.NAME` of its variables."""
    variables = document.section("env").value
    return frozenset(document.value) | {f"env.{name}" for name in variables}


def with_settings(spec: ClusterSpec, settings: Document) -> ClusterSpec:
    """Return ``spec`` with ``settings`` laid over its profile."""
    document = laid_over(settings, spec.document)
    from_site = spec.from_site - given_names(settings)
    return replace(spec, document=document, profile=build(Profile, document), from_site=from_site)


def write_spec(spec: ClusterSpec, path: Path) -> None:
    """Write ``spec`` as JSON, so that jobs can be added to a cluster after its files changed."""
    site = {
        "name": spec.site.name,
        "path": str(spec.site.path),
        "document": spec.site.document.value,
    }
    value = {
        "site": site,
        "document": _resolved(spec).value,
        "name": spec.name,
        "workdir": str(spec.workdir),
        "python": spec.python,
        "from_site": sorted(spec.from_site),
        "queue_order": list(spec.queue_order),
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(value), encoding="utf-8")


class _SiteOfSpec(TypedDict):
    name: str
    path: str
    document: dict[str, Any]


class _MoreOfSpec(TypedDict, total=False):
    queue_order: list[str]  # missing in release 0.2.0


class _SpecFile(_MoreOfSpec):
    site: _SiteOfSpec
    document: dict[str, Any]
    name: str
    workdir: str
    python: str
    from_site: list[str]


def read_spec(path: Path) -> ClusterSpec:
    """Return the specification that `write_spec` wrote; all positions are ``path`` itself."""
    try:
        value: _SpecFile = parse_json(read_file(path), _SpecFile)
        document = Document(value["document"], source=str(path))
        site, whole = value["site"], Document(value["site"]["document"], source=str(path))
        return ClusterSpec(
            site=SiteFile(site["name"], Path(site["path"]), build(Site, whole), whole),
            profile=build(Profile, document),
            document=document,
            name=value["name"],
            workdir=Path(value["workdir"]),
            python=value["python"],
            from_site=frozenset(value["from_site"]),
            queue_order=tuple(value.get("queue_order", ())),
        )
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not the specification of a cluster: {error}") from None


def settings_document(settings: tuple[str, ...]) -> Document:
    """Return ``("workers.memory=40GiB", …)`` as a document."""
    whole = Document({})
    for setting in settings:
        whole = _setting_document(setting).over(whole)
    return whole


def default_name(text: str) -> str:
    """Return ``text`` as a name: letters, digits and dashes."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:40] or "dask"


def _resolved(spec: ClusterSpec) -> Document:
    """Return the profile's document for JSON, which loses the distinction of quoted scalars.

    Only the worker's own options depend on that (see `core_value`).
    """
    own = _options(spec.profile.workers)
    if groups := spec.profile.groups:
        own["groups"] = {name: _options(group.workers) for name, group in groups.items()}
    return Document(own).over(spec.document)


def _options(workers: Workers) -> dict[str, object]:
    return {"workers": {"options": workers.options}} if workers.options else {}


_SETTING = "--set workers.memory=40GiB"
"""An example."""


def _setting_document(setting: str) -> Document:
    key, equals, text = setting.partition("=")
    place = Position(f"--set {setting}")
    if not equals or not re.fullmatch(r"\w+(\.[\w-]+)*", key):
        name, _, value = key.partition(":")
        hint = f"--set {name}={value or 'VALUE'}" if key and not equals else _SETTING
        raise InputError(Problem("must be KEY=VALUE", place, hint=hint))
    document = Document(parse_value(text, place.source), place)
    for section in reversed(key.split(".")):
        document = Document({section: document}, place)
    return document


def choose_site(document: Document, site: str | None, base: Path | None) -> SiteFile:
    """Return the site of a profile (see `make_spec`). Raises InputError."""
    if site:
        return load_site(site)
    own = document.value.get("site")
    if not isinstance(own, str) or not own:
        return load_site(os.environ.get("GPUJOBS_SITE") or site_of_this_host())
    place = document.position(("site",))
    try:
        return load_site(own, base, by_profile=place.line > 0)  # not --set, nor a keyword
    except NoSuchSiteError as error:
        raise InputError(replace(error.problems[0], position=place)) from None


# -- groups of workers: each is specified by a profile of its own ----------------------------------
# A profile without `groups` has one group, whose name is "".

OF_THE_CLUSTER = ("gpus", "groups", "head", "start_workers")
"""Keys of the top level that are not defaults of groups."""


def group_specs(spec: ClusterSpec) -> dict[str, ClusterSpec]:
    """Return the specification of each group by name, in the order of the profile.

    It has the keys of the group laid over those of the top level, with their positions.
    """
    if not spec.profile.groups:
        return {"": spec}
    defaults = replace(spec, document=spec.document.without(*OF_THE_CLUSTER))
    groups = spec.document.section("groups")
    return {name: with_settings(defaults, groups.section(name)) for name in spec.profile.groups}
