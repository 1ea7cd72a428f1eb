"""The trials of `gpujobs sites verify`: a job, an array over two nodes, a cancel, a walltime."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from ..batch.client import user_name
from ..clusters import scale
from ..clusters.freequeues import read_with, site_client
from ..clusters.ledger import Ledger
from ..clusters.monitor import ClusterMonitor
from ..clusters.report import WorkerGpu
from ..config.document import Document, Loc
from ..config.site import Site
from ..config.sitefiles import SiteFile
from ..errors import GpujobsError, InputError, Position
from ..injob.folder import EndKind
from ..planning.plan import Plan
from ..schedulers.inventory import Survey
from ..text import matches, plural
from ..version import __version__
from . import checks, sitereport
from .checks import Check, Evidence, MarkedLine, any_failed, failed, passed, warning
from .facts import rate_text
from .trial import (
    JobRun,
    Request,
    job_sizes,
    plan_request,
    run_job,
    submit_request,
    wait_until,
)

TIMEOUT = 600.0
"""Seconds for all trials."""
WALLTIME = "2m"
"""Of the trial `walltime`."""


def requests(site: Site) -> dict[str, Request]:
    """Return the clusters of all trials, by the name of the trial."""
    small = list(job_sizes(site))
    return {
        "job": Request("doctor", "5m", small),
        "array": Request("verify", "5m", list(_two_nodes(site))),
        "cancel": Request("verify", "5m", small),
        "walltime": Request("verify", WALLTIME, small),
    }


def _two_nodes(site: Site) -> Iterator[dict[str, object]]:
    """Yield two whole nodes, as only they are surely two; else two jobs on any nodes."""
    numbers = {queue.gpus_per_node for queue in site.queues.values() if queue.gpus_per_node}
    for number in [*sorted(numbers), 1]:
        yield {"gpus": 2 * number, "gpus_per_job": number}
    yield {"gpus": 0, "workers": {"count": 2}}


@dataclass
class Verification:
    """The trials of one site, and what they have found so far."""

    site_file: SiteFile
    settings: Document
    """Keys for the profiles of the trials."""
    ledger: Ledger
    survey: Survey = field(default_factory=lambda: Survey((), ()))
    version: str = ""
    """Of the batch scheduler."""
    wrong: dict[int, list[str]] = field(default_factory=dict)
    """Findings by line of the site file; 0: none of its lines."""
    checks: list[Check] = field(default_factory=list)
    runs: dict[str, JobRun] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    deadline: float = 0.0

    @property
    def left(self) -> float:
        """Seconds until the last trial is given up."""
        return max(0.0, self.deadline - time.monotonic())

    def cost(self) -> tuple[int, float]:
        """Return the number of jobs, and the GPU minutes that they take at most."""
        plans = list(self._plans())
        minutes = [plan.gpus * (plan.groups[0].walltime or 0) / 60 for plan in plans]
        return sum(plan.jobs_with_workers for plan in plans), sum(minutes)

    def _plans(self) -> Iterator[Plan]:
        """Yield the plans of the trials that fit the site, of which the first must."""
        for name, request in requests(self.site_file.site).items():
            try:
                yield plan_request(self.site_file, self.settings, request)[1]
            except InputError:
                if name == "job":
                    raise

    def run(self) -> None:
        """Ask the batch scheduler, and make the trials. Raises UnavailableError."""
        self.deadline = time.monotonic() + TIMEOUT
        self._compare()
        wanted = requests(self.site_file.site)
        self._try("job", lambda: self._job("job", wanted["job"]))
        if any_failed(self.checks):
            return
        self._try("array", lambda: self._job("array", wanted["array"]))
        self._try("cancel", lambda: self._waiting(wanted["cancel"], self._cancelled))
        self._try("walltime", lambda: self._waiting(wanted["walltime"], self._ended))

    def _compare(self) -> None:
        path = str(self.site_file.path.absolute())
        offline = sitereport.check_offline(path, self.settings)
        report, self.survey = sitereport.check_live(offline, self.settings)
        self.checks = list(report.checks)
        client = site_client(self.site_file)
        if kind := client.scheduler.inventory:
            inventory = kind(client.scheduler.cluster)
            self.version = read_with(client, inventory, inventory.version)
        for problem in (finding.problem for finding in report.findings):
            at = problem.position or Position("")
            line = at.line * (at.source == path)
            self.wrong.setdefault(line, []).append(problem.message)

    def _try(self, name: str, trial: Callable[[], Iterable[Check]]) -> None:
        began = time.monotonic()
        try:
            self.checks += trial()
        except GpujobsError as error:
            self.checks.append(failed(name, str(error).splitlines()[0]))
        self.seconds[name] = round(time.monotonic() - began, 1)

    def _job(self, name: str, request: Request) -> Iterable[Check]:
        run = run_job(self.site_file, self.settings, self.ledger, request, timeout=self.left)
        self.runs[name] = run
        if not run.facts:
            return [replace(check, name=name) for check in run.checks]
        if name != "array":
            return run.checks
        text = f"two jobs on {plural(len(run.nodes), 'node')}; {rate_text(run.facts)}"
        if len(run.nodes) > 1:
            return [passed("array", text)]
        return [warning("array", text, "the transport between nodes was not measured")]

    def _waiting(
        self, request: Request, judge: Callable[[ClusterMonitor], Check]
    ) -> Iterable[Check]:
        """Submit a cluster that only waits, and judge it."""
        record = submit_request(self.site_file, self.settings, request, self.ledger)
        monitor = ClusterMonitor([record], self.ledger)
        try:
            yield judge(monitor)
        finally:
            scale.cancel(record, self.ledger)

    def _cancelled(self, monitor: ClusterMonitor) -> Check:
        report = wait_until(monitor, self.left, connected=True)
        if not report.connected:
            return failed("cancel", report.reason or "its job did not start in time")
        began = time.monotonic()
        scale.cancel(report.record, self.ledger)
        if monitor.wait_until_inactive(self.left).active:
            return failed("cancel", "its job is still in the queue")
        seconds = time.monotonic() - began
        return passed("cancel", f"a running job left the queue in {seconds:.0f} s")

    def _ended(self, monitor: ClusterMonitor) -> Check:
        report = wait_until(monitor, self.left)
        if report.kind is EndKind.WALLTIME:
            return passed("walltime", f"a job of {WALLTIME} ended at its walltime")
        return failed("walltime", report.reason or f"a job of {WALLTIME} has not ended")

    # -- the record --------------------------------------------------------------------------------
    def evidence(self, *, hosts: bool) -> Evidence:
        """Return the record; ``hosts``: with the names of hosts."""
        redact, site = checks.redactor(self._names(hosts=hosts)), self.site_file.site
        wrong = sorted((line, text) for line, texts in self.wrong.items() for text in texts)
        lines = (replace(line, found=redact(line.found)) for line in judged_lines(self))
        return Evidence(
            site=self.site_file.name,
            date=datetime.now(UTC).date().isoformat(),
            gpujobs=__version__,
            scheduler=f"{site.scheduler} {self.version}".strip(),
            software=dict(self._software()),
            gpus=sorted({gpu.model or "?" for gpu in self._gpus()}),
            interface=site.network.interface or "",
            rates=dict(self._rates()),
            seconds=self.seconds,
            checks=[
                replace(check, result=redact(check.result), remedy=redact(check.remedy))
                for check in self.checks
            ],
            findings=[
                redact(f"line {line}: {text}").removeprefix("line 0: ") for line, text in wrong
            ],
            marked=list(lines),
        )

    def _software(self) -> Iterator[tuple[str, str]]:
        if facts := self.runs.get("job", JobRun(())).facts:
            yield from facts["versions"].items()
            yield "driver", facts["driver"]["version"]
            yield "ucx", facts["ucx"]

    def _gpus(self) -> Iterator[WorkerGpu]:
        for run in self.runs.values():
            for job in run.jobs:
                yield from job.gpus

    def _rates(self) -> Iterator[tuple[str, str]]:
        places = {"job": "in a job", "array": "between nodes"}
        for name, run in self.runs.items():
            if run.facts and run.facts["bandwidth"] and (name == "job" or len(run.nodes) > 1):
                yield places[name], rate_text(run.facts)

    def _names(self, *, hosts: bool) -> dict[str, Iterable[str]]:
        """Return the names that the record must not have, by what they are."""
        given = self.settings.value.get("account")
        accounts = [*self.survey.accounts, str(given or "")]
        nodes = {node.name for node in self.survey.nodes}
        nodes.update(*(run.nodes for run in self.runs.values()))
        gpus = [gpu.uuid for gpu in self._gpus()]
        names: dict[str, Iterable[str]] = {"user": [user_name()], "account": accounts, "gpu": gpus}
        if not hosts:
            nodes |= {socket.gethostname(), socket.getfqdn()}
            domains = {node.partition(".")[2] for node in nodes}
            names["host"] = [*nodes, *(domain for domain in domains if "." in domain)]
        return names


# -- lines that are marked as not verified ---------------------------------------------------------
_REPORTED = (
    "auto", "cpus_per_gpu", "cpus_per_node", "exclusive", "gpu_type", "gpu_types", "like", "name",
    "gpus_per_node", "max_gpus_per_user", "max_nodes", "max_walltime", "memory_per_node",
    "min_nodes", "min_walltime", "nodes",
)  # fmt: skip
"""Keys of a queue that `sites check --live` compares, or that say nothing about the machine."""
_USED_BY_JOBS = ("visible_devices", "request", "setup", "environment", "directory", "directives")


def judged_lines(trials: Verification) -> Iterator[MarkedLine]:
    """Yield each line of the site file that is marked as not verified, with what was found."""
    path, document = trials.site_file.path, trials.site_file.document
    places: dict[int, Loc] = {}
    for loc, part in document.parts():
        if part.key.source == str(path):
            places.setdefault(part.key.line, loc)
    for number, line in checks.marked_lines(path.read_text(encoding="utf-8")):
        loc = places.get(number, (line.key,))
        state, found = _judge(trials, loc)
        if wrong := trials.wrong.get(number):
            state, found = checks.CORRECTED, "; ".join(wrong)
        yield replace(line, key=".".join(map(str, loc)), state=state, found=found)


def _judge(trials: Verification, loc: Loc) -> tuple[str, str]:
    """Return the state of a line without a finding, and why if that is known."""
    facts = trials.runs.get("job", JobRun(())).facts
    if loc[0] == "queues":
        return _judge_queue(trials, str(loc[1]))
    if loc[0] == "network":
        return _judge_network(trials)
    if loc[0] == "hostnames":
        names = [socket.gethostname(), socket.getfqdn()]
        patterns = trials.site_file.site.hostnames
        same = any(matches(pattern, name) for pattern in patterns for name in names)
        if same:
            return checks.CONFIRMED, "they match this host"
        return checks.CORRECTED, "they do not match this host"
    if facts and loc[0] in _USED_BY_JOBS:
        return checks.CONFIRMED, "used by the jobs"
    return checks.OPEN, ""


def _judge_queue(trials: Verification, key: str) -> tuple[str, str]:
    site, survey = trials.site_file.site, trials.survey
    queue, name = site.queues[key], site.queue_name(key)
    listed = any(live.name == name for live in survey.queues)
    counted = not queue.gpus_per_node or any(node.gpus for node in survey.nodes)
    others = sorted(queue.given.difference(_REPORTED))
    if not listed or not counted or others:
        return checks.OPEN, f"{site.scheduler} does not report {', '.join(others) or 'it'}"
    return checks.CONFIRMED, f"as {site.scheduler} reports it"


def _judge_network(trials: Verification) -> tuple[str, str]:
    results = {check.name: check.result for check in trials.checks}
    if "`network.interface`" in results.get("job", ""):
        return checks.CORRECTED, results["job"]
    used = results.get("transport", "")
    if not used or ("ucxx" in trials.site_file.site.network.protocols and used[:4] != "ucxx"):
        return checks.OPEN, used
    return checks.CONFIRMED, used
