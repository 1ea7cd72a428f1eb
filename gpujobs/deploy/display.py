"""How cluster objects display themselves and their jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from distributed.utils import Log

from ..clusters.folder import tail
from ..clusters.folderstate import read_transport
from ..clusters.report import JobReport
from .table import JobTable, phase_counts


class JobsDisplay(ABC):
    """The properties that show jobs; a base of all cluster classes."""

    id: str

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The cluster's folder, with logs, scripts and certificate."""

    @abstractmethod
    def job_script(self) -> str:
        """Return the script of the worker jobs."""

    @abstractmethod
    def _job_reports(self) -> list[JobReport]:
        """Return the jobs, active ones first."""

    @abstractmethod
    def _rows(self) -> Iterable[str]:
        """Return the lines of the scaling status."""

    @abstractmethod
    def _errors(self) -> list[str]:
        """Return why some groups, or all, get no more jobs; one line each."""

    @property
    def jobs(self) -> JobTable:
        """The jobs, active ones first: a list of JSON objects that displays as a table."""
        return JobTable.of(self._job_reports(), read_transport(self.folder).text())

    @property
    def job_header(self) -> str:
        """The directives of the worker jobs."""
        lines = self.job_script().splitlines()
        end = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
        return "\n".join(lines[:end])

    @property
    def job_name(self) -> str:
        """The name of all jobs: the cluster's id."""
        return self.id

    async def _get_logs(
        self, cluster: bool = True, scheduler: bool = True, workers: Any = True
    ) -> Any:
        get_logs = super()._get_logs  # type: ignore[misc]
        logs = await get_logs(cluster=cluster, scheduler=scheduler, workers=workers)
        if workers is True:  # also of jobs whose workers never connected
            for path in sorted((self.folder / "logs").glob("job-*.log")):
                logs[path.stem] = Log("\n".join(tail(path, 500)))
        return logs

    def _scaling_status(self) -> str:
        rows = map(escape, self._rows())
        cells = (f"<tr><td style='text-align: left;'>{row}</td></tr>" for row in rows)
        return f"<table>{''.join(cells)}</table>"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        jobs = phase_counts(job for job in self._job_reports() if job.active) or "none"
        rows = [f"<strong>Jobs:</strong> {jobs}"]
        rows += [f"<strong>No more jobs:</strong> {escape(error)}" for error in self._errors()]
        cells = "".join(f"<tr><td style='text-align: left;'>{row}</td></tr>" for row in rows)
        status = f"{cluster_status or ''}{cells}"
        return str(super()._repr_html_(cluster_status=status))  # type: ignore[misc]
