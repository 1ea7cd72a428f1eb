"""From a plan to batch scripts, through the Jinja templates.

A value is never a template. ``{{ }}`` quotes a value for bash, and refuses control characters; only
text marked as `Bash` (ours, the setup, checked directives) is written as it is.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import jinja2
from jinja2.loaders import split_template_path
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..config.document import MAX_BYTES
from ..config.sitefiles import data_folder, site_folders
from ..config.trust import check_owners, check_writers
from ..errors import InputError, Position, Problem
from ..injob.demand import rules_text
from ..injob.names import ARCHIVE, ENVIRONMENT, HEAD, dashboard_address, job_file
from ..schedulers import Scheduler, get_scheduler
from ..schedulers.local import INHERIT
from ..text import control_character
from .bash import Bash, command, with_variables, without
from .layouts import SCHEDULER_FILE
from .lifetime import Replaces, warning
from .plan import Plan
from .shape import JobGroup

# -- command lines ---------------------------------------------------------------------------------
LEASE = 60
"""Seconds after which the head's job ends if the owning process no longer renews its lease."""


@dataclass(frozen=True)
class JobRoles:
    """The roles of the jobs of a script."""

    scheduler: bool = True
    """They may start the dask scheduler."""
    workers: bool = True
    run: bool = True
    replaces: Replaces = "none"
    """With an owner, it handles the jobs' failures; else a failure ends the cluster."""


def roles_of(plan: Plan, jobs: JobGroup) -> JobRoles:
    """Return the roles of ``jobs`` in a cluster without an owner."""
    may_be_head = plan.may_be_head(jobs)
    return JobRoles(scheduler=may_be_head, workers=jobs.group != HEAD, run=may_be_head)


def single_job(plan: Plan) -> bool:
    """Return whether the cluster has one job, and never another one on its nodes."""
    fixed = not plan.layout.elastic or plan.lifetime.attempts > 1
    return fixed and sum(jobs.shape.jobs for jobs in plan.all_jobs) == 1


def supervise(plan: Plan, jobs: JobGroup, roles: JobRoles, attempt: int = 1) -> list[Bash]:
    """Return the options of the job's supervisor, one line each."""
    lines = []
    if jobs.shape.gpus:
        gpus = [f"--gpus={jobs.shape.gpus}", f"--visible-devices={jobs.visible_devices}"]
        if jobs.cuda:
            gpus.append(f"--cuda={jobs.cuda}")
        if "ucxx" in plan.transport.protocols and single_job(plan):
            gpus.append("--single-job")
        options = plan.layout_of(jobs).supervisor_options(jobs.shape)
        lines.append(" ".join([*gpus, *options]))
    if jobs.walltime:
        lines.append(f"--walltime={jobs.walltime} --warning={warning(jobs.walltime)}")
    lines.append(" ".join(_start_options(plan, jobs, roles)))
    if plan.lifetime.attempts > 1:
        lines.append(" ".join(_attempt_options(plan, attempt)))
    if options := _process_options(plan, jobs, roles):
        lines.append(" ".join(options))
    if roles.scheduler:
        lines += _head_options(plan, jobs)
    if roles.replaces == "owner":
        lines.append("--client-owns")
        if roles.scheduler:
            lines[-1] += f" --lease={LEASE}"
    return [Bash(line) for line in lines]


def _start_options(plan: Plan, jobs: JobGroup, roles: JobRoles) -> list[str]:
    options = [f"--start-timeout={plan.profile.start_timeout}"]
    if roles.workers and jobs.profile.task_time:
        options.append(f"--task-time={jobs.profile.task_time}")
    if roles.workers and jobs.group:
        options.append(f"--group={jobs.group}")
    if roles.run and plan.profile.run:
        options.append(f"--start-workers={plan.start_workers}")
        if groups := [f"{name}={n}" for name, n in plan.start_groups.items()]:
            options.append(f"--start-groups={','.join(groups)}")
    return options


def _attempt_options(plan: Plan, attempt: int) -> list[str]:
    options = [f"--attempt={attempt}", f"--attempts={plan.lifetime.attempts}"]
    if plan.profile.walltime_exit:
        options.append(f"--walltime-exit={plan.profile.walltime_exit}")
    return options


def _process_options(plan: Plan, jobs: JobGroup, roles: JobRoles) -> list[str]:
    # With a launcher, the batch script is a process of another node.
    script = (
        "$GPUJOBS_OWNER" if INHERIT in jobs.submit_arguments else "$$@$(readlink /proc/self/ns/pid)"
    )
    options = [] if jobs.launcher else [f'--batch-script="{script}"']
    if jobs.container and (python := Path(jobs.python)).is_absolute():
        options.append(f"--python-folder={shlex.quote(str(python.parent))}")
    if asks_outside(plan, jobs, roles):
        options.append("--ask-outside")
    return options


def _head_options(plan: Plan, jobs: JobGroup) -> list[str]:
    protocols = f"--schemes={','.join(plan.transport.protocols)}"
    lines = [" ".join([protocols, *plan.transport_of(jobs).interface_option()])]
    if plan.profile.run_on == "ranks":
        lines.append("--run-on=ranks")
    if plan.lifetime.end_after:
        lines.append(f"--end-after={rules_text(plan.lifetime.end_after)}")
    if plan.scheduler.cancel_waiting and not jobs.container:  # whose image has no such command
        lines.append(f"--cancel={shlex.quote(plan.scheduler.cancel_waiting)}")
    return lines


def asks_outside(plan: Plan, jobs: JobGroup, roles: JobRoles) -> bool:
    """Return whether the batch script runs the supervisor's queries, as in a container it cannot.

    The only job of an allocation has no others to ask about.
    """
    return jobs.container is not None and roles.replaces == "none" and not plan.working_ranks


def commands(plan: Plan, jobs: JobGroup, roles: JobRoles) -> dict[str, Bash]:
    """Return the commands that the supervisor starts, by name: scheduler, workers, run."""
    profile = plan.profile
    found = {}
    if roles.scheduler:
        found["scheduler"] = command(_scheduler_words(plan, jobs))
    if roles.workers:
        found["workers"] = _workers(plan, jobs)
    if roles.run and profile.run and profile.run_on == "head":
        words = [*_launcher_words(plan, jobs.run_launcher), *map(shlex.quote, profile.run)]
        found["run"] = command(words)
    return found


def launcher(plan: Plan, jobs: JobGroup) -> Bash:
    """Return the command that starts MPI outside of the container; "" if the supervisor does."""
    if jobs.container and plan.working_ranks and jobs.shape.gpus:
        return command([*without(plan.scheduler.job_request), _worker_command(plan, jobs)])
    return Bash("")


def _workers_launcher(plan: Plan, jobs: JobGroup) -> Bash:
    """Return the command that starts the supervisor; "" if the batch script does."""
    return command(_launcher_words(plan, jobs.launcher))


def _launcher_words(plan: Plan, words: Sequence[str]) -> list[str]:
    asks = any("gpu" in word for word in words)  # by itself
    hidden = without(plan.scheduler.job_request) if asks else []
    return [*hidden, *map(with_variables, words)]


def _workers(plan: Plan, jobs: JobGroup) -> Bash:
    if launcher(plan, jobs):
        return Bash(f'"$python" "$GPUJOBS_FOLDER/{ARCHIVE}" launch')
    return _worker_command(plan, jobs)


def _worker_command(plan: Plan, jobs: JobGroup) -> Bash:
    transport = plan.transport_of(jobs)
    return command(plan.layout_of(jobs).worker_words(jobs, transport, plan.workdir))


def _scheduler_words(plan: Plan, jobs: JobGroup) -> list[str]:
    dashboard = plan.profile.network.dashboard
    return [
        f'"$python" "$GPUJOBS_FOLDER/{ARCHIVE}" scheduler',
        "-- distributed.cli.dask_scheduler",
        "--port=0",
        f"--dashboard-address={dashboard_address(dashboard)}",
        *(["--no-dashboard"] if dashboard == "off" else []),
        *plan.transport_of(jobs).listen_options(plan.site),
        SCHEDULER_FILE,
    ]


# -- scripts ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Script:
    """One submission: ``count`` jobs, numbered from ``first``."""

    text: str
    jobs: JobGroup
    first: int
    count: int
    devices: tuple[str, ...] = ()
    """GPUs of this machine for these jobs, in order; empty if a batch scheduler assigns them."""
    attempt: int = 1
    """Which start of the cluster they are for, from 1."""

    @property
    def array(self) -> bool:
        """Whether the jobs are members of an array; else there is one plain job."""
        return self.count > 1


def render(
    plan: Plan, cluster_id: str, *, limit: int | None = None, site_folder: Path | None = None
) -> list[Script]:
    """Return the scripts of the whole cluster, at most ``limit`` jobs each.

    Those of the first attempt come first, and in each attempt those of the head.
    """
    scripts: list[Script] = []
    first = 0
    for attempt in range(1, plan.lifetime.attempts + 1):
        devices, number_of_head = plan.devices, first + plan.jobs_with_workers
        for jobs in plan.all_jobs:
            scripts += render_jobs(
                plan,
                cluster_id,
                jobs,
                roles_of(plan, jobs),
                # Jobs with workers come first, the number of the head's own job follows.
                first=number_of_head if jobs is plan.head else first,
                count=jobs.shape.jobs,
                limit=limit,
                site_folder=site_folder,
                devices=devices,
                attempt=attempt,
            )
            if jobs is not plan.head:
                first, devices = first + jobs.shape.jobs, devices[jobs.gpus :]
        first = number_of_head + bool(plan.head)
    return scripts


def render_jobs(
    plan: Plan,
    cluster_id: str,
    jobs: JobGroup,
    roles: JobRoles,
    first: int,
    count: int,
    *,
    limit: int | None = None,
    site_folder: Path | None = None,
    devices: tuple[str, ...] = (),
    attempt: int = 1,
) -> list[Script]:
    """Return the scripts of ``count`` jobs numbered from ``first``, one script per array.

    ``limit``: most jobs of an array. ``devices``: GPUs of this machine for these jobs.
    """
    most = limit or plan.site.max_array_size or plan.scheduler.largest_array
    template = load_template(plan.scheduler.name, site_folder)
    gpus = jobs.shape.gpus
    scripts = []
    for start in range(0, count, most):
        end = min(count, start + most)
        own_devices = devices[start * gpus : end * gpus]
        script = Script("", jobs, first + start, end - start, own_devices, attempt)
        context = _context(plan, cluster_id, roles, script)
        scripts.append(replace(script, text=fill(template, context)))
    return scripts


def portable(plan: Plan) -> Plan:
    """Return ``plan`` for scripts that find the cluster's folder where they were submitted."""
    groups = tuple(_portable(group, plan.root) for group in plan.groups)
    head = plan.head and _portable(plan.head, plan.root)
    return replace(plan, root="", groups=groups, head=head)


def _portable(jobs: JobGroup, root: str) -> JobGroup:
    if not jobs.container:
        return jobs
    folders = tuple("" if folder == root else folder for folder in jobs.container.folders)
    return replace(jobs, container=replace(jobs.container, folders=folders))


def cluster_folder(plan: Plan, cluster_id: str) -> Path:
    """Return the cluster's folder, which login and compute nodes share."""
    return Path(plan.root) / cluster_id


def _context(plan: Plan, cluster_id: str, roles: JobRoles, script: Script) -> dict[str, object]:
    """Return the variables of the templates."""
    number_of_index_0 = script.first
    if script.array:
        number_of_index_0 -= plan.scheduler.first_index
    return {
        **_directive_variables(plan, cluster_id, script),
        **_environment_variables(plan, script),
        "jobs": SimpleNamespace(
            lines=list(map(Bash, _directives(plan, script.jobs))),  # checked when they were planned
            shape=script.jobs.shape,
            scheduler=roles.scheduler,
        ),
        "group": "" if script.jobs is plan.head else script.jobs.group,
        "root": plan.root,
        "submit_folder": Bash(plan.scheduler.submit_folder),
        "first": number_of_index_0,
        "first_number": script.first,
        "client_owns": roles.replaces == "owner",
        "asks": asks_outside(plan, script.jobs, roles),
        "cancel": Bash(plan.scheduler.cancel_waiting),
        "supervise": supervise(plan, script.jobs, roles, script.attempt),
        "workers_launcher": _workers_launcher(plan, script.jobs),
        "commands": commands(plan, script.jobs, roles),
        **_container_variables(plan, script),
    }


def _directive_variables(plan: Plan, cluster_id: str, script: Script) -> dict[str, object]:
    scheduler, walltime = plan.scheduler, script.jobs.walltime
    attempts = plan.lifetime.attempts
    return {
        "shell": Bash(plan.site.shell),
        "name": cluster_id,
        "output": Bash(scheduler.output(plan.root, cluster_id, script.array)),
        "walltime": Bash(scheduler.walltime(walltime)) if walltime else "",
        "warning": warning(walltime),
        "array": Bash(scheduler.array(script.count)) if script.array else "",
        "attempt": script.attempt if attempts > 1 else 0,
        "again": script.attempt < attempts,
    }


def _environment_variables(plan: Plan, script: Script) -> dict[str, object]:
    jobs = script.jobs
    python, profile = Path(jobs.python), jobs.profile
    layout, own_file = plan.layout_of(jobs), job_file("$GPUJOBS_JOB", ENVIRONMENT)
    on_path = python.is_absolute() and not jobs.container
    return {
        "workdir": plan.workdir,
        "warns_all": plan.scheduler.warns_all_processes,
        "modules": plan.modules,
        "dask_files": plan.dask_files,
        "site_setup": Bash(layout.site.setup),
        "setup": Bash(profile.environment.setup),
        "of_amd": layout.site.queues[jobs.queue_key].gpu_vendor == "amd",
        "environment_name": Bash(profile.environment.name or ""),
        "mpi_setup": Bash(layout.setup),
        "environment_file": Bash(own_file) if plan.working_ranks else "",
        "inherits": INHERIT in jobs.submit_arguments,
        "staging": jobs.staging,
        "python": jobs.python,
        "python_folder": str(python.parent) if on_path else "",
        "env": profile.env,
        "loopback": plan.transport_of(jobs).loopback,
        "ports": layout.site.network.ports or "",
        "devices": Bash(shlex.join(script.devices)),
        "machines": " ".join(script.devices) if layout.site.machines else "",
    }


def _container_variables(plan: Plan, script: Script) -> dict[str, object]:
    container, gpus = script.jobs.container, bool(script.jobs.shape.gpus)
    if container is None:
        return {"container": None, "launcher": "", "run_log": False}
    runtime = container.runtime
    return {
        "container": {
            "program": runtime.program,
            "image": Bash(container.image_word),
            "is_path": container.is_path,
            "scratch": Bash(container.scratch_word),
            "prepare": [Bash(line) for line in runtime.prepare(container)],
            "environment": runtime.environment(container, gpus),
            "command": command(runtime.words(container, gpus)),
            "supervisor": command(runtime.supervisor()),
        },
        "launcher": launcher(plan, script.jobs),
        "run_log": plan.profile.run_on == "ranks",
    }


AVOID_OPTION = "avoid_nodes"
"""Option of a site whose directive has priority over that of the batch scheduler."""


def can_avoid(plan: Plan) -> bool:
    """Return whether the batch scheduler, or an option of the site, lets jobs avoid nodes."""
    return bool(plan.scheduler.avoid(["node"])) or AVOID_OPTION in plan.site.options


def avoidance(plan: Plan, jobs: JobGroup) -> tuple[Sequence[str], str]:
    """Return the nodes that ``jobs`` avoid, and the directive; "" if it cannot be written."""
    nodes = plan.avoid.get(jobs.group, ())
    if not nodes:
        return (), ""
    line = plan.scheduler.avoid(nodes)
    option = jobs.site.options.get(AVOID_OPTION)
    if option and option.directive:
        line = option.directive.replace(f"{{{AVOID_OPTION}}}", ",".join(nodes))
    taken = {name for other in jobs.lines for name in plan.scheduler.options(other)}
    if not line or plan.scheduler.repeated(line, taken):
        return (), ""
    return nodes, line


def _directives(plan: Plan, jobs: JobGroup) -> Sequence[str]:
    _, avoiding = avoidance(plan, jobs)
    return plan.scheduler.joined([*jobs.lines, avoiding]) if avoiding else jobs.lines


# -- the Jinja environment -------------------------------------------------------------------------
SUFFIX = ".sh.j2"


def load_template(name: str, site_folder: Path | None) -> jinja2.Template:
    """Return the template of the batch scheduler ``name``: the site's own, else the package's.

    The site's may extend ``gpujobs/NAME.sh.j2`` and override its blocks. The class of another
    package has its template beside its module.
    """
    searched = site_folder in site_folders()
    folder = _module_folder(get_scheduler(name))
    try:
        return _environment(site_folder, searched, folder).get_template(f"{name}{SUFFIX}")
    except jinja2.TemplateNotFound:
        place = site_folder or "SITE_FOLDER"
        hint = f"write {place}/templates/{name}{SUFFIX}"
        raise InputError(f"there is no template {name}{SUFFIX}", hint=hint) from None
    except jinja2.TemplateSyntaxError as error:
        position = Position(error.filename or name, error.lineno, 1)
        raise InputError(Problem(str(error.message), position)) from None
    except RecursionError:
        raise InputError(f"{name}{SUFFIX} of {site_folder}: too deeply nested") from None


def _module_folder(scheduler: type[Scheduler]) -> Path | None:
    """Return the folder of the module of a class; None if it was not imported from a file."""
    file = getattr(sys.modules.get(scheduler.__module__), "__file__", None)
    return Path(file).parent if file else None


def fill(template: jinja2.Template, context: Mapping[str, object]) -> str:
    """Return the script. Raises InputError with the template's line."""
    try:
        text = template.render(context)
    except (jinja2.TemplateError, ArithmeticError, TypeError, AttributeError, ValueError) as error:
        raise InputError(Problem(f"template: {error}", _position(error, template))) from None
    except (RecursionError, MemoryError) as error:
        reason = "it includes itself" if isinstance(error, RecursionError) else "it is too large"
        raise InputError(Problem(f"template: {reason}", _position(error, template))) from None
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


class _CheckedLoader(jinja2.FileSystemLoader):
    """Templates of a site with their includes; ``searched``: its folder is of the search path."""

    def __init__(self, site_folder: Path, searched: bool) -> None:
        super().__init__(site_folder / "templates")
        self._site_folder, self._searched = site_folder, searched

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        """Return the source. InputError if other users could have written it, or it is no text."""
        path = Path(self.searchpath[0], *split_template_path(template))
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: larger than {MAX_BYTES // 1024} KiB; not a template")
        try:
            source = super().get_source(environment, template)
        except UnicodeDecodeError:
            raise InputError(f"{path}: not UTF-8 text") from None
        if self._searched:
            check_writers(Path(source[1]), self._site_folder)
        else:
            check_owners(Path(source[1]), self._site_folder)
        return source


@lru_cache(maxsize=8)
def _environment(
    site_folder: Path | None, searched: bool, module_folder: Path | None
) -> ImmutableSandboxedEnvironment:
    """Return the environment. It keeps compiled templates until their files change.

    ``searched``: the site's folder is one of the search path.
    """
    folders = [data_folder("templates"), *([module_folder] if module_folder else [])]
    ours = jinja2.FileSystemLoader(folders)
    own = [_CheckedLoader(site_folder, searched)] if site_folder else []
    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.ChoiceLoader([*own, ours, jinja2.PrefixLoader({"gpujobs": ours})]),
        undefined=jinja2.StrictUndefined,
        finalize=_quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.globals = {"bash": Bash}
    return environment


def _position(error: BaseException, template: jinja2.Template) -> Position:
    """Return the innermost line of a template in the traceback of ``error``."""
    position, traceback = Position(str(template.filename)), error.__traceback__
    while traceback:
        name = traceback.tb_frame.f_code.co_filename
        if name.endswith(".j2"):
            position = Position(name, traceback.tb_lineno, 1)
        traceback = traceback.tb_next
    return position


def _quoted(value: object) -> object:
    """Quote a value for bash; Jinja calls this for every ``{{ }}``."""
    if isinstance(value, Bash | jinja2.StrictUndefined):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        kind = type(value).__name__
        raise TypeError(f"a template may only write text and whole numbers, not {kind}")
    if found := control_character(value):
        raise ValueError(f"a value has a control character ({found!r})")
    return shlex.quote(value)
