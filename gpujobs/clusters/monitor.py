"""Look at clusters that were submitted, wait for them, cancel them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..batch.client import RETRY_TIMEOUT, SchedulerClient
from ..errors import GpujobsError, UnavailableError
from ..schedulers import JobId, JobState, JobStatus, get_scheduler
from ..schedulers.base import NOT_LISTED
from . import folder as folders
from .ledger import ClusterRecord, Ledger, Submission
from .report import CANCELLED, GRACE, ClusterReport, vanished, view

SLOWEST_POLL = 60.0
SILENCE = 60.0
"""Seconds without a sign of life after which an owner is taken for gone."""
Tell = Callable[[str], None]


def batch_of(record: ClusterRecord, timeout: float = RETRY_TIMEOUT) -> SchedulerClient:
    """Return the client of the batch scheduler that has the jobs of ``record``."""
    scheduler = get_scheduler(record.scheduler)(record.cluster)
    return SchedulerClient(scheduler, record.commands, timeout=timeout)


def accepted(
    record: ClusterRecord, number: str, ledger: Ledger, batch: SchedulerClient
) -> ClusterRecord:
    """Write down that the batch scheduler took what the record's intent says, under the id ``number``."""
    intent = record.intent or {}
    first_index = batch.scheduler.first_index
    submission = Submission(
        number, intent["first"], intent["count"], intent["group"], intent["array"], first_index
    )
    record = ledger.submitted(record.id, submission)
    targets = [word for sent in record.submissions for word in batch.scheduler.target(sent.id)]
    folders.write_job_ids(record.path, targets)
    return record


# -- look ------------------------------------------------------------------------------------------------------
def look(records: Iterable[ClusterRecord], ledger: Ledger, tell: Tell) -> Iterator[ClusterReport]:
    """Yield what the clusters are doing: one question per batch scheduler for all of them.

    A batch scheduler that does not answer is told about, and its jobs are UNKNOWN.
    """
    groups: dict[object, list[ClusterRecord]] = {}
    for record in records:
        key = (record.scheduler, record.cluster, tuple(sorted(record.commands.items())))
        groups.setdefault(key, []).append(_adopted(record, ledger, tell))
    for group in groups.values():
        active = [record for record in group if not record.finished]
        statuses: dict[JobId, JobStatus] = {}
        try:
            statuses = ask(active, tell)
        except UnavailableError as error:
            tell(str(error))
            statuses = {
                job: JobStatus(JobState.UNKNOWN, reason="the batch scheduler does not answer")
                for record in active
                for job in record.jobs.values()
            }
        for record in group:
            yield _seen(record, ledger, statuses)


def ask(records: list[ClusterRecord], tell: Tell, patience: float = 15.0) -> dict[JobId, JobStatus]:
    """Ask the batch scheduler once for all jobs of ``records``, which it all has."""
    if not records:
        return {}
    batch = batch_of(records[0], patience)
    jobs = {job for record in records for job in record.jobs.values()}
    jobs |= {job for record in records for job in folders.read(record.path).claims.values()}
    return batch.status(sorted(jobs, key=str), [record.id for record in records])


def _seen(record: ClusterRecord, ledger: Ledger, statuses: dict[JobId, JobStatus]) -> ClusterReport:
    facts = folders.read(record.path)
    if record.finished:
        jobs = {**record.jobs, **facts.claims}
        final = {
            jobs[int(number)]: JobStatus(JobState(state), reason=record.reasons.get(number, ""))
            for number, state in record.outcomes.items()
        }
        return view(record, facts, final)
    record, statuses = _settled(record, ledger, facts, statuses)
    seen = view(record, facts, statuses)
    if seen.jobs and not seen.active and not any(job.stuck for job in seen.jobs):
        outcomes = {str(job.number): job.state.value for job in seen.jobs}
        reasons = {str(job.number): job.reason for job in seen.jobs if job.reason}
        ledger.update(record.id, finished=True, outcomes=outcomes, reasons=reasons)
    return seen


def _settled(
    record: ClusterRecord,
    ledger: Ledger,
    facts: folders.FolderState,
    statuses: dict[JobId, JobStatus],
) -> tuple[ClusterRecord, dict[JobId, JobStatus]]:
    """Give up jobs that nothing has listed for a while, and left no record: they are not waited for any more."""
    jobs, now = {**record.jobs, **facts.claims}, time.time()
    missing = {number: job for number, job in jobs.items() if statuses.get(job) == NOT_LISTED}
    since = {
        str(number): record.unlisted.get(str(number), now)
        for number in missing
        if number not in facts.records
    }
    if since != record.unlisted:
        record = ledger.update(record.id, unlisted=since)
    gone = {
        job: vanished(n in facts.claims)
        for n, job in missing.items()
        if now - since.get(str(n), now) > GRACE
    }
    return record, {**statuses, **gone}


def _adopted(record: ClusterRecord, ledger: Ledger, tell: Tell) -> ClusterRecord:
    """Finish a submission that was cut short between asking the batch scheduler and writing down its answer."""
    if record.intent is None or time.time() - record.created < 120:
        return record
    batch = batch_of(record, 5.0)
    try:
        found = batch.find(record.id) - {submission.id for submission in record.submissions}
    except GpujobsError:
        return record
    if found:
        return accepted(record, min(found), ledger, batch)
    folders.end(record.path, 70, "it was never submitted: gpujobs was interrupted")
    return ledger.update(record.id, intent=None, finished=not record.submissions)


# -- wait ------------------------------------------------------------------------------------------------------
@dataclass
class ClusterWatcher:
    """Looks at one cluster: at its folder as often as asked, at the batch scheduler seldom and ever more seldom."""

    record: ClusterRecord
    ledger: Ledger
    tell: Tell
    statuses: dict[JobId, JobStatus] | None = None
    next_question: float = 0.0
    interval: float = 0.0

    def look(self) -> ClusterReport:
        """Return what the cluster is doing now."""
        if time.monotonic() >= self.next_question:
            self._ask()
        return view(self.record, folders.read(self.record.path), self.statuses or {})

    def _ask(self) -> None:
        before = self.statuses
        try:
            self.statuses = ask([self.record], self.tell)
        except UnavailableError as error:
            self.tell(str(error))
        else:
            facts = folders.read(self.record.path)
            self.record, self.statuses = _settled(self.record, self.ledger, facts, self.statuses)
        moved = self.statuses != before
        self.interval = float(self.record.poll) if moved else min(SLOWEST_POLL, self.interval * 1.5)
        self.next_question = time.monotonic() + self.interval


def wait_until_gone(watch: ClusterWatcher, patience: float) -> ClusterReport:
    """Wait until the jobs of a cluster that has ended have left their records; return its last view."""
    deadline = time.monotonic() + patience
    while (seen := watch.look()).active and time.monotonic() < deadline:
        if all(
            job.number in seen.facts.records for job in seen.jobs if job.state is JobState.RUNNING
        ):
            watch.next_question = 0.0
        time.sleep(0.5)
    return next(look([watch.record], watch.ledger, watch.tell))


def orphaned(record: ClusterRecord) -> bool:
    """Tell whether the Python process that owned a cluster is gone: it has given no sign of life for a minute."""
    if record.owner != "client" or record.finished:
        return False
    return folders.silence(record.path) > SILENCE


# -- cancel ----------------------------------------------------------------------------------------------------
def cancel(record: ClusterRecord, tell: Tell, patience: float = RETRY_TIMEOUT) -> None:
    """End a cluster: its jobs are told through the folder, and the batch scheduler is asked to end them."""
    if record.path.is_dir():
        folders.end(record.path, 143, CANCELLED)
    if not record.finished and record.submissions:
        claimed = {job.submission for job in folders.read(record.path).claims.values()}
        submissions = {submission.id for submission in record.submissions} | claimed
        batch = batch_of(record, patience)
        batch.cancel({submission: () for submission in sorted(submissions)})
