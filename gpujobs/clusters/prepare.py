"""From a specification to a plan and its scripts: everything before a submission."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ..batch import process
from ..config.document import Document, Loc
from ..config.spec import ClusterSpec
from ..config.trust import check_modules
from ..errors import InputError, Position, Problem
from ..planning.plan import Machine, Plan, make_plan
from ..planning.render import Script, render
from ..schedulers import get_scheduler
from .runnotes import image_notes, run_notes, script_of, site_notes

BASH = "/bin/bash"


def make_cluster_plan(
    spec: ClusterSpec, *, elastic: bool = False, devices: tuple[str, ...] | None = None
) -> Plan:
    """Return the plan of ``spec`` (see `make_plan`); the local site inspects this machine.

    ``devices``: GPUs of this machine to use; None: those that are free.
    """
    texts: list[Loc] = [("environment", "setup")]
    texts += [("groups", name, "environment", "setup") for name in spec.profile.groups]
    if problems := list(bash_problems(spec.document, texts)):
        raise InputError(problems)
    machine = machine_of(spec, devices)
    folder = Path(spec.document.position(("run",)).source).parent
    spec, own_modules = with_modules(spec, owned=elastic)
    plan = make_plan(spec, python=spec.python, machine=machine, elastic=elastic)
    own = (*site_notes(spec.site.site), *run_notes(plan, folder), *image_notes(plan), own_modules)
    return replace(plan, notes=(*plan.notes, *filter(None, own)))


def machine_of(
    spec: ClusterSpec, devices: tuple[str, ...] | None = None, used: tuple[str, ...] = ()
) -> Machine | None:
    """Return this machine if the site is local (see `this_machine`), else None."""
    if not get_scheduler(spec.site.site.scheduler).on_this_machine:
        return None
    from .machine import this_machine

    return this_machine(devices, used)


def scripts_of(
    spec: ClusterSpec, plan: Plan, cluster_id: str, limit: int | None = None
) -> list[Script]:
    """Return the scripts of a cluster; ``limit`` is the largest size of an array."""
    return render(plan, cluster_id, limit=limit, site_folder=spec.site.path.parent)


def with_modules(spec: ClusterSpec, *, owned: bool = False) -> tuple[ClusterSpec, str]:
    """Return ``spec`` with the folder from which workers import, too, and a note about it.

    That is the first place in which Python looks for the modules of a program: the folder of the
    script in `run`, or if this process owns the cluster (``owned``), of its main script. Workers
    import from `workdir` in any case. A folder that other users can write is not used.
    """
    script = _main_script() if owned else script_of(spec.profile.run)
    folder = _folder_of(spec.workdir / script) if script else None
    if folder is None or not folder.is_dir() or _is_same(folder, spec.workdir):
        return replace(spec, modules=""), ""
    try:
        check_modules(folder)
    except InputError as error:
        why = f"{error.problems[0].message}; `workdir` or PYTHONPATH may name it"
        return replace(spec, modules=""), f"own modules of {script}: {why}"
    note = "" if owned else f"workers also import modules from {folder}, the folder of {script}"
    return replace(spec, modules=str(folder)), note


def _is_same(folder: Path, workdir: Path) -> bool:
    return workdir.is_dir() and folder.samefile(workdir)


def _main_script() -> str:
    """Return the script that this process runs; "" in a notebook and with `python -m`."""
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if not script or main.__spec__ is not None:
        return ""
    installed = Path(script).parent == Path(sysconfig.get_path("scripts"))
    return "" if installed else str(script)


def _folder_of(script: Path) -> Path:
    """Return the folder from which Python imports: that of the target, if it is a link."""
    target = Path(os.path.realpath(script)) if script.is_symlink() else script
    return Path(os.path.abspath(target)).parent  # noqa: PTH100 - links to folders stay


def bash_problems(document: Document, places: Iterable[Loc]) -> Iterator[Problem]:
    """Yield the syntax errors of the bash texts at ``places`` of a document."""
    for loc in places:
        text = document.value_at(loc)
        if isinstance(text, str) and (message := bash_error(text)):
            position = _line_inside(document.position(loc), message)
            name = ".".join(map(str, loc))
            yield Problem(f"`{name}`: bash -n refuses it: {message}", position)


def bash_error(text: str) -> str:
    """Return the first message of ``bash -n`` for ``text``; "" if it is correct, or without bash.

    ``bash -n`` does not execute ``shopt -s extglob``, so it has the option from the beginning.
    """
    result = process.run([BASH, "-O", "extglob", "-n"], stdin=text)
    if not result.started or (result.exit_code == 0 and not result.stderr):
        return ""
    return result.first_line.removeprefix(f"{BASH}: ")


def _line_inside(position: Position, message: str) -> Position:
    """Return the line of the file that bash means, if the text is a block of lines."""
    found = re.match(r"line (\d+):", message)
    if not found or not position.text.split("#")[0].rstrip().endswith("|"):
        return position
    return replace(position, line=position.line + int(found[1]), column=1, text="")
