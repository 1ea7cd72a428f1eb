"""How cluster objects display themselves: their table of jobs, their card in a notebook."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from distributed.utils import Log

from ..clusters.clusterfolder import read_transport, tail
from ..clusters.notebook import Card, card_html
from ..clusters.report import JOB_HEADER, JobReport, Json, job_cells, job_json
from ..text import table

# -- the jobs of a cluster as Python shows them: a table of JSON objects ---------------------------
Row = dict[str, Json]


class JobTable(list[Row]):
    """A list of jobs, each as `job_json` returns it, with a human-readable table as its repr."""

    def __init__(self, jobs: Sequence[JobReport] = (), transport: str = "") -> None:
        super().__init__(map(job_json, jobs))
        self._cells = [job_cells(job) for job in jobs]
        self.transport = transport
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


# -- how cluster objects display themselves and their jobs -----------------------------------------
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
    def _card(self) -> Card:
        """Return the content for a notebook."""

    def _live_card(self) -> Card:
        """Return the content without a call that may block."""
        return self._card()

    @property
    def jobs(self) -> JobTable:
        """The jobs, active ones first: a list of JSON objects that displays as a table."""
        return JobTable(self._job_reports(), read_transport(self.folder).text())

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
                logs[path.stem] = Log("\n".join(tail(self.folder, path.name, 500)))
        return logs

    # -- in a notebook: dask's widget shows this, too, and calls it again on the event loop --------
    def _repr_html_(self, cluster_status: str | None = None) -> str:
        if self.called_from_running_loop:  # type: ignore[attr-defined]
            return card_html(self._live_card())
        return card_html(self._card())
