"""The checks of `gpujobs doctor`: on this host, and in a small cluster (`--run`)."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..batch import receive
from ..batch.client import SchedulerClient
from ..batch.process import is_available
from ..clusters import scale, submit
from ..clusters.folder import discard, private_folder
from ..clusters.freequeues import read_with, site_client
from ..clusters.ledger import ClusterRecord, Ledger
from ..clusters.monitor import ClusterMonitor
from ..clusters.plannotes import site_notes
from ..clusters.prepare import make_cluster_plan
from ..clusters.report import ClusterReport, JobReport, numa_text
from ..clusters.space import space_problems
from ..config.document import Document
from ..config.site import Site
from ..config.sitefiles import SiteFile, selects_this_host
from ..config.spec import ClusterSpec, make_spec, with_settings
from ..errors import GpujobsError, InputError, RefusedError
from ..injob.folder import DamagedError, parse_json, read_file
from ..injob.gpus import binding_messages
from ..planning.bash import expand_directory
from ..planning.plan import Plan
from ..schedulers.base import needed_commands
from ..text import plural
from . import jobcheck
from .checks import Check, failed, passed, warning
from .jobcheck import JobFacts, Scratch

# -- the checks of `gpujobs doctor --run`: judge the facts that `jobcheck` collected in a job ------
COMPARED = ("python", "dask", "distributed", "dask-cuda")
"""Versions that must be the same in the job and on this side."""
OLDEST_DASK_CUDA = (26, 8)
"""As the extras `cuda12` and `cuda13` require it."""
GIB = 2**30
SHARED_FILESYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs")


def check_facts(facts: JobFacts, report: ClusterReport) -> Iterator[Check]:
    """Check the facts of a job, and the GPUs that its workers reported."""
    record, node = report.record, facts["node"]
    yield passed("job", f"{record.id} ran on {node}")
    yield passed("shared folder", f"{record.path.parent} is writable on {node}")
    yield _check_versions(facts["versions"])
    yield _check_driver(facts)
    yield passed("interfaces", f"in the job: {', '.join(facts['interfaces'])}")
    yield _check_route(facts)
    yield _check_transport(facts, report)
    yield _check_scratch(facts["scratch"])
    yield _check_gpus(report)
    yield _check_cpus(report)


def _check_versions(there: dict[str, str]) -> Check:
    here = jobcheck.versions()
    names = [name for name in COMPARED if name in here or name in there]
    different = [
        f"{name} {here.get(name, 'none')} here, {there.get(name, 'none')} in the job"
        for name in names
        if here.get(name) != there.get(name)
    ]
    version = there.get("dask-cuda", "")
    if version and tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_DASK_CUDA:
        remedy = "pip install -U 'gpujobs[cuda12]' (or [cuda13]) for the jobs"
        return failed("versions", f"dask-cuda {version} in the job is too old", remedy)
    if different:
        remedy = "use one environment for both (`environment.python`)"
        return warning("versions", "; ".join(different), remedy)
    same = ", ".join(f"{name} {there[name]}" for name in names)
    return passed("versions", f"the same in the job: {same}")


def _check_driver(facts: JobFacts) -> Check:
    driver = facts["driver"]
    if driver["error"]:
        return warning("driver", f"no NVIDIA driver on {facts['node']}: {driver['error']}")
    newest = driver["cuda"] // 1000
    result = f"{driver['version']}, supports CUDA {newest}"
    remedy = f"pip install 'dask-cuda[cu{newest}]'"
    bindings = facts["versions"].get("cuda-bindings", "")
    if not bindings:
        return failed("driver", f"{result}; cuda-bindings is missing", remedy)
    cuda = int(bindings.split(".")[0])
    result = f"{result}; the job's python has CUDA {cuda}"
    if cuda > newest:
        return failed("driver", result, f"{remedy}, or install a newer driver")
    return passed("driver", result)


def _check_route(facts: JobFacts) -> Check:
    if facts["client"]:
        return passed("route", f"the job reaches this host ({facts['client']})")
    result = f"the job does not reach this host: {facts['client_error']}"
    remedy = 'set network.interface in the site file, or use scheduler="job" for Python clusters'
    return warning("route", result, remedy)


def _check_transport(facts: JobFacts, report: ClusterReport) -> Check:
    parts = [rate_text(facts)]
    folder = report.folder
    if rates := folder.transport.text():
        parts.append(rates)
    if not folder.transport.reason and not folder.unused_networks:
        return passed("transport", "; ".join(parts))
    remedy = (
        "list ucxx in `network.protocols` of the site file, if its traffic may be sent unencrypted"
    )
    if folder.transport.reason:  # it is listed
        remedy = "if ucxx is missing: pip install 'gpujobs[cuda12]' (or [cuda13]) for the jobs"
    return warning("transport", "; ".join([*parts, *folder.notes]), remedy)


def _check_scratch(scratch: Scratch) -> Check:
    path = scratch["path"]
    if not scratch["writable"]:
        return failed("scratch space", f"{path} is not writable", "set `scratch` in the site file")
    result = f"{path}: {scratch['free'] / GIB:.1f} GiB free ({scratch['filesystem']})"
    if scratch["filesystem"] in SHARED_FILESYSTEMS:
        remedy = "set `scratch` in the site file to node-local space"
        return warning("scratch space", result, remedy)
    return passed("scratch space", result)


def _check_gpus(report: ClusterReport) -> Check:
    requested = report.record.gpus
    if not requested:
        return warning("GPUs", "none requested: CPU workers")
    found = {gpu.uuid: gpu for job in report.jobs for gpu in job.gpus}
    if len(found) != requested:
        remedy = "see `request` and `visible_devices` of the site file"
        return failed("GPUs", f"{requested} requested, {len(found)} found", remedy)
    return passed("GPUs", ", ".join(f"{gpu.model} {gpu.uuid}" for gpu in found.values()))


def _check_cpus(report: ClusterReport) -> Check:
    workers = report.folder.workers
    result = "; ".join(
        f"{name}: {binding['cpus']} (NUMA node {numa_text(binding)})"
        for name, worker in sorted(workers.items())
        if (binding := worker.get("binding"))
    )
    if not (messages := binding_messages(workers)):
        return passed("CPUs", result)
    remedy = "Slurm: `--gres-flags=enforce-binding` in `request`; else a larger `cpus_per_gpu`"
    return warning("CPUs", "; ".join([*messages, result]), remedy)


# -- the checks of `gpujobs doctor` that need no job: they run on this host ------------------------
def check_host(site_file: SiteFile) -> Iterator[Check]:
    """Check commands, batch scheduler, shared folder, network interface and versions."""
    site = site_file.site
    yield passed("site", f"{site_file.name} ({site.scheduler}): {site_file.path}")
    client = site_client(site_file)
    for note in list(site_notes(site)) or _notes_of_host(site_file):
        yield warning("cluster", note, DRAFT)
    yield from _check_commands(client)
    yield from _check_queues(site_file, client)
    yield _check_directory(site.directory, site.quota_command)
    yield _check_interface(site.network.interface)
    versions = jobcheck.versions()
    yield passed("versions", ", ".join(f"{name} {number}" for name, number in versions.items()))
    if "ucxx" in site.network.protocols:
        yield _check_ucxx()


DRAFT = "`gpujobs sites init -o NAME.yaml` drafts a site file for this one"


def _notes_of_host(site_file: SiteFile) -> Iterator[str]:
    """Yield that the site file has names of hosts, and this one is none of them."""
    if selects_this_host(site_file.document.value) is False:
        yield f"this host, {socket.gethostname()}, is none that {site_file.name} names"


def _check_queues(site_file: SiteFile, client: SchedulerClient) -> Iterator[Check]:
    """Yield that the batch scheduler of this host has none of the site's queues."""
    kind, site = client.scheduler.inventory, site_file.site
    if kind is None or not site.queues:
        return
    inventory = kind(client.scheduler.cluster)
    try:
        there = {node.queue for node in read_with(client, inventory, inventory.nodes)}
    except GpujobsError:  # `_check_scheduler` says why
        return
    names = set(map(site.queue_name, site.queues))
    if there and "" not in there and not names & there:
        message = f"this is not {site_file.name}: {client.scheduler.name} has none of its queues"
        yield warning("queues", f"{message} ({', '.join(sorted(names))})", DRAFT)


def _check_commands(client: SchedulerClient) -> Iterator[Check]:
    names = sorted(needed_commands(client.scheduler))
    missing = [name for name in names if not is_available(client.commands.get(name, name))]
    if missing:
        remedy = (
            "is this a login node? Else write the paths of the commands in the site file: "
            f"commands: {{{missing[0]}: /path}}"
        )
        yield failed("commands", f"not found: {', '.join(missing)}", remedy)
        return
    yield passed("commands", ", ".join(sorted(Path(name).name for name in names)))
    yield _check_scheduler(client)


def _check_scheduler(client: SchedulerClient) -> Check:
    try:
        client.find("gpujobs-doctor")
    except GpujobsError as error:
        message = str(error).splitlines()[0]
        return failed("batch scheduler", message, error.hint or "try again when it answers")
    return passed("batch scheduler", f"{client.scheduler.name} answers")


def _check_directory(template: str, quota_command: Sequence[str] = ()) -> Check:
    try:
        path = Path(expand_directory(template))
        private_folder(path)
        probe = path / f".doctor-{os.getpid()}"
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except (GpujobsError, OSError) as error:
        remedy = "set `directory` of the site file to a folder that login and compute nodes share"
        return failed("directory", str(error).splitlines()[0], remedy)
    if problems := list(space_problems(path, quota_command)):
        return warning("directory", "; ".join(problems), "remove files, or ask for a larger quota")
    return passed("directory", f"{path} is writable from this host")


def _check_interface(name: str | None) -> Check:
    interfaces = jobcheck.interfaces()
    if name is None:
        return passed("interface", f"none configured; this host has {', '.join(interfaces)}")
    if name in interfaces:
        return passed("interface", f"{name} is on this host")
    result = f"{name} is not on this host, which has {', '.join(interfaces)}"
    return warning("interface", result, 'clusters from Python need scheduler="job" on this host')


def _check_ucxx() -> Check:
    if find_spec("distributed_ucxx"):
        return passed("ucxx", "distributed-ucxx is installed")
    result = "the site lists ucxx, but distributed-ucxx is not installed here"
    remedy = (
        "pip install distributed-ucxx-cu12 (or -cu13) in the environment of the jobs; "
        "without it dask uses tcp"
    )
    return warning("ucxx", result, remedy)


# -- submit a small cluster for `gpujobs doctor --run` and collect its facts -----------------------
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


def rate_text(facts: JobFacts) -> str:
    """Return the protocol of a job, and GB/s between two workers if they were measured."""
    protocol, measured = facts["address"].split("://")[0], facts["bandwidth"]
    if not measured:
        return protocol
    memory = "GPU" if measured["gpu_memory"] else "host"
    return f"{protocol}, {measured['rate']} GB/s between two workers ({memory} memory)"


def check_job(site_file: SiteFile, settings: Document, ledger: Ledger) -> Sequence[Check]:
    """Submit a cluster that runs `jobcheck`, wait for its end and check its facts.

    ``settings`` are keys for the profile of the cluster. Raises InputError if no queue accepts it,
    UnavailableError if the batch scheduler does not answer.
    """
    request = Request("doctor", "10m", list(job_sizes(site_file.site)))
    return run_job(site_file, settings, ledger, request).checks


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
    return JobRun(list(check_facts(facts, report)), report, facts)


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
                "env": {"DOCTOR_WORKERS": str(first.n_workers)},
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
