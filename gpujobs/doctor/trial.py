"""Small clusters that `gpujobs doctor --run` and `sites verify` submit, and what comes of them."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..batch import receive
from ..clusters import rates, scale, submit
from ..clusters.clusterfolder import discard, private_folder
from ..clusters.ledger import ClusterRecord, Ledger
from ..clusters.monitor import ClusterMonitor
from ..clusters.prepare import make_cluster_plan
from ..clusters.report import ClusterReport, JobReport
from ..config.document import Document
from ..config.site import Site
from ..config.sitefiles import SiteFile
from ..config.spec import ClusterSpec, make_spec, with_settings
from ..errors import InputError, RefusedError
from ..injob.folder import DamagedError, parse_json, read_file
from ..planning.bash import expand_directory
from ..planning.plan import Plan
from ..planning.sitecheck import environment_queues
from ..text import plural
from . import jobcheck
from .checks import Check, failed
from .facts import check_facts, measured_rates
from .jobcheck import JobFacts

logger = logging.getLogger("gpujobs")

JOB_TIMEOUT = 900.0
"""Seconds for which the job may wait in the queue and run."""
SOURCE = "the job of doctor --run"
"""In place of a file name, in positions of its profile."""
CANNOT_EXECUTE = (126, 127)
"""Exit codes of a shell that found no program."""
ERROR_LINES = 3


@dataclass(frozen=True)
class Request:
    """A small cluster; the first of its sizes that a queue of the site accepts is taken."""

    name: str
    walltime: str
    sizes: Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class JobRun:
    """What came of a cluster that ran `jobcheck`; without a report it was refused."""

    checks: Sequence[Check]
    report: ClusterReport | None = None
    facts: JobFacts | None = None

    @property
    def jobs(self) -> tuple[JobReport, ...]:
        """Its jobs."""
        return self.report.jobs if self.report else ()

    @property
    def nodes(self) -> set[str]:
        """The nodes of its jobs."""
        return {job.node for job in self.jobs if job.node}


def check_job(site_file: SiteFile, settings: Document, ledger: Ledger) -> Sequence[Check]:
    """Submit a cluster that runs `jobcheck`, wait for its end and check its facts.

    ``settings`` are keys for the profile of the cluster. Raises InputError if no queue accepts it,
    UnavailableError if the batch scheduler does not answer.
    """
    request = Request("doctor", "10m", list(job_sizes(site_file.site)))
    return run_job(site_file, settings, ledger, request).checks


def check_jobs(site_file: SiteFile, settings: Document, ledger: Ledger) -> Sequence[Check]:
    """Do `check_job` once, and again with each environment of the site, unless one is set."""
    if "environment" in settings.value:
        return check_job(site_file, settings, ledger)
    checks: list[Check] = []
    if not site_file.site.environments_only:
        checks += check_job(site_file, settings, ledger)
    for place, name, key in environment_queues(site_file.site):
        label = name
        profile: dict[str, object] = {"environment": {"name": name}}
        if place[0] == "queues":
            label = f"{name} in {key}"
            profile["queue"] = key
        found = check_job(site_file, settings.over(Document(profile, source=SOURCE)), ledger)
        checks += [replace(check, name=f"{label}: {check.name}") for check in found]
    return checks


def run_job(
    site_file: SiteFile,
    settings: Document,
    ledger: Ledger,
    request: Request,
    timeout: float = JOB_TIMEOUT,
) -> JobRun:
    """Do what `check_job` does with a cluster of this size, within ``timeout`` seconds."""
    with _shared_copy(site_file) as program, _listener() as addresses:
        try:
            record = submit_request(
                site_file, settings, request, ledger, [str(program), *addresses]
            )
        except RefusedError as error:
            message = "\n".join(str(error).splitlines()[:ERROR_LINES])
            return JobRun([failed("job", message, "fix `request` of the site file")])
        try:
            report = wait_until(ClusterMonitor([record], ledger), timeout)
        finally:
            scale.cancel(record, ledger)
    facts = read_facts(record.path)
    if facts is None:
        reason = report.reason or f"no answer within {timeout:.0f} s"
        remedy = _remedy(report) or f"gpujobs logs --all {record.id}"
        return JobRun([failed("job", f"{record.id}: {reason}", remedy)], report)
    _keep_rates(facts, report, ledger)
    return JobRun(list(check_facts(facts, report)), report, facts)


def _keep_rates(facts: JobFacts, report: ClusterReport, ledger: Ledger) -> None:
    """Keep the rates for later clusters; not those of host memory, which decide nothing."""
    kind, bandwidth = report.folder.transport.kind, facts["bandwidth"]
    if kind and bandwidth and bandwidth["gpu_memory"]:
        rates.keep(ledger, kind, measured_rates(facts, report), time.time())


@contextmanager
def _shared_copy(site_file: SiteFile) -> Iterator[Path]:
    """Copy `jobcheck` into the shared folder: the jobs' Python need not have gpujobs."""
    folder = Path(expand_directory(site_file.site.directory)) / f"doctor-{os.urandom(4).hex()}"
    private_folder(folder)
    receive.mark(folder)
    program = folder / "jobcheck.py"
    try:
        program.write_bytes(Path(jobcheck.__file__).read_bytes())
        yield program
    finally:
        discard(folder)


@contextmanager
def _listener() -> Iterator[list[str]]:
    """Accept connections like the dask scheduler of a client; yield ``host:port`` of each name."""
    from distributed.utils import get_ip

    with warnings.catch_warnings():  # on a host without a default route
        warnings.simplefilter("ignore")
        own = get_ip()
    with socket.create_server(("", 0)) as server:
        threading.Thread(target=_accept_forever, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        yield [f"{host}:{port}" for host in dict.fromkeys((own, socket.getfqdn()))]


def _accept_forever(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:  # the server was closed
            return


def submit_request(
    site_file: SiteFile,
    settings: Document,
    request: Request,
    ledger: Ledger,
    program: Sequence[str] = (),
) -> ClusterRecord:
    """Submit a cluster. ``program``: see `plan_request`."""
    spec, plan = plan_request(site_file, settings, request, program)
    record = ledger.update(submit.submit(spec, plan, ledger).id, trial=True)
    logger.info(
        "%s: %s with %s in queue %s; to end it: gpujobs cancel %s",
        record.id,
        plural(plan.jobs_with_workers, "job"),
        plural(plan.n_workers, "worker"),
        plan.groups[0].queue,
        record.id,
    )
    return record


def plan_request(
    site_file: SiteFile, settings: Document, request: Request, program: Sequence[str] = ()
) -> tuple[ClusterSpec, Plan]:
    """Return the plan of the first size that a queue of the site accepts.

    ``program``: `jobcheck` and its arguments, which starts after all workers have connected;
    without one the cluster only waits. InputError of the first size if none is accepted.
    """
    failures: list[InputError] = []
    for size in request.sizes:
        profile = {"name": request.name, "walltime": request.walltime, **size}
        try:
            spec = make_spec(settings.over(Document(profile, source=SOURCE)), site=site_file)
            first = make_cluster_plan(spec)
            own: dict[str, object] = {
                "run": [first.groups[0].python, *program] if program else ["sleep", "3600"],
                "start_workers": first.n_workers,
                "env": {
                    "DOCTOR_WORKERS": str(first.n_workers),
                    "DOCTOR_PROTOCOLS": ",".join(first.transport.protocols),
                },
            }
            spec = with_settings(spec, Document(own, source=SOURCE))
            return spec, make_cluster_plan(spec)
        except InputError as error:
            failures.append(error)
    raise failures[0]


def job_sizes(site: Site) -> Iterator[dict[str, object]]:
    """Yield the sizes of two workers in one job, or of as many as the queues of the site give."""
    if not all(queue.exclusive for queue in site.queues.values()):
        yield {"gpus": 2}
        yield {"gpus": 1}
    for queue in site.queues.values():
        nodes = queue.min_nodes or 1
        if queue.gpus_per_node and (queue.exclusive or nodes > 1):
            layout = "mpi" if nodes > 1 else "workers"
            yield {"gpus": queue.gpus_per_node * nodes, "layout": layout}
    yield {"gpus": 0, "workers": {"count": 2}}


def wait_until(
    monitor: ClusterMonitor, timeout: float, *, connected: bool = False
) -> ClusterReport:
    """Wait until a cluster has ended, or until it is ``connected`` with workers."""
    deadline = time.monotonic() + timeout
    while not (report := monitor.report()).finished and time.monotonic() < deadline:
        if connected and report.connected:
            break
        time.sleep(1)
    return report


def read_facts(folder: Path) -> JobFacts | None:
    """Return the facts that a job of `jobcheck` printed; None if it printed none, or others."""
    with suppress(OSError, DamagedError):
        for line in read_file(folder / "logs" / "run.log").splitlines():
            if line.startswith(jobcheck.PREFIX):
                facts: JobFacts = parse_json(line.removeprefix(jobcheck.PREFIX), JobFacts)
                return facts
    return None


_REMEDIES = {
    ("dask_cuda", "dask-cuda", "bindings"): (
        "pip install 'dask-cuda[cu12]' (or [cu13], by the driver) in the jobs' python"
    ),
    ("pynvml", "NVML", "libnvidia-ml"): (
        "the node has no NVIDIA driver, or the job no GPU: "
        "see `request` and `visible_devices` of the site file"
    ),
}
"""By words in the reason for which a job failed."""


def _remedy(report: ClusterReport) -> str:
    """Return the remedy for programs and modules that the job did not find; "" if none is known."""
    reason = report.reason
    for names, remedy in _REMEDIES.items():
        if any(name in reason for name in names):
            return remedy
    if any(job.exit_code in CANNOT_EXECUTE for job in report.jobs):
        return (
            "the jobs' python does not exist: set `environment: {python: …}`, "
            "or a setup that provides it"
        )
    return ""
