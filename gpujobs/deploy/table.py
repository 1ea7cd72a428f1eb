"""The jobs of a cluster as Python shows them: a table of JSON objects."""

from __future__ import annotations

import html
from collections.abc import Iterable

from ..clusters.report import JobPhase, JobReport, Json, job_json
from ..clusters.rows import JOB_HEADER, job_cells
from ..text import table

Row = dict[str, Json]


class JobTable(list[Row]):
    """A list of jobs, each as `job_json` returns it, with a human-readable table as its repr."""

    @classmethod
    def of(cls, jobs: Iterable[JobReport], transport: str = "") -> JobTable:
        """Return the table of ``jobs``, with a line on the measured ``transport`` below."""
        table = cls(job_json(job) for job in jobs)
        table._cells = [job_cells(job) for job in jobs]
        table.transport = transport
        return table

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        super().__init__(rows)
        self._cells: list[tuple[str, ...]] = []
        self.transport = ""
        """The measured rates of dask's protocols; "" if only one was possible."""

    def __repr__(self) -> str:
        jobs = table(JOB_HEADER, self._cells) if self else "no jobs"
        return f"{jobs}\nnetwork: {self.transport}" if self.transport else jobs

    def _repr_html_(self) -> str:
        rows = "".join(_html_row("td", cells) for cells in self._cells)
        below = f"<p>network: {html.escape(self.transport)}</p>" if self.transport else ""
        return f"<table>{_html_row('th', JOB_HEADER)}{rows}</table>{below}"


def _html_row(tag: str, cells: Iterable[str]) -> str:
    opening = f"<{tag} style='text-align: left'>"
    return f"<tr>{''.join(f'{opening}{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def phase_counts(jobs: Iterable[JobReport]) -> str:
    """Return ``2 RUNNING, 1 PENDING (Resources)``."""
    by_phase: dict[JobPhase, list[JobReport]] = {phase: [] for phase in JobPhase}
    for job in jobs:
        by_phase[job.phase].append(job)
    parts = []
    for phase, found in by_phase.items():
        if found:
            parts.append(f"{len(found)} {phase}{_pending_reasons(phase, found)}")
    return ", ".join(parts)


def _pending_reasons(phase: JobPhase, jobs: Iterable[JobReport]) -> str:
    reasons = sorted({job.reason for job in jobs if job.reason})
    if phase is not JobPhase.PENDING or not reasons:
        return ""
    return f" ({', '.join(reasons)})"
