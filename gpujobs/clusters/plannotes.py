"""Notes about a plan on this host: mistakes that cost a wait in the queue."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..config.site import Site
from ..config.sitefiles import SiteFile, cluster_name
from ..planning.plan import Plan
from ..schedulers.local import INHERIT
from ..text import did_you_mean, matches, with_home

_SHELL_WORD = re.compile(r"\d*(>>?|<<?|>&)[\w./&-]*|\|\|?|&&?|;")
_VARIABLE = re.compile(r"\$(\w|\{)")
_SOURCED = re.compile(r"^(?:source|\.)[ \t]+([\"']?)([^\s\"';&|]+/[^\s\"';&|]+)\1", re.MULTILINE)
"""A line of `setup` that reads a file; one in a block, which is indented, may never be reached."""
_UNKNOWN = re.compile(r"[$`*?\[\]{}\\]")
"""Characters of a path that only the job's shell knows how to read."""
_ON_THIS_HOST = " on this host; the nodes need it"
_OF_SETUP = ("module", "ml", "source", "export")
"""Words of a shell with which scripts prepare their environment."""
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh", "csh", "tcsh", "fish")
_DASK_KEY = re.compile(r"DASK_(DISTRIBUTED__(WORKER|NANNY|SCHEDULER|ADMIN|P2P)__|TEMPORARY_DIR)")
"""A variable with a value of dask's configuration that its processes in jobs read."""


def run_notes(plan: Plan, folder: Path) -> Iterator[str]:
    """Yield notes about the command of ``plan``; ``folder``: that of the profile."""
    run = plan.profile.run
    if not run:
        return
    yield from _shell_notes(run)
    workdir = Path(plan.workdir)
    script = script_of(run)
    if script and not (workdir / script).exists():
        yield _missing(script, workdir, folder)
    elif script == run[0] and plan.profile.run_on == "head":
        yield from _start_notes(script, workdir)


def place_notes(plan: Plan) -> Iterator[str]:
    """Yield notes about a `workdir`, a Python and files of `setup` that this host does not have."""
    places = [("workdir", plan.workdir)]
    pythons: list[str] = []
    sourced: list[str] = []
    for jobs in plan.all_jobs:
        environment = jobs.profile.environment
        if jobs.container is None:
            pythons.append(environment.python or "")
            sourced += _sourced(environment.setup, plan.workdir)
    places += [("environment.python", path) for path in pythons if Path(path).is_absolute()]
    places += [("setup", path) for path in sourced]
    for key, path in dict.fromkeys(places):
        if not _UNKNOWN.search(path) and _is_missing(path):
            yield f"{key}: there is no {path}{_ON_THIS_HOST}"


def _sourced(setup: str, workdir: str) -> Iterator[str]:
    """Yield the files that `setup` reads, without those that it may make, or find elsewhere."""
    for found in _SOURCED.finditer(setup):
        path, before = found[2], setup[: found.start()]
        path = path if found[1] else os.path.expanduser(path)  # noqa: PTH111 - of anyone
        made = any(str(parent) in before for parent in Path(found[2]).parents if parent.name)
        if Path(path).is_absolute() and not made:
            yield path
        elif not made and not re.search(r"\b(cd|pushd)\b", before):
            yield str(Path(workdir) / path)


def _is_missing(path: str) -> bool:
    """Return whether a path does not exist; what this user may not look at may exist."""
    try:
        os.stat(path)  # noqa: PTH116 - the word of a user
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def image_notes(plan: Plan) -> Iterator[str]:
    """Yield a note for each image of a container that is not on this host."""
    containers = [jobs.container for jobs in plan.all_jobs if jobs.container]
    images = [one.image for one in containers if one.is_path and "$" not in one.image]
    for image in map(Path, dict.fromkeys(images)):
        there = Path(with_home(str(image)))
        if _is_missing(str(there)):
            text = f"container: there is no image {there}{_ON_THIS_HOST}"
            name = image.relative_to(plan.workdir) if image.is_relative_to(plan.workdir) else image
            yield f"{text}, or is it docker://{name}?" if ":" in image.name else text


def origin_notes(file: SiteFile) -> Iterator[str]:
    """Yield notes about a site file that only the profile names, or that overrides a rule."""
    if file.received:
        yield f"the site file is {file.path}, which only the profile names"
    if file.unused:
        keys = ", ".join(f"`{key}`" for key in file.unused)
        yield f"not used: {keys} of {file.path}, unless you name it: --site {file.path}"
    if file.loosened:
        yield file.loosened


def site_notes(site: Site) -> Iterator[str]:
    """Yield a note if the batch scheduler of this host belongs to another cluster than ``site``."""
    name = "" if site.cluster or not site.cluster_names else cluster_name(site.scheduler)
    if name and not any(matches(one, name) for one in site.cluster_names):
        yield f"this host's cluster is {name}, not {' or '.join(site.cluster_names)}"


def _start_notes(script: str, workdir: Path) -> Iterator[str]:
    """Yield a note if ``script``, which is there, cannot be started without naming `python`."""
    if not os.access(workdir / script, os.X_OK):
        yield f"warning: run: {script} is not executable; write run: [python, {script}]"
    elif "/" not in script:
        yield f"warning: run: PATH has no {script}; write run: [./{script}]"


def _shell_notes(run: tuple[str, ...]) -> Iterator[str]:
    if Path(run[0]).name in _SHELLS:
        return
    if run[0] in _OF_SETUP or run[:2] == ("conda", "activate"):
        yield f"warning: run: `{run[0]}` is a word of a shell: it belongs to `environment.setup`"
    for word in run:
        if _SHELL_WORD.fullmatch(word) or _VARIABLE.search(word):
            yield (
                f"run: no shell runs the command, so it gets `{word}` as it is; "
                "for a shell write run: [bash, -c, '…']"
            )
            return


def script_of(run: tuple[str, ...]) -> str:
    """Return the Python script of a command; "" if it has none."""
    if not run or run[0].endswith(".py"):
        return "".join(run[:1])
    if not Path(run[0]).name.startswith("python"):
        return ""
    # Of `-m module` and `-c code` the first word without a dash is not a script.
    first = next((word for word in run[1:] if not word.startswith("-")), "")
    return first if first.endswith(".py") and not {"-m", "-c"} & {*run[1:3]} else ""


def _missing(script: str, workdir: Path, beside: Path) -> str:
    note = f"warning: run: there is no file {script} in {workdir}"
    if (beside / script).exists():
        return f"{note}, but beside the profile: submit there, or set `workdir: {beside.resolve()}`"
    for above in workdir.parents:
        if (above / script).exists():
            return f"{note}, but in {above}: submit there, or set `workdir: {above}`"
    names = [path.name for path in (workdir / script).parent.glob("*.py")]
    return "; ".join(filter(None, (note, did_you_mean(Path(script).name, names))))


def dask_notes(plan: Plan) -> Iterator[str]:
    """Yield a note about variables of this shell with dask's configuration, which jobs lack."""
    known = {name for jobs in plan.groups for name in jobs.profile.env}
    names = sorted({name for name in os.environ if _DASK_KEY.match(name)} - known)
    inherited = all(INHERIT in jobs.submit_arguments for jobs in plan.groups)
    if names and not inherited:
        listed = ", ".join(names)
        yield f"jobs do not get {listed} of this shell: use `env`, or a file in DASK_CONFIG"
