"""The one query loop: watches submitted clusters and reports on them.

The cluster's folder is read for every report. The batch scheduler is queried rarely: once for all
clusters it has, and ever more rarely while nothing changes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..batch.client import OLDEST_ANSWER, SchedulerClient, never
from ..batch.process import HOST, System
from ..errors import GpujobsError, InputError, UnavailableError
from ..injob.folder import EndKind
from ..injob.log import error_in
from ..schedulers import NOT_LISTED, JobId, JobState, JobStatus, Scheduler, get_scheduler
from . import badnodes
from . import clusterfolder as folders
from .cleanup import used_space
from .clusterfolder import PresentFolders, best_effort, write_atomically
from .folderstate import FolderReader, FolderState, JobTrace
from .judge import judge, unlisted_since
from .lastword import EndedJob, ended_job, last_word
from .ledger import ClusterRecord, Ledger
from .owner import gone_owner, has_lease
from .report import ClusterReport, JobReport
from .verdict import write_record

QUERY_TIMEOUT = 15.0
"""Seconds for which a query waits for a batch scheduler that is away."""
SLOWEST_QUERY = 60.0
"""Seconds between two queries when nothing changes."""
BACK_OFF = 1.5
RECOVERY_AGE = 120.0
"""Seconds after which a submission without a reply has been interrupted."""
NO_ANSWER = JobStatus(JobState.UNKNOWN, reason="the batch scheduler does not respond")

logger = logging.getLogger("gpujobs")


def client_of(
    record: ClusterRecord,
    *,
    timeout: float = 90.0,
    stopping: Callable[[], bool] = never,
    system: System = HOST,
) -> SchedulerClient:
    """Return a client of the batch scheduler that has the jobs of ``record``."""
    scheduler = get_scheduler(record.scheduler)(record.multi_cluster)
    return SchedulerClient(
        scheduler, record.commands, timeout=timeout, stopping=stopping, system=system
    )


class ClusterMonitor:
    """Reports on clusters; call `reports` as often as you like."""

    def __init__(
        self,
        records: Iterable[ClusterRecord],
        ledger: Ledger,
        *,
        last_words: bool = False,
        skip_ended: bool = False,
        in_full: bool = False,
        stopping: Callable[[], bool] = never,
        system: System = HOST,
    ) -> None:
        """Watch clusters.

        ``last_words``: those in the records are enough for clusters that have ended.
        ``skip_ended``: the records are enough for jobs that have ended, of clusters that go on.
        An owner asks for all, and reads their files: its jobs may start again unlisted.
        ``in_full``: see `FolderReader`.
        """
        self.ledger = ledger
        self._last_words = last_words
        self._skip_ended = skip_ended
        self.system = system
        self.records = list(records)
        self._stopping = stopping
        self._readers = {
            record.id: FolderReader(record.path, in_full=in_full) for record in self.records
        }
        self._answers: dict[JobId, JobStatus] = {}
        self._began: dict[JobId, float | None] = {}
        """When jobs had last started before the batch scheduler answered that they wait."""
        self._settled: set[JobId] = set()
        """Jobs that have ended, and are not queried any more.

        One that is listed all the same, as it was requeued later, is active again.
        """
        self._returned: set[JobId] = set()
        """Jobs that are in the queue again, although they had ended."""
        self._ended_jobs: dict[str, tuple[Mapping[str, EndedJob], dict[int, JobTrace]]] = {}
        """Of each record that was read last: its `ended`, and their traces."""
        self._unlisted: dict[str, dict[str, float]] = {}
        """Of the records that could not be written, by cluster."""
        self._present = PresentFolders()
        """At this look."""
        self._last_query = -math.inf
        self._next_query = 0.0
        self._interval = 0.0

    @property
    def age(self) -> float:
        """Seconds since the last query of the batch scheduler."""
        return self.system.monotonic() - self._last_query

    def reports(
        self,
        connected: Iterable[str] | None = None,
        *,
        records: Sequence[ClusterRecord] | None = None,
        folders: PresentFolders | None = None,
    ) -> list[ClusterReport]:
        """Return a report on every cluster; ``connected``: of a monitor of one, see `judge`.

        ``records``, ``folders``: the caller has just read them, else they are read now.
        """
        self._present = folders or PresentFolders()
        if records is None:
            self.records = [self._current(record) for record in self.records]
        else:
            self.records = [self._with_unlisted(record) for record in records]
        states = {record.id: self._read(record) for record in self.records}
        if self.system.monotonic() >= self._next_query:
            self._query(states)
        reports = [self._report(record, states[record.id], connected) for record in self.records]
        return badnodes.note(reports, self.ledger, self.system.time())

    def report(self, connected: Iterable[str] | None = None) -> ClusterReport:
        """Return the report on the only cluster; see `judge` for ``connected``."""
        return self.reports(connected)[0]

    def latest(self, connected: Iterable[str] | None = None) -> ClusterReport:
        """Return a report on the only cluster without a query; see `judge` for ``connected``."""
        self._present = PresentFolders()
        record = self.records[0] = self._current(self.records[0])
        return self._judge(record, self._read(record), connected)

    def query_soon(self, seconds: float = 0.0) -> None:
        """Something has changed: query in ``seconds``, and often for a while."""
        self._interval = self._fastest()
        self._next_query = min(self._next_query, self.system.monotonic() + seconds)

    def wait_until_inactive(self, timeout: float) -> ClusterReport:
        """Wait until all jobs of a cluster that has ended are gone; return the last report."""
        deadline = self.system.monotonic() + timeout
        while (report := self.report()).active and self.system.monotonic() < deadline:
            running = (job.number for job in report.jobs if job.state is JobState.RUNNING)
            if report.folder.have_left(running):
                self.query_soon()
            self.system.sleep(0.5)
        return report

    def _current(self, record: ClusterRecord) -> ClusterRecord:
        """Return the record as it is now: another process may have scaled the cluster."""
        try:
            return self._with_unlisted(self.ledger.get(record.id))
        except GpujobsError:  # removed, or damaged meanwhile
            return record

    def _with_unlisted(self, record: ClusterRecord) -> ClusterRecord:
        """Return the record with the facts that could not be written into it."""
        return replace(record, unlisted=self._unlisted.get(record.id, record.unlisted))

    def _read(self, record: ClusterRecord) -> FolderState:
        """Read a cluster's folder; jobs that have started since an answer do not wait any more."""
        if record.last and self._has_said_all(record):
            return record.last.state()
        jobs = record.jobs if record.on_one_host else ()
        ended = self._ended(record)
        state = self._readers[record.id].read(self._present, jobs, ended)
        for number, job in record.current_jobs(state.claims).items():
            began = state.job(number).began
            if job in self._began and began not in (None, self._began[job]):
                self._answers[job] = JobStatus(JobState.RUNNING)
        return state

    def _ended(self, record: ClusterRecord) -> dict[int, JobTrace]:
        """Return the traces of the jobs that have ended, as a record says, and are not back.

        If no other job is known, the batch scheduler is asked for all: one may have started again.
        """
        if not self._skip_ended or len(record.ended) == len(record.jobs):
            return {}
        known, found = self._ended_jobs.get(record.id, ({}, {}))
        if record.ended is not known:
            found = {}
            newest = {job: number for number, job in record.jobs.items()}
            for text, ended in record.ended.items():
                number, trace = int(text), ended.trace
                job = trace.claim or record.jobs.get(number)
                # A batch scheduler that was restored may have given the id again.
                if job is None or job in self._returned or newest.get(job, number) != number:
                    continue
                self._answers.setdefault(job, ended.status)
                self._settled.add(job)
                found[number] = trace
            self._ended_jobs[record.id] = record.ended, found
        return found

    def _has_said_all(self, record: ClusterRecord) -> bool:
        """Return whether the last word of a cluster is enough; not if its folder was removed."""
        known = self._last_words and record.finished and record.last is not None
        return known and record.path in self._present

    def _judge(
        self, record: ClusterRecord, state: FolderState, connected: Iterable[str] | None
    ) -> ClusterReport:
        owner_lives = record.replaces == "owner" and state.ended is None and not state.refused
        gone = ""
        if owner_lives and connected is None:  # else its dask scheduler answers
            gone = gone_owner(record.path)
            owner_lives = not gone and has_lease(record.path)
        return judge(
            record,
            state,
            self._answers,
            now=self.system.time(),
            connected=connected,
            owner_lives=owner_lives,
            gone_owner=gone,
        )

    def _report(
        self, record: ClusterRecord, state: FolderState, connected: Iterable[str] | None
    ) -> ClusterReport:
        report = self._judge(record, state, connected)
        ended = {job.job for job in report.jobs if not job.in_queue}
        if not (record.finished or ended <= self._settled):
            # The folder was read before the query: a job may have said more since then, or its
            # worker counted as present, and its own file was not read.
            numbers = {job.number for job in report.jobs if not job.in_queue}
            self._readers[record.id].ended = numbers
            report = self._judge(record, self._read(record), connected)
        self._settled.update(job.job for job in report.jobs)
        self._settled.difference_update(job.job for job in report.jobs if job.in_queue)
        gone = report.jobs and not any(job.in_queue for job in report.jobs)
        if gone and report.finished and not (record.finished and record.last):
            self._remember_outcomes(report)
        elif record.last and report.folder.damaged:  # after the last word, which was right
            with best_effort():
                self.ledger.finish(record, record.outcomes, record.reasons)
        elif self._skip_ended and not record.finished:
            self._remember_ended(report)
        return report

    def _remember_ended(self, report: ClusterReport) -> None:
        """Note in the record which jobs have ended, so that no other process asks for them."""
        record = report.record
        new: dict[str, EndedJob] = {}
        for job in report.jobs:
            unasked = job.unseen or job.job not in self._answers
            if not (job.in_queue or unasked or str(job.number) in record.ended):
                status = JobStatus(job.state, job.native, job.reason, job.exit_code)
                new[str(job.number)] = ended_job(job.number, status, report.folder.job(job.number))
        back = [str(job.number) for job in report.jobs if job.in_queue]
        back = [number for number in back if number in record.ended]
        if record.on_one_host and not record.planned and (new or back):
            with best_effort():
                updated = self.ledger.note_ended(record.id, new, back)
                self.records = [updated if one.id == record.id else one for one in self.records]

    def _remember_outcomes(self, report: ClusterReport) -> None:
        outcomes = {str(job.number): job.state.value for job in report.jobs}
        reasons = {str(job.number): job.reason for job in report.jobs if job.reason}
        record, folder = report.record, report.folder
        last = None if record.planned else last_word(folder)
        if record.finished and last is None:
            return
        with best_effort():
            # A job folder stays as it was rendered.
            if folder.ended is not None and folder.started_jobs_have_left and not record.planned:
                folders.remove_packages(record.path)
        if last:
            size, files = used_space(record.path)
            last = replace(last, size=size, files=files)
        with best_effort():
            self.ledger.finish(record, outcomes, reasons, last)

    # -- query -------------------------------------------------------------------------------------
    def _query(self, states: dict[str, FolderState]) -> None:
        self._last_query = self.system.monotonic()
        before = dict(self._answers)
        self.records = [self._recovered(record) for record in self.records]
        for group in _by_batch_scheduler(record for record in self.records if not record.finished):
            self._query_group(group, states)
        changed = self._answers != before
        slower = min(max(SLOWEST_QUERY, self._fastest()), self._interval * BACK_OFF)
        self._interval = self._fastest() if changed else slower
        self._next_query = self.system.monotonic() + self._interval

    def _recovered(self, record: ClusterRecord) -> ClusterRecord:
        with best_effort():
            return recover_submission(record, self.ledger, system=self.system)
        return record

    def _query_group(self, group: Sequence[ClusterRecord], states: dict[str, FolderState]) -> None:
        current = (record.current_jobs(states[record.id].claims) for record in group)
        known = {job for numbered in current for job in numbered.values()}
        jobs, ended = known - self._settled, known & self._settled
        if not jobs:
            return
        try:
            client = client_of(
                group[0], timeout=QUERY_TIMEOUT, stopping=self._stopping, system=self.system
            )
            names = [record.id for record in group]
            answers = client.status(sorted(jobs, key=str), names, ended)
        except (UnavailableError, InputError) as error:  # or the batch scheduler's package is gone
            logger.warning("%s", error)
            for job in jobs:
                if self._answers.get(job, NOT_LISTED) == NOT_LISTED:  # that must not grow old
                    self._answers[job] = NO_ANSWER
            return
        before = dict(self._answers)
        self._answers.update(answers)
        self._take_back(group, states, answers)
        for record in group:
            self._note_waiting(record, states[record.id], before)
            self._remember_unlisted(record, states[record.id], answers)

    def _take_back(
        self,
        group: Iterable[ClusterRecord],
        states: dict[str, FolderState],
        answers: Mapping[JobId, JobStatus],
    ) -> None:
        """Count jobs again that had ended and are in the queue: their files have the new start."""
        returned = {job for job in answers if job in self._settled and answers[job].in_queue}
        self._settled -= returned
        self._returned |= returned
        for record in group:
            if returned.intersection(record.current_jobs(states[record.id].claims).values()):
                self._ended_jobs.pop(record.id, None)
                states[record.id] = self._read(record)

    def _note_waiting(
        self, record: ClusterRecord, state: FolderState, before: Mapping[JobId, JobStatus]
    ) -> None:
        """Note the jobs that wait; those that had started before the answer were requeued.

        ``before``: the answers until now.
        """
        for number, job in record.current_jobs(state.claims).items():
            answer = self._answers.get(job)
            self._began.pop(job, None)
            if answer is None or answer.state is not JobState.PENDING:
                continue
            failed = _has_lost_workers(record, state, number)
            if not failed and self._is_old(state, number, before.get(job)):
                self._answers[job] = JobStatus(JobState.RUNNING)
            else:
                self._began[job] = state.job(number).began
                requeued = state.job(number).started
                self._answers[job] = replace(answer, requeued=requeued)

    def _is_old(self, state: FolderState, number: int, before: JobStatus | None) -> bool:
        """Return whether the answer that a job waits may be older than its start.

        It is not if the batch scheduler had said something else before, nor if that is known to be
        a requeue, or the job was stopped.
        """
        waited = before is not None and before.state is JobState.PENDING and not before.requeued
        if before is not None and before.native and not waited:
            return False
        left, began = state.job(number).left, state.job(number).began
        if began is None or (left is not None and left.exit_code):
            return False
        return self.system.time() - began < OLDEST_ANSWER

    def _remember_unlisted(
        self, record: ClusterRecord, state: FolderState, answers: Mapping[JobId, JobStatus]
    ) -> None:
        unlisted = unlisted_since(record, state, answers, self.system.time())
        if unlisted != record.unlisted:
            updated = replace(record, unlisted=unlisted)
            self._unlisted[record.id] = unlisted
            with best_effort():
                updated = self.ledger.update(record.id, unlisted=unlisted)
                del self._unlisted[record.id]
            self.records = [updated if item.id == record.id else item for item in self.records]

    def _fastest(self) -> float:
        return float(max((record.poll for record in self.records), default=5))


def _has_lost_workers(record: ClusterRecord, state: FolderState, number: int) -> bool:
    """Return whether all workers of a job have left since its start, although it did not exit.

    So it is when its node has failed. An answer that it waits is then newer than its start.
    """
    job = state.job(number)
    began = job.began
    if began is None or job.left or state.ended is not None:
        return False
    sent = next((one for one in record.submissions if number in one.numbers), None)
    workers = record.worker_names(number, sent.group) if sent else ()
    left = (state.dask.gone.get(name, -math.inf) >= began for name in workers)
    return bool(workers) and all(left)


def _by_batch_scheduler(records: Iterable[ClusterRecord]) -> Iterable[list[ClusterRecord]]:
    """Return the clusters that one command can ask for."""
    groups: dict[object, list[ClusterRecord]] = {}
    for record in records:
        key = (record.scheduler, record.multi_cluster, tuple(record.commands.items()))
        groups.setdefault(key, []).append(record)
    return groups.values()


# -- a last look at clusters that have finished ----------------------------------------------------
def still_queued(
    records: Iterable[ClusterRecord], ledger: Ledger, *, system: System = HOST
) -> dict[str, str]:
    """Return why ``records``, which have finished, may have jobs all the same, by cluster.

    A cluster may be finished only because nothing had listed its jobs for some time, and then the
    batch scheduler is not asked any more. If its queue has one of them, it is active again.
    """
    found: dict[str, str] = {}
    present = PresentFolders()
    for group in _by_batch_scheduler(record for record in records if record.submissions):
        states = {record.id: FolderReader(record.path).read(present) for record in group}
        jobs = {record.id: _jobs_of(record, states[record.id]) for record in group}
        try:
            client = client_of(group[0], timeout=QUERY_TIMEOUT, system=system)
            queue = client.in_queue(set().union(*jobs.values()), list(jobs))
        except (UnavailableError, InputError) as error:
            logger.warning("%s", error)
            queue = dict.fromkeys(set().union(*jobs.values()), NO_ANSWER)
        for record in group:
            queued = {queue[job].state for job in jobs[record.id] if job in queue}
            if queued - {JobState.UNKNOWN}:
                found[record.id] = "its jobs are in the queue"
                ledger.update(record.id, finished=False, outcomes={}, reasons={}, unlisted={})
            elif queued and not states[record.id].have_left(record.jobs):
                found[record.id] = "it is not known whether its jobs have ended"
    return found


def _jobs_of(record: ClusterRecord, state: FolderState) -> set[JobId]:
    return {*record.jobs.values(), *record.current_jobs(state.claims).values()}


# -- submissions -----------------------------------------------------------------------------------
def record_submission(
    record: ClusterRecord, submission_id: str, ledger: Ledger, client: SchedulerClient
) -> ClusterRecord:
    """Add the accepted submission that the record's intent describes; return the new record."""
    intent = record.intent
    if intent is None:
        raise GpujobsError(f"{record.id}: no submission is under way")
    first_index = client.scheduler.first_index
    submission = replace(intent, id=submission_id, first_index=first_index)
    record = ledger.end_submission(record.id, submission)
    _write_job_ids(record, client.scheduler)
    if record.replaces == "none":
        write_record(record)
    return record


def _write_job_ids(record: ClusterRecord, scheduler: Scheduler) -> None:
    """Write the ids with which a head cancels waiting jobs: of the cluster, or of its attempt."""
    files: dict[str, list[str]] = {}
    for sent in record.submissions:
        own = [f"job-ids-{sent.attempt}"] if record.attempts > 1 else []
        for name in ("job-ids", *own):
            files.setdefault(name, []).extend(scheduler.target(sent.id))
    for name, words in files.items():
        write_atomically(record.path / name, "".join(f"{word}\n" for word in words))


def recover_submission(
    record: ClusterRecord, ledger: Ledger, *, at_once: bool = False, system: System = HOST
) -> ClusterRecord:
    """Complete a submission that was interrupted before the batch scheduler replied.

    One that may still be under way is left alone. ``at_once``: its job is looked for all the same.
    The claim of a job proves that it was accepted, also if the batch scheduler does not list it any
    more.
    """
    if record.intent is None:
        return record
    recent = system.time() - record.intent.time < RECOVERY_AGE
    if recent and not at_once:
        return record
    try:
        client = client_of(record, timeout=5.0, system=system)
        known = {submission.id for submission in record.submissions}
        if recent:
            found = min(client.find(record.id) - known, default=None)
        else:  # without a job, it is given up
            found = client.accepted(record.id, known, system.time() - record.intent.time)
    except GpujobsError:
        return record
    claimed = record.claimed_intent()
    if record.planned:
        # The jobs of a copy of the folder have the same name. Only the claim of a job, which is in
        # the folder of its submission, says whose it is.
        if claimed:
            return ledger.end_submission(record.id, claimed)
        if found:
            return record
    elif claimed:
        return record_submission(record, claimed.id, ledger, client)
    elif found:
        return record_submission(record, found, ledger, client)
    if recent:
        return record
    if record.submissions or record.replaces == "owner":  # which submits again
        return ledger.update(record.id, intent=None)
    reason = "gpujobs was interrupted before the batch scheduler accepted a job"
    folders.end(record.path, EndKind.FAILED, 70, reason)
    return ledger.update(record.id, intent=None, finished=True)


def report_on(record: ClusterRecord, ledger: Ledger) -> ClusterReport:
    """Return a report on one cluster, with one query."""
    return ClusterMonitor([record], ledger).report()


def job_error(record: ClusterRecord, job: JobReport) -> str:
    """Return the last error in the log of a job; "" if there is none."""
    return error_in(record.path / "logs" / f"job-{job.number}.log")


def with_log(record: ClusterRecord, job: JobReport) -> JobReport:
    """Return the report of a job with the last lines of its log, or of `run` if that failed."""
    name = "run.log" if job.run_failed else f"job-{job.number}.log"
    return replace(job, log=tuple(folders.tail(record.path, name, 8)))
