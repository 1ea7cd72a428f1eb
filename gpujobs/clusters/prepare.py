"""From a specification to a plan and its scripts: everything before a submission."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.document import Loc
from ..config.spec import ClusterSpec
from ..config.trust import check_modules
from ..errors import InputError
from ..planning.lifetime import Replaces
from ..planning.plan import Machine, Plan, make_plan
from ..schedulers import get_scheduler
from .bashcheck import bash_problems
from .plannotes import (
    dask_notes,
    image_notes,
    origin_notes,
    place_notes,
    run_notes,
    script_of,
    site_notes,
)
from .space import space_notes

if TYPE_CHECKING:
    from ..planning.render import Script

DASK_FILES = ("DASK_ROOT_CONFIG", "DASK_CONFIG")
"""Variables with files, or folders, of dask's configuration."""


def make_cluster_plan(
    spec: ClusterSpec, *, replaces: Replaces = "none", devices: tuple[str, ...] | None = None
) -> Plan:
    """Return the plan of ``spec``; ``devices``: GPUs of this machine, None: the free ones."""
    texts: list[Loc] = [("environment", "setup")]
    texts += [("groups", name, "environment", "setup") for name in spec.profile.groups]
    if problems := list(bash_problems(spec.document, texts)):
        raise InputError(problems)
    machine: Machine | None
    if spec.site.site.machines:
        from .machines import on_machines

        spec, machine = on_machines(spec)
    else:
        machine = machine_of(spec, devices)
    folder = Path(spec.document.position(("run",)).source).parent
    spec, module_notes = with_modules(spec, replaces)
    spec = with_dask_files(spec)
    plan = make_plan(spec, python=spec.python, machine=machine, replaces=replaces)
    checks: tuple[Iterable[str], ...] = (
        origin_notes(spec.site),
        site_notes(spec.site.site),
        run_notes(plan, folder),
        place_notes(plan),
        image_notes(plan),
        module_notes,
        dask_notes(plan),
        space_notes(plan, spec.site.site),
    )
    notes = [note for check in checks for note in check]
    return replace(plan, notes=(*plan.notes, *notes))


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


def with_modules(spec: ClusterSpec, replaces: Replaces = "none") -> tuple[ClusterSpec, list[str]]:
    """Return ``spec`` with the folder from which workers import, too, and notes about it.

    That is the first place in which Python looks for the modules of a program: the folder of the
    script in `run`, or if this process owns the cluster, of its main script. Workers
    import from `workdir` in any case. A folder that all users can write is not used.
    """
    script = _main_script() if replaces == "owner" else script_of(spec.profile.run)
    folder = _folder_of(spec.workdir / script) if script else None
    if folder is None or not folder.is_dir() or _is_same(folder, spec.workdir):
        return replace(spec, modules=""), []
    try:
        check_modules(folder)
    except InputError as error:
        why = f"{error.problems[0].message}; `workdir` or PYTHONPATH may name it"
        return replace(spec, modules=""), [f"own modules of {script}: {why}"]
    notes = []
    if replaces == "none":
        notes = [f"workers also import modules from {folder}, the folder of {script}"]
    return replace(spec, modules=str(folder)), notes


def with_dask_files(spec: ClusterSpec) -> ClusterSpec:
    """Return ``spec`` with the files of dask's configuration that this shell names."""
    given = {name: os.environ[name] for name in DASK_FILES if os.environ.get(name)}
    files = {name: os.path.abspath(path) for name, path in given.items()}  # noqa: PTH100 - links stay
    return replace(spec, dask_files=files)


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
