"""Submit a small cluster for `gpujobs doctor --run` and collect its facts."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..clusters import cancel, submit
from ..clusters.files import private_folder
from ..clusters.ledger import ClusterRecord, Ledger
from ..clusters.monitor import ClusterMonitor
from ..clusters.prepare import make_cluster_plan
from ..clusters.report import ClusterReport
from ..config.document import Document
from ..config.site import Site
from ..config.sitefiles import SiteFile
from ..config.spec import ClusterSpec, make_spec, settings_document, with_settings
from ..errors import InputError, Position, RefusedError
from ..planning.directory import expand_directory
from ..planning.plan import Plan
from ..text import plural
from . import jobcheck
from .checks import Check, failed
from .facts import check_facts

logger = logging.getLogger("gpujobs")

JOB_TIMEOUT = 900.0
"""Seconds for which the job may wait in the queue and run."""
SOURCE = "the job of doctor --run"
"""In place of a file name, in positions of its profile."""
CANNOT_EXECUTE = (126, 127)
"""Exit codes of a shell that found no program."""
ERROR_LINES = 3


def check_job(site: str | None, settings: Sequence[str], ledger: Ledger) -> list[Check]:
    """Submit a cluster that runs `jobcheck`, wait for its end and check its facts.

    ``settings`` are ``key=value`` for the profile of the cluster. Raises InputError if no queue
    accepts it, UnavailableError if the batch scheduler does not answer.
    """
    site_file = make_spec(settings_document(()), site=site).site
    with _shared_copy(site_file) as program, _listener() as addresses:
        try:
            record = _submit(site, settings, [str(program), *addresses], ledger)
        except RefusedError as error:
            message = "\n".join(str(error).splitlines()[:ERROR_LINES])
            return [failed("job", message, "fix `request` of the site file")]
        report = _wait_for_end(record, ledger)
    facts = jobcheck.parse_facts(_output(record))
    if facts is None:
        return [_without_facts(report)]
    return list(check_facts(facts, report))


@contextmanager
def _shared_copy(site_file: SiteFile) -> Iterator[Path]:
    """Copy `jobcheck` into the shared folder: the jobs' Python need not have gpujobs."""
    folder = Path(expand_directory(site_file.site.directory)) / f"doctor-{os.urandom(4).hex()}"
    private_folder(folder)
    program = folder / "jobcheck.py"
    try:
        program.write_bytes(Path(jobcheck.__file__).read_bytes())
        yield program
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


def _submit(
    site: str | None, settings: Sequence[str], program: list[str], ledger: Ledger
) -> ClusterRecord:
    """Submit two workers in one job, or as many as the queues of the site give."""
    failures: list[InputError] = []
    for size in _sizes(make_spec(settings_document(()), site=site).site.site):
        profile = {"name": "doctor", "walltime": "10m", **size}
        try:
            spec, plan = _make_plan(site, profile, settings, program)
            record = submit.submit(spec, plan, ledger)
        except InputError as error:
            failures.append(error)
            continue
        logger.info(
            "%s: a job with %s in queue %s; to end it: gpujobs cancel %s",
            record.id,
            plural(plan.n_workers, "worker"),
            plan.groups[0].queue,
            record.id,
        )
        return record
    raise failures[0]


def _sizes(site: Site) -> Iterator[dict[str, object]]:
    """Yield sizes; the first one that a queue of the site accepts is taken."""
    if not all(queue.exclusive for queue in site.queues.values()):
        yield {"gpus": 2}
        yield {"gpus": 1}
    for queue in site.queues.values():
        nodes = queue.min_nodes or 1
        if queue.gpus_per_node and (queue.exclusive or nodes > 1):
            layout = "mpi" if nodes > 1 else "workers"
            yield {"gpus": queue.gpus_per_node * nodes, "layout": layout}
    yield {"gpus": 0, "workers": {"count": 2}}


def _make_plan(
    site: str | None, profile: dict[str, object], settings: Sequence[str], program: list[str]
) -> tuple[ClusterSpec, Plan]:
    """Return the plan in which `jobcheck` starts after all workers have connected."""
    document = Document(profile, {(): Position(SOURCE)}, source=SOURCE)
    spec = make_spec(settings_document(tuple(settings)).over(document), site=site)
    first = make_cluster_plan(spec)
    own: dict[str, object] = {
        "run": [first.groups[0].python, *program],
        "start_workers": first.n_workers,
        "env": {"DOCTOR_WORKERS": str(first.n_workers)},
    }
    spec = with_settings(spec, Document(own, source=SOURCE))
    return spec, make_cluster_plan(spec)


def _wait_for_end(record: ClusterRecord, ledger: Ledger) -> ClusterReport:
    monitor = ClusterMonitor([record], ledger)
    deadline = time.monotonic() + JOB_TIMEOUT
    try:
        report = monitor.report()
        while not report.finished and time.monotonic() < deadline:
            time.sleep(1)
            report = monitor.report()
    finally:
        cancel.cancel(record, ledger)
    return report


def _output(record: ClusterRecord) -> list[str]:
    try:
        return (
            (record.path / "logs" / "run.log")
            .read_text(encoding="utf-8", errors="replace")
            .splitlines()
        )
    except OSError:
        return []


def _without_facts(report: ClusterReport) -> Check:
    cluster_id = report.record.id
    reason = report.reason or f"no answer within {JOB_TIMEOUT:.0f} s"
    remedy = _remedy(report) or f"gpujobs logs --all {cluster_id}"
    return failed("job", f"{cluster_id}: {reason}", remedy)


def _remedy(report: ClusterReport) -> str:
    """Return the remedy for programs and modules that the job did not find; "" if none is known."""
    reason = report.reason
    if any(name in reason for name in ("dask_cuda", "dask-cuda", "bindings")):
        return "pip install 'dask-cuda[cu12]' (or [cu13], by the driver) in the jobs' python"
    if any(name in reason for name in ("pynvml", "NVML", "libnvidia-ml")):
        return (
            "the node has no NVIDIA driver, or the job no GPU: "
            "see `request` and `visible_devices` of the site file"
        )
    if any(job.exit_code in CANNOT_EXECUTE for job in report.jobs):
        return (
            "the jobs' python does not exist: set `environment: {python: …}`, "
            "or a setup that provides it"
        )
    return ""
