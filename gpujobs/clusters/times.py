"""Times of a cluster and its jobs: when they began, how long they run, and what is left."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .report import ClusterReport, JobReport, Json


@dataclass(frozen=True)
class Times:
    """Seconds; ``began`` since the epoch. None: not known, or not begun."""

    began: float | None = None
    elapsed: float | None = None
    left: float | None = None
    """Of the walltime; of a cluster, that of the job whose end is the cluster's."""

    def json(self) -> dict[str, Json]:
        """Return the keys of the JSON output."""
        return asdict(self)


def job_times(report: ClusterReport, job: JobReport, now: float) -> Times:
    """Return the times of one job. The end of a job that has ended is not known."""
    if job.began is None or not job.active or job.waits:
        return Times(job.began)
    elapsed = max(0.0, now - job.began)
    walltime = next((g.walltime for g in report.record.groups if g.name == job.group), 0)
    return Times(job.began, elapsed, max(0.0, walltime - elapsed) if walltime else None)


def cluster_times(report: ClusterReport, now: float) -> Times:
    """Return the times of a cluster: since its first job began, and until it ends at the latest.

    It ends with the job of the dask scheduler, else with the last job.
    """
    began = min((job.began for job in report.jobs if job.began is not None), default=None)
    if began is None:
        return Times()
    elapsed = max(0.0, report.folder.end_time(now) - began)
    if report.finished:
        return Times(began, elapsed if report.folder.ended else None)
    jobs = [job for job in report.current_jobs if job.head] or list(report.current_jobs)
    left = [job_times(report, job, now).left for job in jobs]
    known = [seconds for seconds in left if seconds is not None]
    return Times(began, elapsed, max(known, default=None))
