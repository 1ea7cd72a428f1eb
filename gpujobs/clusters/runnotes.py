"""Notes about site, `run` and image: mistakes that would be found only after the job has waited."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..config.site import Site
from ..config.sitefiles import cluster_name
from ..planning.plan import Plan
from ..text import matches

_SHELL_WORD = re.compile(r"\d*(>>?|<<?|>&)[\w./&-]*|\|\|?|&&?|;")
_VARIABLE = re.compile(r"\$(\w|\{)")
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh", "csh", "tcsh", "fish")


def run_notes(plan: Plan, folder: Path) -> Iterator[str]:
    """Yield notes about the command of ``plan``; reads the names in its working directory.

    ``folder``: that of the profile, where the script may be instead.
    """
    run = plan.profile.run
    if not run:
        return
    if Path(run[0]).name not in _SHELLS:
        yield from _shell_notes(run)
    workdir = Path(plan.workdir)
    script = script_of(run)
    if script and not (workdir / script).exists():
        yield _missing(script, workdir, folder)
    elif script == run[0] and plan.profile.run_on == "head":
        yield from _start_notes(script, workdir)


def image_notes(plan: Plan) -> Iterator[str]:
    """Yield a note for each image of a container that is not on this host."""
    containers = [jobs.container for jobs in plan.all_jobs if jobs.container]
    images = [one.image for one in containers if one.is_path and "$" not in one.image]
    for image in map(Path, dict.fromkeys(images)):
        if not image.expanduser().exists():
            there = image.expanduser()
            text = f"container: there is no image {there} on this host; the nodes need it"
            name = image.relative_to(plan.workdir) if image.is_relative_to(plan.workdir) else image
            yield f"{text}, or is it docker://{name}?" if ":" in image.name else text


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
    # Of `-m module` and `-c code` the first word without a dash is no script.
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
    if near := difflib.get_close_matches(Path(script).name, names, n=1):
        note += f"; did you mean {near[0]}?"
    return note
