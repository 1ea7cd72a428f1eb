"""The report of `gpujobs sites check`: trials of a site, comparison with its batch scheduler."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..batch.client import SchedulerClient, user_name
from ..batch.process import is_available
from ..clusters.bashcheck import bash_error, bash_problems
from ..clusters.freequeues import TIMEOUT, read_with, site_client
from ..config import placeholders
from ..config.document import Document, Loc
from ..config.site import Site
from ..config.sitefiles import NoSuchSiteError, SiteFile, load_site
from ..config.sitequeue import Queue
from ..errors import InputError, Position, Problem, UnavailableError
from ..planning.directives import request_texts
from ..planning.sitecheck import (
    NO_SETTINGS,
    Finding,
    Tried,
    findings,
    try_site,
    without_cpu_workers,
)
from ..schedulers import Scheduler, get_scheduler, usable_schedulers
from ..schedulers.inventory import Inventory, LiveNode, LiveQueue, Survey
from ..text import matches, plural, size_text, walltime_text
from .checks import Check, any_failed, checks_text, failed, passed, warning

# -- syntax of bash text ---------------------------------------------------------------------------
_TEXTS: tuple[Loc, ...] = (
    ("setup",),
    ("mpi", "setup"),
    ("defaults", "environment", "setup"),
)
"""The keys of a site file that have bash text."""


def syntax_problems(site_file: SiteFile, results: Sequence[Tried]) -> Iterator[Problem]:
    """Return the syntax errors of the site's bash text; if it has none, those of its scripts."""
    texts = [loc for place, section in site_file.site.sections() for loc in _texts(place, section)]
    problems = list(bash_problems(site_file.document, texts))
    return iter(problems or _script_problems(results))


def _texts(place: Loc, section: Site | Queue) -> Iterator[Loc]:
    """Yield the places of the bash text of a site or a queue, which is at ``place``."""
    for loc in _TEXTS:
        yield (*place, *loc)
    for name in section.environments:
        yield (*place, "environments", name, "setup")


def _script_problems(results: Sequence[Tried]) -> Iterator[Problem]:
    seen: set[str] = set()
    for result in results:
        for script in result.scripts:
            # Directives are comments for bash, so most scripts of a site are the same program.
            program = re.sub(r"^#.*$", "", script.text, flags=re.M)
            if program not in seen and (message := bash_error(program)):
                yield Problem(f"{result.trial}: bash -n refuses the script: {message}")
            seen.add(program)


# -- the report ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SiteReport:
    """The results of the checks of one site file."""

    path: Path
    site_file: SiteFile | None
    """None if the file cannot be loaded; ``findings`` have the reasons."""
    results: Sequence[Tried] = ()
    findings: Sequence[Finding] = ()
    checks: Sequence[Check] = ()
    """Of the batch scheduler and of a job."""

    @property
    def correct(self) -> bool:
        """Whether nothing was found."""
        return not self.findings and not any_failed(self.checks)


def check_offline(site: str, settings: Document = NO_SETTINGS) -> SiteReport:
    """Return the report of all checks without a batch scheduler. Raises NoSuchSiteError."""
    try:
        site_file = load_site(site)
    except NoSuchSiteError:
        raise
    except InputError as error:
        return SiteReport(_path(error, site), None, findings=[Finding(p) for p in error.problems])
    results = try_site(site_file, settings)
    syntax = [Finding(problem) for problem in syntax_problems(site_file, results)]
    checks = list(_cpu_worker_notes(site_file.site))
    return SiteReport(site_file.path, site_file, results, [*findings(results), *syntax], checks)


def _cpu_worker_notes(site: Site) -> Iterator[Check]:
    for key in site.queues:
        if reason := without_cpu_workers(site, key):
            yield warning(f"queue {key}", reason)


def report_text(report: SiteReport) -> str:
    """Return the trials of each queue in a line, then the findings."""
    checks = [*_queue_checks(report), *report.checks]
    lines = [checks_text(checks)] if checks else []
    return "\n".join([*lines, *(str(finding) for finding in report.findings)])


def report_json(report: SiteReport) -> dict[str, object]:
    """Return the report as JSON."""
    site_file = report.site_file
    return {
        "version": 1,
        "site": report.path.stem,
        "path": str(report.path),
        "scheduler": site_file and site_file.site.scheduler,
        "correct": report.correct,
        "trials": [
            {
                "queue": result.trial.queue or None,
                "shape": result.trial.shape,
                "scripts": len(result.scripts),
                "correct": not result.problems,
            }
            for result in report.results
        ],
        "findings": [_finding_json(finding) for finding in report.findings],
        "checks": [asdict(check) for check in report.checks],
    }


def summary(report: SiteReport) -> str:
    """Return the number of findings, or that there are none, in one line."""
    number = len(report.findings) + sum(check.state == "failed" for check in report.checks)
    if number:
        return f"{report.path}: {plural(number, 'finding')}"
    scripts = sum(len(result.scripts) for result in report.results)
    return f"{report.path}: no findings; {plural(scripts, 'script')} planned and rendered"


def _path(error: InputError, site: str) -> Path:
    sources = (p.position.source for p in error.problems if p.position)
    return Path(next(sources, site))


def _queue_checks(report: SiteReport) -> Iterator[Check]:
    """Yield the checks of each queue, whose results name the shapes of its trials."""
    for queue in dict.fromkeys(result.trial.queue for result in report.results):
        results = [result for result in report.results if result.trial.queue == queue]
        wrong = [result for result in results if result.problems]
        name = f"queue {queue}" if queue else "profile"
        if wrong:
            yield failed(name, _shapes(wrong))
        if len(wrong) < len(results):
            yield passed(name, _shapes(result for result in results if not result.problems))


def _shapes(results: Iterable[Tried]) -> str:
    return ", ".join(result.trial.shape for result in results)


def _finding_json(finding: Finding) -> dict[str, object]:
    problem = finding.problem
    return {
        "message": problem.message,
        "hint": problem.hint,
        **_position_json(problem.position),
        "related": _position_json(problem.related) if problem.related else None,
        "trials": [{"queue": one.queue or None, "shape": one.shape} for one in finding.trials],
    }


def _position_json(position: Position | None) -> dict[str, object]:
    if position is None:
        return {"file": None, "line": None, "column": None}
    return {
        "file": position.source,
        "line": position.line or None,
        "column": position.column or None,
    }


# -- the differences between a site file and its batch scheduler -----------------------------------
LINES = ("request", "cpu_request", "multi_node_request", "directives", "submit_arguments")
"""Keys of sites and queues that are lists of directives or arguments."""
NO_LIMIT = float("inf")


@dataclass(frozen=True)
class Comparison:
    """A site file, and what its batch scheduler reports."""

    site_file: SiteFile
    survey: Survey

    @property
    def scheduler(self) -> type[Scheduler]:
        """The class of the batch scheduler."""
        return get_scheduler(self.site_file.site.scheduler)

    @property
    def _reports_gpus(self) -> bool:
        """Whether GPUs are reported at all: a site may have its own resource for them."""
        return any(node.gpus for node in self.survey.nodes)

    def problems(self) -> Iterator[Problem]:
        """Yield each difference at its line of the file."""
        site, most = self.site_file.site, self.survey.max_array_size
        for key, queue in site.queues.items():
            yield from self._queue_problems(key, queue)
        yield from self._account_problems()
        yield from self._unknown_names()
        yield from self._cpu_request_problem()
        if most and site.max_array_size and site.max_array_size > most:
            yield self._problem(f"arrays have at most {plural(most, 'job')}", "max_array_size")

    def _queue_problems(self, key: str, queue: Queue) -> Iterator[Problem]:
        site = self.site_file.site
        name = site.queue_name(key)
        live = next((live for live in self.survey.queues if live.name == name), None)
        nodes = [node for node in self.survey.nodes if node.queue in ("", name)]
        if live is None:
            if self._names_the_queue(key, queue):
                known = ", ".join(sorted(live.name for live in self.survey.queues))
                yield self._problem(f"there is no queue {name}; there are {known}", "queues", key)
            return
        for limit, message in _exceeded(queue, live, len({node.name for node in nodes})):
            yield self._problem(message, "queues", key, limit)
        if not live.open:
            yield self._problem(f"queue {name} is closed", "queues", key)
        yield from self._node_problems(key, queue, nodes)

    def _names_the_queue(self, key: str, queue: Queue) -> bool:
        """Return whether jobs name the queue; otherwise its key is only the name of a shape."""
        gpus = bool(queue.gpus_per_node)
        texts = request_texts(self.site_file.site.in_queue(key), self.scheduler(), gpus=gpus)
        return "queue" in placeholders.names(" ".join(texts))

    def _account_problems(self) -> Iterator[Problem]:
        site = self.site_file.site
        if self.survey.account_required and site.account is None and "account" in site.given:
            yield self._problem("jobs need an account; the file has `account: null`", "account")
        for place, holder in site.sections():
            pattern, accounts = holder.account and holder.account.pattern, self.survey.accounts
            if pattern and accounts and not any(matches(pattern, name) for name in accounts):
                message = f"no account of this user matches the pattern: {', '.join(accounts)}"
                yield self._problem(message, *place, "account", "pattern")

    def account_warnings(self) -> Iterator[Check]:
        """Yield that the batch scheduler wants an account and the file leaves it out."""
        if self.survey.account_required and not all(map(self._names_an_account, self._queues)):
            message = "needed; a job without one gets the default account of its user, if any"
            yield warning("account", message, "account: {required: true}")

    @property
    def _queues(self) -> list[Site]:
        """The site as each queue has it; the site itself if there is none."""
        site = self.site_file.site
        return [site.in_queue(key) for key in site.queues] or [site]

    def _names_an_account(self, site: Site) -> bool:
        """Return whether each job of a queue names an account: its profile's or a fixed one."""
        if site.account and site.account.required:
            return True
        scheduler = self.scheduler()
        wanted = scheduler.options(scheduler.account_directive)
        for line in (*(site.request or ()), *site.directives, *site.submit_arguments):
            with contextlib.suppress(ValueError):  # `sites check` reports it
                if "{account}" not in line and wanted & scheduler.options(line):
                    return True
        return False

    def user_warnings(self) -> Iterator[Check]:
        """Yield each queue in which no job of the user who asks can start."""
        site = self.site_file.site
        names = set(map(site.queue_name, site.queues))
        for live in self.survey.queues:
            if live.name in names and not live.for_user:
                message = f"your jobs cannot start in {live.name}: {live.restriction}"
                yield warning(
                    "user", message, "`sacctmgr show associations user=$USER` lists yours"
                )

    def preemption_warnings(self) -> Iterator[Check]:
        """Yield that workers cannot use the grace time of queues of the file to transfer data."""
        site = self.site_file.site
        names = set(map(site.queue_name, site.queues))
        late = [live for live in self.survey.queues if live.late_signal and live.name in names]
        if late:
            found = ", ".join(live.name for live in late)
            message = f"in {found}, jobs get SIGTERM only when their grace time is over"
            yield warning("preemption", message, late[0].late_signal)

    def _cpu_request_problem(self) -> Iterator[Problem]:
        """Yield that the file has CPU queues, and the built-in `cpu_request` is refused."""
        site, needed = self.site_file.site, self.survey.cpu_request
        refused = needed not in ((), self.scheduler.cpu_request)
        without_gpus = [key for key, queue in site.queues.items() if not queue.gpus_per_node]
        if refused and any(site.in_queue(key).cpu_request is None for key in without_gpus):
            lines = ", ".join(f"'{line}'" for line in needed)
            yield self._problem(f"CPU workers need `cpu_request: [{lines}]`", "queues")

    def _node_problems(
        self, key: str, queue: Queue, nodes: Sequence[LiveNode]
    ) -> Iterator[Problem]:
        if queue.gpus_per_node:
            types = sorted({node.gpu_type for node in nodes if node.gpu_type})
            if types and (unknown := sorted(set(queue.named_types.values()) - set(types))):
                message = f"its nodes have GPUs of type {', '.join(types)}, not {unknown[0]}"
                name = "gpu_types" if queue.gpu_types else "gpu_type"
                yield self._problem(message, "queues", key, name)
                return
            named = queue.named_types.values()
            nodes = [node for node in nodes if not named or node.gpu_type in ("", *named)]
            yield from self._gpu_problems(key, queue, nodes)
            nodes = [node for node in nodes if (node.gpus or 0) >= queue.gpus_per_node]
        if nodes:
            yield from self._size_problems(key, queue, nodes)

    def _gpu_problems(self, key: str, queue: Queue, nodes: Sequence[LiveNode]) -> Iterator[Problem]:
        numbers = sorted({node.gpus for node in nodes if node.gpus is not None})
        if numbers and self._reports_gpus and queue.gpus_per_node not in numbers:
            listed = " or ".join(map(str, numbers))
            noun = "GPU" if numbers == [1] else "GPUs"
            yield self._problem(f"its nodes have {listed} {noun}", "queues", key, "gpus_per_node")

    def _size_problems(
        self, key: str, queue: Queue, nodes: Sequence[LiveNode]
    ) -> Iterator[Problem]:
        cpus = max(node.cpus for node in nodes)
        if queue.cpus_per_node and queue.cpus_per_node > cpus:
            yield self._problem(
                f"its nodes have {plural(cpus, 'CPU')}", "queues", key, "cpus_per_node"
            )
        memory = max(node.memory or 0 for node in nodes)
        if queue.memory_per_node and memory and queue.memory_per_node > memory:
            message = f"its nodes have {size_text(memory)} of memory"
            yield self._problem(message, "queues", key, "memory_per_node")
        number = len({node.name for node in nodes})
        if queue.nodes and queue.nodes > number:
            yield self._problem(f"it has {plural(number, 'such node')}", "queues", key, "nodes")

    def _unknown_names(self) -> Iterator[Problem]:
        kind = self.scheduler.inventory
        if kind is None:
            return
        inventory: Inventory = kind(self.site_file.site.cluster)
        for place, line in self._directives():
            if message := inventory.unknown(line, self.survey):
                yield self._problem(message, *place)

    def _directives(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield all directives and arguments of the file, and their places."""
        for place, holder in self.site_file.site.sections():
            for name in LINES:
                for number, line in enumerate(getattr(holder, name) or ()):
                    yield (*place, name, number), line
            for name, option in holder.options.items():
                if option.directive:
                    yield (*place, "options", name, "directive"), option.directive
            if holder.account and holder.account.directive:
                yield (*place, "account", "directive"), holder.account.directive

    def _problem(self, message: str, *loc: str | int) -> Problem:
        name = self.site_file.site.scheduler
        return Problem(f"{name}: {message}", self.site_file.document.key_position(loc))


def _exceeded(queue: Queue, live: LiveQueue, nodes: int) -> Iterator[tuple[str, str]]:
    """Yield the key of each limit of the batch scheduler that the file exceeds, and a message.

    Without a limit in the file, jobs may have all ``nodes`` of the queue, and any walltime.
    """
    name, user_gpus = live.name, live.gpus_of_user(queue.type_name(None))
    jobs = f"jobs in queue {name} have at"
    if _above(queue.max_walltime or NO_LIMIT, live.max_walltime):
        yield "max_walltime", f"the walltime in queue {name} is at most {_time(live.max_walltime)}"
    if _above(live.min_walltime, queue.min_walltime or 0):
        yield "min_walltime", f"the walltime in queue {name} is at least {_time(live.min_walltime)}"
    if _above(queue.max_nodes or queue.nodes or nodes, live.max_nodes):
        yield "max_nodes", f"{jobs} most {plural(live.max_nodes or 0, 'node')}"
    if _above(live.min_nodes, queue.min_nodes or 1):
        yield "min_nodes", f"{jobs} least {plural(live.min_nodes or 0, 'node')}"
    if _above(queue.max_gpus_per_user, user_gpus):
        message = f"one user has at most {plural(user_gpus or 0, 'GPU')} in queue {name}"
        yield "max_gpus_per_user", message
    if live.exclusive and not queue.exclusive:
        message = f"jobs in queue {name} get whole nodes; the file lacks `exclusive: true`"
        yield "exclusive", message


def _above(number: float | None, limit: int | None) -> bool:
    return number is not None and limit is not None and number > limit


def _time(seconds: int | None) -> str:
    return walltime_text(seconds or 0)


# -- ask the batch scheduler -----------------------------------------------------------------------
OTHER_SCHEDULER = "is this a login node? --scheduler NAME names the one to ask"


def take_survey(client: SchedulerClient) -> Survey | None:
    """Return the queues and nodes of the batch scheduler; None if gpujobs cannot ask for them.

    Raises UnavailableError if the first command fails; the answers of others may be missing.
    """
    kind = client.scheduler.inventory
    if kind is None:
        return None
    inventory = kind(client.scheduler.cluster)
    return read_with(client, inventory, lambda ask: inventory.survey(ask, user_name()))


def find_survey(name: str | None) -> tuple[SchedulerClient, Survey]:
    """Return the batch scheduler of this host, and its queues and nodes.

    ``name``: the value of `scheduler`; None: the first one that answers. Raises InputError if there
    is none.
    """
    reasons = []
    for client in _clients(name):
        try:
            survey = take_survey(client)
        except UnavailableError as error:
            reasons.append(f"{client.scheduler.name}: {error}")
            continue
        if survey and survey.nodes:
            return client, survey
        reasons.append(f"{client.scheduler.name} reports no nodes")
    if reasons:
        raise UnavailableError("\n".join(reasons), hint=OTHER_SCHEDULER)
    message = "no command of a batch scheduler was found on this host"
    raise InputError(message, hint=OTHER_SCHEDULER)


def _clients(name: str | None) -> list[SchedulerClient]:
    """Return the batch scheduler ``name``, or those whose commands are on this host."""
    kinds = [get_scheduler(name)] if name else usable_schedulers()
    return [
        SchedulerClient(kind(), timeout=TIMEOUT)
        for kind in kinds
        if name or (kind.inventory is not None and is_available(kind.inventory.commands[0]))
    ]


def check_live(report: SiteReport, settings: Document = NO_SETTINGS) -> tuple[SiteReport, Survey]:
    """Return the report with differences to the batch scheduler, and the queues of that.

    ``settings``: keys of the profiles whose scripts the batch scheduler tests.

    Raises UnavailableError if the batch scheduler does not answer.
    """
    site_file = report.site_file
    if site_file is None:  # its file cannot be read
        return report, Survey((), ())
    client = site_client(site_file)
    survey, name = take_survey(client), client.scheduler.name
    if survey is None:
        checks = [warning("live", f"{name}: gpujobs cannot ask for its queues")]
        found = []
    else:
        nodes = len({node.name for node in survey.nodes})
        number = f"{plural(len(survey.queues), 'queue')}, {plural(nodes, 'node')}"
        comparison = Comparison(site_file, survey)
        found = [Finding(problem) for problem in comparison.problems()]
        checks = [_compared("live", f"{name} reports {number}", len(found))]
        if not any(node.gpus for node in survey.nodes):
            checks.append(warning("GPUs", f"not compared: {name} reports none"))
        checks += [*comparison.account_warnings(), *comparison.user_warnings()]
        checks += comparison.preemption_warnings()
    refused, check = _test_scripts(client, site_file, settings)
    findings = [*report.findings, *found, *refused]
    report = replace(report, findings=findings, checks=[*report.checks, *checks, check])
    return report, survey or Survey((), ())


def _compared(name: str, result: str, differences: int) -> Check:
    """Return a check that is ok if the file agrees with the batch scheduler."""
    if not differences:
        return passed(name, result)
    return warning(name, f"{result}; {plural(differences, 'finding')} below")


def _test_scripts(
    client: SchedulerClient, site_file: SiteFile, settings: Document
) -> tuple[list[Finding], Check]:
    """Let the batch scheduler test each script, without submitting it."""
    argv = client.scheduler.estimate_command()
    if argv is None:
        return [], warning("scripts", f"not tested: {client.scheduler.name} has no such command")
    command, refused, tested = " ".join(argv), [], 0
    for result in try_site(site_file, settings, any_account=False):
        tested += len(result.scripts)
        messages = (client.refusal(script.text, Path.cwd()) for script in result.scripts)
        if message := next(filter(None, messages), None):
            position = site_file.document.key_position(result.trial.place)
            problem = Problem(f"{command} refuses the script: {message}", position)
            refused.append(replace(result, problems=(problem,)))
    if not tested:
        remedy = "if the site requires an account: --set account=…"
        return [], warning("scripts", "not tested: no profile can be planned", remedy)
    found = findings(refused)
    return found, _compared("scripts", f"{plural(tested, 'script')}: {command}", len(found))
