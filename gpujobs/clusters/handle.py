"""Clusters for programs: `plan`, `submit` and `ClusterHandle`, which the command line uses, too."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.document import Document
from ..config.spec import ClusterSpec, laid_over, load_spec, make_spec
from ..errors import GpujobsError, JobFailedError
from . import connect, logs, prepare, scale
from . import submit as submission
from .freequeues import with_order
from .history import read_history
from .ledger import ClusterRecord, Ledger
from .monitor import ClusterMonitor
from .notebook import Card, card_html
from .report import ClusterReport, ClusterState
from .usage import UsageReport, make_usage
from .verdict import write_verdict

if TYPE_CHECKING:
    from distributed import Client

    from ..planning.plan import Plan

logger = logging.getLogger("gpujobs")

WAIT_INTERVAL = 0.5
"""Seconds between two reports of `ClusterHandle.wait`."""
EXIT_TIMEOUT = 15.0
"""Seconds for which the jobs of a cluster that has ended may take to exit."""

Profile = str | os.PathLike[str] | Mapping[str, object]
"""The path of a profile, or its content: the keys of docs/profiles.md."""


def plan(
    profile: Profile,
    *,
    site: str | None = None,
    settings: Mapping[str, object] | None = None,
    soonest: bool = False,
) -> Plan:
    """Return the jobs that ``profile`` describes, checked against the limits of the site.

    ``site`` is a name or a path, ``settings`` are keys that are laid over the profile.
    ``soonest``: `queue: auto` first tries the queues with enough free GPUs, for which the batch
    scheduler is queried. Nothing is submitted. Raises InputError with the place of each
    problem.
    """
    return prepare.make_cluster_plan(_spec(profile, site, settings, soonest))


def submit(
    profile: Profile,
    *,
    site: str | None = None,
    settings: Mapping[str, object] | None = None,
    soonest: bool = False,
) -> ClusterHandle:
    """Submit the cluster that ``profile`` describes; the arguments are those of `plan`.

    It does not depend on this process. Raises InputError, RefusedError in the batch scheduler's
    words, or UnavailableError; no job is left then.
    """
    spec = _spec(profile, site, settings, soonest)
    return submit_planned(spec, prepare.make_cluster_plan(spec))


def submit_planned(spec: ClusterSpec, planned: Plan) -> ClusterHandle:
    """Submit a cluster whose plan was made from ``spec``; see `submit`."""
    ledger = Ledger()
    return ClusterHandle(submission.submit(spec, planned, ledger).id, ledger)


class ClusterHandle:
    """A cluster that was submitted, by this process or another one."""

    def __init__(self, cluster_id: str, ledger: Ledger | None = None) -> None:
        """Raises NoSuchClusterError."""
        self._ledger = ledger or Ledger()
        self.id = self._ledger.get(cluster_id).id

    def __repr__(self) -> str:
        return f"ClusterHandle({self.id!r})"

    def _repr_html_(self) -> str:
        return card_html(Card(self.status(), type(self).__name__))

    @property
    def record(self) -> ClusterRecord:
        """The record of the cluster, as it is now."""
        return self._ledger.get(self.id)

    @cached_property
    def _monitor(self) -> ClusterMonitor:
        return ClusterMonitor([self.record], self._ledger)

    @cached_property
    def _monitor_of_usage(self) -> ClusterMonitor:
        return ClusterMonitor([self.record], self._ledger, in_full=True)

    def status(self) -> ClusterReport:
        """Return the state of the cluster and its jobs. Call it as often as you like.

        The batch scheduler is queried only if some time has passed since the last query.
        """
        return self._monitor.report()

    def wait(
        self,
        timeout: float | None = None,
        *,
        watch: Callable[[ClusterReport], None] = lambda report: None,
    ) -> ClusterReport:
        """Wait until `run` has ended; without `run`, until all workers are connected.

        ``watch`` is called with every report. Raises JobFailedError if the cluster fails or is
        cancelled, and TimeoutError after ``timeout`` seconds.
        """
        report = self._wait_until_done(timeout, watch)
        if not report.finished:
            return report
        report = self._monitor.wait_until_inactive(EXIT_TIMEOUT)
        watch(report)
        if report.state is not ClusterState.DONE:
            command = "logs" if report.run_failed else "status"
            look = f"gpujobs {command} {report.record.argument}"
            hint = f"{report.cure}; {look}" if report.cure else look
            raise JobFailedError(f"{self.id}: {report.reason}", hint=hint, code=report.exit_code)
        return report

    def wait_for_address(self) -> None:
        """Wait until the dask scheduler has an address, or the cluster has ended."""
        while (report := self.status()).folder.dask.address is None and not report.finished:
            time.sleep(WAIT_INTERVAL)

    def _wait_until_done(
        self, timeout: float | None, watch: Callable[[ClusterReport], None]
    ) -> ClusterReport:
        started, written = time.monotonic(), -math.inf
        given_up: set[int] = set()
        while True:
            report = self.status()
            if not given_up.issuperset(job.number for job in report.held):
                given_up.update(job.number for job in report.held)
                self._cancel_held(report)
            watch(report)
            if report.finished or (report.complete and not report.record.run):
                return report
            if report.gone and not report.record.run and report.folder.head not in report.gone:
                raise _incomplete(report)
            asked = time.monotonic() - self._monitor.age > written
            if asked and report.record.replaces == "none":  # its head need not ask, too
                written = time.monotonic()
                write_verdict(report)
            if timeout is not None and time.monotonic() - started > timeout:
                raise TimeoutError(f"{self.id} is {report.state} after {timeout:g} s")
            time.sleep(WAIT_INTERVAL)

    def _cancel_held(self, report: ClusterReport) -> None:
        try:
            scale.cancel_held(report)
        except GpujobsError as error:
            logger.warning("%s: %s", self.id, error)

    def usage(self) -> UsageReport:
        """Return where the time of the jobs and the GPU hours went until now.

        Like `status`, it does not query the batch scheduler each time.
        """
        report, record = self._monitor_of_usage.report(), self.record
        past = read_history(record.path, report.folder.jobs, report.folder.dask.past)
        return make_usage(report, past, self._ledger.targets(record), time.time())

    def logs(
        self, *, worker: str | None = None, everything: bool = False, follow: bool = False
    ) -> Iterator[str]:
        """Yield the lines of the output of `run`, of the job of a ``worker``, or of all logs.

        ``follow``: go on until the cluster has ended. Raises InputError if there is no such worker.
        """
        paths = logs.choose(self.record, worker, everything)
        return logs.lines(paths, everything, lambda: not follow or self.status().finished)

    def scale(self, workers: int | None = None, **groups: int) -> None:
        """Change the number of workers: of the cluster, or of each of its ``groups``.

        Whole jobs are added or removed. Raises InputError if the cluster cannot be scaled.
        """
        numbers = groups if workers is None else {"": workers, **groups}
        scale.scale(self.record, numbers, self._ledger)

    def cancel(self) -> None:
        """End the cluster and cancel its jobs. Raises UnavailableError or RefusedError."""
        scale.cancel(self.record, self._ledger)

    def connection(self) -> connect.Connection:
        """Return how to connect to its dask scheduler. Raises GpujobsError if that does not run."""
        return connect.connection_to(self.record)

    def client(self, **options: object) -> Client:
        """Return a dask Client of the cluster; ``options`` go to it. See `connect`."""
        return connect.connect(self.id, **options)


def _incomplete(report: ClusterReport) -> JobFailedError:
    """Return the error of a cluster without `run` that will never have all workers."""
    message = f"{report.record.id} will not have all workers: {'; '.join(report.gone.values())}"
    hint = f"it goes on with the others; to add a job: gpujobs scale {report.record.argument} …"
    return JobFailedError(message, hint=hint)


def _spec(
    profile: Profile,
    site: str | None,
    settings: Mapping[str, object] | None,
    soonest: bool,
) -> ClusterSpec:
    own = Document(settings or {}, source="settings")
    if not isinstance(profile, Mapping):
        spec = load_spec(Path(profile), site=site, settings=own)
    else:
        spec = make_spec(laid_over(own, Document(profile, source="profile")), site=site)
    return with_order(spec, soonest=soonest)
