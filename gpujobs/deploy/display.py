"""How cluster objects display themselves, and their table of jobs."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distributed.utils import Log
from tornado.ioloop import IOLoop, PeriodicCallback

from ..clusters.folder import tail
from ..clusters.folderstate import read_transport
from ..clusters.notebook import Card, card_html
from ..clusters.report import JobReport, Json, job_json
from ..clusters.rows import JOB_HEADER, job_cells
from ..text import table
from .widget import ClusterWidget, Controls, ipywidgets_module

# -- the jobs of a cluster as Python shows them: a table of JSON objects ---------------------------
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


# -- how cluster objects display themselves and their jobs -----------------------------------------
class JobsDisplay(ABC):
    """The properties that show jobs; a base of all cluster classes."""

    id: str
    loop: IOLoop
    periodic_callbacks: dict[str, PeriodicCallback]
    _live: ClusterWidget | None = None
    """The widget, once it was displayed."""

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

    @abstractmethod
    def _controls(self) -> Controls:
        """Return the actions of the buttons in a notebook."""

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
                logs[path.stem] = Log("\n".join(tail(self.folder, path.name, 500)))
        return logs

    # -- in a notebook -----------------------------------------------------------------------------
    def _repr_html_(self, cluster_status: str | None = None) -> str:
        return card_html(self._card())

    async def _live_card(self) -> Card:
        """Return the content of the live widget; called on the event loop."""
        return self._card()

    def _widget(self) -> Any:
        """Return the live widget, None without ipywidgets; dask's `_ipython_display_` calls it."""
        ipywidgets = ipywidgets_module()
        if self._live is None and ipywidgets is not None:
            live = ClusterWidget(ipywidgets, self.loop, self._live_card, self._controls())
            live.show(self._card())
            self.loop.add_callback(self._keep_live, live)
            self._live = live
        return self._live and self._live.tabs

    def _keep_live(self, live: ClusterWidget) -> None:
        updates = self.periodic_callbacks["cluster-repr"] = live.updates()
        updates.start()

    async def _close(self) -> None:
        await super()._close()  # type: ignore[misc]
        if self._live is not None:
            await self._live.update()
