"""From a specification to a plan and its scripts: everything before a submission."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import errors
from ..config.document import Document, Loc
from ..config.site import Site
from ..config.sitefiles import SiteFile, cluster_name
from ..config.spec import ClusterSpec
from ..config.trust import check_modules
from ..planning.lifetime import Replaces
from ..planning.plan import Machine, Plan, make_plan
from ..schedulers import get_scheduler
from ..schedulers.local import INHERIT
from ..text import did_you_mean, matches, measured_size_text, with_home

if TYPE_CHECKING:
    from ..planning.render import Script

LEAST_SPACE, LEAST_FILES = 2**30, 10_000
"""Free bytes and inodes below which a file system, or a quota, is nearly full."""
_QUOTA_TIMEOUT = 5.0
_AMOUNT = re.compile(r"(?<!\S)\[?(\d{1,18})\]?\**(?!\S)")
"""Of a quota: a star says that it is above the limit, brackets that Lustre misses a server."""


BASH = "/bin/bash"
DASK_FILES = ("DASK_ROOT_CONFIG", "DASK_CONFIG")
"""Variables with files, or folders, of dask's configuration."""
_DASK_KEY = re.compile(r"DASK_(DISTRIBUTED__(WORKER|NANNY|SCHEDULER|ADMIN|P2P)__|TEMPORARY_DIR)")
"""A variable with a value of dask's configuration that its processes in jobs read."""


def make_cluster_plan(
    spec: ClusterSpec, *, replaces: Replaces = "none", devices: tuple[str, ...] | None = None
) -> Plan:
    """Return the plan of ``spec``; ``devices``: GPUs of this machine, None: the free ones."""
    texts: list[Loc] = [("environment", "setup")]
    texts += [("groups", name, "environment", "setup") for name in spec.profile.groups]
    if problems := list(bash_problems(spec.document, texts)):
        raise errors.InputError(problems)
    machine = machine_of(spec, devices)
    folder = Path(spec.document.position(("run",)).source).parent
    spec, own_modules = with_modules(spec, replaces)
    spec = with_dask_files(spec)
    plan = make_plan(spec, python=spec.python, machine=machine, replaces=replaces)
    problems_of_space = space_problems(Path(plan.root), spec.site.site.quota_command)
    space = (f"warning: {problem}" for problem in problems_of_space)
    own = (
        *origin_notes(spec.site),
        *site_notes(spec.site.site),
        *run_notes(plan, folder),
        *place_notes(plan),
        *image_notes(plan),
        own_modules,
        dask_note(plan),
        *space,
    )
    return replace(plan, notes=(*plan.notes, *filter(None, own)))


def machine_of(
    spec: ClusterSpec, devices: tuple[str, ...] | None = None, used: tuple[str, ...] = ()
) -> Machine | None:
    """Return this machine if the site is local (see `this_machine`), else None."""
    site = spec.site.site
    if not get_scheduler(site.scheduler).on_this_machine:
        return None
    from .freequeues import this_machine

    machine = this_machine(devices, used)
    if site.one_machine:
        return machine
    queue = next(iter(site.queues.values()))  # made by `here`, of the job that this process is in
    return replace(machine, nodes=queue.nodes or 1)


def scripts_of(
    spec: ClusterSpec, plan: Plan, cluster_id: str, limit: int | None = None
) -> list[Script]:
    """Return the scripts of a cluster; ``limit`` is the largest size of an array."""
    from ..planning.render import render  # `plan` needs no templates

    return render(plan, cluster_id, limit=limit, site_folder=spec.site.path.parent)


def with_modules(spec: ClusterSpec, replaces: Replaces = "none") -> tuple[ClusterSpec, str]:
    """Return ``spec`` with the folder from which workers import, too, and a note about it.

    That is the first place in which Python looks for the modules of a program: the folder of the
    script in `run`, or if this process owns the cluster, of its main script. Workers
    import from `workdir` in any case. A folder that all users can write is not used.
    """
    script = _main_script() if replaces == "owner" else script_of(spec.profile.run)
    folder = _folder_of(spec.workdir / script) if script else None
    if folder is None or not folder.is_dir() or _is_same(folder, spec.workdir):
        return replace(spec, modules=""), ""
    try:
        check_modules(folder)
    except errors.InputError as error:
        why = f"{error.problems[0].message}; `workdir` or PYTHONPATH may name it"
        return replace(spec, modules=""), f"own modules of {script}: {why}"
    note = (
        ""
        if replaces == "owner"
        else f"workers also import modules from {folder}, the folder of {script}"
    )
    return replace(spec, modules=str(folder)), note


def with_dask_files(spec: ClusterSpec) -> ClusterSpec:
    """Return ``spec`` with the files of dask's configuration that this shell names."""
    given = {name: os.environ[name] for name in DASK_FILES if os.environ.get(name)}
    files = {name: os.path.abspath(path) for name, path in given.items()}  # noqa: PTH100 - links stay
    return replace(spec, dask_files=files)


def dask_note(plan: Plan) -> str:
    """Return a note about variables of this shell with dask's configuration, which jobs lack."""
    known = {name for jobs in plan.groups for name in jobs.profile.env}
    names = sorted({name for name in os.environ if _DASK_KEY.match(name)} - known)
    inherited = all(INHERIT in jobs.submit_arguments for jobs in plan.groups)
    if not names or inherited:
        return ""
    listed = ", ".join(names)
    return f"jobs do not get {listed} of this shell: use `env`, or a file in DASK_CONFIG"


def _is_same(folder: Path, workdir: Path) -> bool:
    return workdir.is_dir() and folder.samefile(workdir)


def _main_script() -> str:
    """Return the script that this process runs; "" in a notebook and with `python -m`."""
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if not script or main.__spec__ is not None:
        return ""
    import sysconfig

    installed = Path(script).parent == Path(sysconfig.get_path("scripts"))
    return "" if installed else str(script)


def _folder_of(script: Path) -> Path:
    """Return the folder from which Python imports: that of the target, if it is a link."""
    target = Path(os.path.realpath(script)) if script.is_symlink() else script
    return Path(os.path.abspath(target)).parent  # noqa: PTH100 - links to folders stay


def bash_problems(document: Document, places: Iterable[Loc]) -> Iterator[errors.Problem]:
    """Yield the syntax errors of the bash texts at ``places`` of a document."""
    for loc in places:
        text = document.value_at(loc)
        if isinstance(text, str) and (message := bash_error(text)):
            position = _line_inside(document.position(loc), message)
            name = ".".join(map(str, loc))
            yield errors.Problem(f"`{name}`: bash -n refuses it: {message}", position)


def bash_error(text: str) -> str:
    """Return the first error of ``bash -n`` in ``text``; "" if it is correct, or without bash."""
    # It does not execute `shopt -s extglob`, and so has the option from the beginning.
    from ..batch import process  # most profiles have no bash text

    result = process.run([BASH, "-O", "extglob", "-n"], stdin=text)
    if not result.started or (result.exit_code == 0 and not result.stderr):
        return ""
    return result.first_line.removeprefix(f"{BASH}: ")


def _line_inside(position: errors.Position, message: str) -> errors.Position:
    """Return the line of the file that bash means, if the text is a block of lines."""
    found = re.match(r"line (\d+):", message)
    if not found or not position.text.split("#")[0].rstrip().endswith("|"):
        return position
    return replace(position, line=position.line + int(found[1]), column=1, text="")


# -- notes about site, `run` and image: mistakes that cost a wait in the queue ---------------------
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
    places = {"workdir": [plan.workdir], "environment.python": [], "setup": []}
    for jobs in plan.all_jobs:
        environment = jobs.profile.environment
        if jobs.container is None:
            python = environment.python or ""
            places["environment.python"] += [python] if Path(python).is_absolute() else []
            places["setup"] += _sourced(environment.setup, plan.workdir)
    for key, paths in places.items():
        for path in dict.fromkeys(paths):
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


# -- space that is left ----------------------------------------------------------------------------
def space_problems(root: Path, quota_command: Sequence[str] = ()) -> Iterator[str]:
    """Yield why there is little room in the folder ``root`` and in the home folder.

    ``quota_command``: of the site; without a usable output, only file systems are reported.
    """
    places = (root, Path(with_home("~")))  # some users have none
    existing = (next(filter(Path.is_dir, (path, *path.parents)), path) for path in places)
    for there in dict.fromkeys(existing):
        with contextlib.suppress(OSError):
            disk = os.statvfs(there)
            files = _left((disk.f_files - disk.f_favail, disk.f_files))  # some count none
            yield from _shortage(f"{there}", disk.f_bavail * disk.f_frsize, files)
    if quota_command:
        from ..batch import process

        result = process.run(quota_command, timeout=_QUOTA_TIMEOUT)
        yield from quota_problems(result.stdout)  # `quota` exits with 1 if one is exceeded


def quota_problems(output: str) -> Iterator[str]:
    """Yield which quotas in the output of `quota`, `lfs quota` or `mmlsquota` have little left.

    A row has the used amount, the quota and the limit, 0 if there is none, first in KiB, then of
    files, which follow `|` with mmlsquota. After each limit there may be one more number, such as
    the grace period with `quota -p`. Other lines are not read.
    """
    name = ""
    for line in output.splitlines():
        space, files = map(_AMOUNT.findall, line.partition("|")[::2])
        if line.strip() and not _AMOUNT.match(line.strip()):  # else the row continues a long name
            name = line.split()[0]
        if len(space) in (6, 8):
            space, files = space[: len(space) // 2], space[len(space) // 2 :]
        if min(len(space), len(files)) >= 3:
            yield from _shortage(f"the quota of {name}", _left(space) * 1024, _left(files))


def _shortage(name: str, space: float, files: float) -> Iterator[str]:
    if space < LEAST_SPACE:
        yield f"{name} has only {measured_size_text(int(space))} left"
    elif files < LEAST_FILES:
        yield f"{name} has room for only {files} more files"


def _left(amounts: Sequence[str | int]) -> float:
    used, *limits = map(int, amounts[:3])
    return max(0, min(filter(None, limits), default=math.inf) - used)
