"""`after` of a profile: another cluster that must have ended before."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from ..config.spec import ClusterSpec
from ..errors import InputError, Problem
from ..schedulers import get_scheduler
from . import folder as folders
from .ledger import ClusterRecord, Ledger
from .monitor import report_on
from .report import ClusterState

logger = logging.getLogger("gpujobs")


@dataclass(frozen=True)
class Predecessor:
    """A cluster that has not ended yet."""

    record: ClusterRecord
    any_end: bool
    """Whether it may fail."""

    @property
    def submissions(self) -> list[str]:
        """The ids of its submissions, those of its last attempt."""
        sent = self.record.submissions
        last = max(submission.attempt for submission in sent)
        return [submission.id for submission in sent if submission.attempt == last]

    def note(self, record: ClusterRecord) -> ClusterRecord:
        """Write into the folder of ``record`` that it waits for this cluster."""
        other = self.record
        folders.write_after(record.path, other.id, other.path, any_end=self.any_end)
        return replace(record, after=other.id)


def find_predecessor(
    spec: ClusterSpec, record: ClusterRecord, ledger: Ledger
) -> Predecessor | None:
    """Return the cluster for which the new cluster ``record`` waits; None if it has ended.

    Raises NoSuchClusterError, or InputError if it has failed or cannot be waited for.
    """
    after = spec.profile.after
    if after is None:
        return None
    other = ledger.get(after.cluster)
    report = report_on(other, ledger)
    if report.finished and (after.any_end or report.state is ClusterState.DONE):
        logger.info("%s has ended already", other.id)
        return None
    if report.finished:
        message = f"`after`: {other.id} is {report.state}: {report.reason}"
        raise _error(spec, message, hint=f"after: {other.id}:any starts all the same")
    if problem := _problem(record, other):
        raise _error(spec, f"`after`: {other.id} {problem}")
    return Predecessor(report.record, after.any_end)


def _problem(record: ClusterRecord, other: ClusterRecord) -> str:
    """Return why the jobs of ``record`` cannot wait for those of ``other``, or ""."""
    if other.owner != "cluster":
        return "is owned by a Python process, whose jobs change"
    if (other.scheduler, other.multi_cluster) != (record.scheduler, record.multi_cluster):
        return f"is on site {other.site}, which has another batch scheduler"
    if not other.submissions:
        return "is being submitted; try again"
    scheduler = get_scheduler(record.scheduler)(record.multi_cluster)
    if not scheduler.after_options(["1"]):
        return f"has not ended, and {scheduler.name} has no dependencies of jobs"
    return ""


def _error(spec: ClusterSpec, message: str, hint: str = "") -> InputError:
    return InputError(Problem(message, spec.position("after"), hint=hint))
