"""Plan → Script: the text that the batch scheduler gets, from the Jinja templates.

A value is never a template. Whatever ``{{ }}`` puts into a script is quoted for bash, or refused where it has a
control character; only text marked `Bash` (our own, the setup, checked directives) goes in as it stands.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader, StrictUndefined, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..config.sources import data_folder
from ..errors import InputError, Position, Problem
from ..injob.names import HEAD
from ..text import control_character
from .commandlines import Bash, JobRoles, commands, supervise, warning
from .plan import JobGroup, Plan


@dataclass(frozen=True)
class Script:
    """One submission: ``count`` jobs, numbered from ``first``."""

    text: str
    jobs: JobGroup
    first: int
    count: int
    devices: tuple[str, ...] = ()
    """GPUs of this machine for these jobs, in their order; where a batch scheduler gives them, none are named."""

    @property
    def array(self) -> bool:
        """The jobs are members of an array, not one plain job."""
        return self.count > 1


def render(
    plan: Plan, cluster: str, *, limit: int | None = None, site_folder: Path | None = None
) -> list[Script]:
    """Return the scripts of the whole cluster, at most ``limit`` jobs each, the head's own job first."""
    scripts = []
    for jobs in plan.all_jobs:
        own_head = plan.head is not None
        roles = JobRoles(
            scheduler=jobs.group == HEAD or not own_head,
            workers=jobs.group != HEAD,
            run=jobs.group == HEAD or not own_head,
        )
        # Numbers of workers start at 0 whether or not the head has a job of its own; that one comes after them.
        first = plan.workers.shape.jobs if jobs.group == HEAD else 0
        scripts += render_jobs(
            plan,
            cluster,
            jobs,
            roles,
            first,
            jobs.shape.jobs,
            limit=limit,
            site_folder=site_folder,
            devices=plan.devices,
        )
    return scripts


def render_jobs(
    plan: Plan, cluster: str, jobs: JobGroup, roles: JobRoles, first: int, count: int, *, limit: int | None = None,
    site_folder: Path | None = None, devices: tuple[str, ...] = (),
) -> list[Script]:  # fmt: skip
    """Return the scripts of ``count`` jobs numbered from ``first``, one script per array.

    ``devices``: the GPUs of this machine that these jobs take.
    """
    most = limit or plan.site.max_array_size or plan.scheduler.largest_array
    template = _template(plan.scheduler.name, site_folder)
    scripts = []
    for start in range(0, count, most):
        n, gpus = min(most, count - start), jobs.shape.gpus
        script = Script("", jobs, first + start, n, devices[start * gpus : (start + n) * gpus])
        scripts.append(
            replace(script, text=_fill(template, _context(plan, cluster, roles, script)))
        )
    return scripts


def cluster_folder(plan: Plan, cluster: str) -> Path:
    """Return the folder that login and compute nodes share for this cluster."""
    return Path(directory(plan.site.directory)) / cluster


def directory(text: str) -> str:
    """Return the site's ``directory`` with ~ and variables of the login node filled in."""
    import os

    def value(found: re.Match[str]) -> str:
        name, default = found["name"] or found["braced"], found["default"]
        if os.environ.get(name):
            return os.environ[name]
        if default is None:
            raise InputError(f"the site's `directory` is {text}, but ${name} is not set here")
        return default

    path = re.sub(r"\$(?:(?P<name>\w+)|\{(?P<braced>\w+)(?::-(?P<default>[^}]*))?\})", value, text)
    return str(Path(path).expanduser())


def _template(name: str, site_folder: Path | None) -> Any:
    try:
        return _environment(site_folder).get_template(f"{name}.sh.j2")
    except TemplateSyntaxError as error:
        raise InputError(
            Problem(str(error.message), Position(error.filename or name, error.lineno, 1))
        ) from None


@lru_cache(maxsize=8)
def _environment(site_folder: Path | None) -> ImmutableSandboxedEnvironment:
    """Return Jinja's environment: the site's own templates first. It keeps compiled templates while files stay."""
    folders = [site_folder / "templates"] if site_folder else []
    environment = ImmutableSandboxedEnvironment(
        loader=FileSystemLoader([*folders, data_folder("templates")]),
        undefined=StrictUndefined,
        finalize=_quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.globals = {"bash": Bash}
    return environment


def _fill(template: Any, context: dict[str, Any]) -> str:
    try:
        text: str = template.render(context)
    except (TemplateError, ArithmeticError, TypeError, AttributeError, ValueError) as error:
        raise InputError(Problem(f"template: {error}", _template_line(error, template))) from None
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _template_line(error: BaseException, template: Any) -> Position:
    position, traceback = Position(str(template.filename)), error.__traceback__
    while traceback:
        name = traceback.tb_frame.f_code.co_filename
        if name.endswith(".j2"):
            position = Position(name, traceback.tb_lineno, 1)
        traceback = traceback.tb_next
    return position


def _quoted(value: Any) -> Any:
    """Jinja's finalize: quote what a template puts into bash."""
    if isinstance(value, Bash | StrictUndefined):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise TypeError(
            f"a template may only write text and whole numbers, not {type(value).__name__}"
        )
    if found := control_character(value):
        raise ValueError(f"a value has a control character ({found!r})")
    return shlex.quote(value)


def _context(plan: Plan, cluster: str, roles: JobRoles, script: Script) -> dict[str, Any]:
    scheduler, profile, jobs = plan.scheduler, plan.profile, script.jobs
    root = directory(plan.site.directory)
    python = Path(plan.python)
    return {
        "shell": Bash(plan.site.shell),
        "name": cluster,
        "output": Bash(scheduler.output(root, cluster, script.array)),
        "walltime": Bash(scheduler.walltime(jobs.walltime)) if jobs.walltime else "",
        "warning": warning(jobs.walltime),
        "array": Bash(scheduler.array(script.count)) if script.array else "",
        "jobs": _JobsView(jobs, roles),
        "root": root,
        "first": script.first - scheduler.first_index if script.array else script.first,
        "first_number": script.first,
        "workdir": plan.workdir,
        "site_setup": Bash(plan.site.setup),
        "setup": Bash(profile.environment.setup),
        "python": plan.python,
        "python_folder": str(python.parent) if python.is_absolute() else "",
        "env": profile.env,
        "devices": Bash(shlex.join(script.devices)),
        "allowed_failures": 10,
        "mpi_setup": Bash(plan.ranks.setup if plan.ranks else ""),
        "client_owns": roles.client_owns,
        "cancel": Bash(scheduler.cancel_waiting),
        "supervise": supervise(plan, jobs, roles),
        "commands": commands(plan, jobs, roles),
    }


@dataclass(frozen=True)
class _JobsView:
    """What templates see of a `Jobs`."""

    source: JobGroup
    roles: JobRoles

    @property
    def lines(self) -> list[Bash]:
        """Return the directives, which have been checked."""
        return [Bash(line) for line in self.source.lines]

    @property
    def shape(self) -> Any:
        """Return the numbers of one job."""
        return self.source.shape

    @property
    def scheduler(self) -> bool:
        """Tell whether the jobs may start the dask scheduler."""
        return self.roles.scheduler
