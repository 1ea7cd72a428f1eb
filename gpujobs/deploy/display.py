"""How cluster objects display themselves: their table of jobs, the widget in a notebook."""

from __future__ import annotations

import html
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
from dask.utils import parse_timedelta
from distributed.utils import Log
from tornado.ioloop import IOLoop, PeriodicCallback

from ..clusters.folder import read_transport, tail
from ..clusters.notebook import Card, card_html
from ..clusters.report import JOB_HEADER, JobReport, Json, job_cells, job_json
from ..text import table

if TYPE_CHECKING:
    from types import ModuleType

    from ipywidgets import Box, Tab


# -- the live widget, drawn by ipywidgets ----------------------------------------------------------
logger = logging.getLogger("gpujobs")

Result = Awaitable[object] | object
"""Of a button's action, which may have to be awaited."""
Action = Callable[..., Result]
"""Called with a group and the numbers that were entered."""


@dataclass(frozen=True)
class Controls:
    """The actions of the buttons. They are called on the cluster's event loop."""

    groups: Mapping[str, int] = field(default_factory=dict)
    """The groups that can be scaled, with their numbers of workers. "": there are no groups."""
    scale: Action | None = None
    """Scales a group to a number of workers."""
    adapt: Action | None = None
    """Scales a group adaptively, between two numbers of workers."""


class ClusterWidget:
    """Tabs with the state of a cluster, its jobs, and buttons that scale it."""

    def __init__(
        self,
        ipywidgets: ModuleType,
        loop: IOLoop,
        card: Callable[[], Awaitable[Card]],
        controls: Controls,
    ) -> None:
        """``card`` returns the present content; it is called on ``loop``."""
        self._kit = ipywidgets
        self._loop = loop
        self._card = card
        self._controls = controls
        self._overview, self._jobs, self._message = (ipywidgets.HTML() for _ in range(3))
        scaling = ipywidgets.VBox([self._buttons(), self._message])
        self.tabs: Tab = ipywidgets.Tab([self._overview, scaling, self._jobs])
        for index, title in enumerate(("Status", "Scaling", "Jobs")):
            self.tabs.set_title(index, title)

    def show(self, card: Card) -> None:
        """Show the state of the cluster. The browser is sent only the parts that have changed."""
        self._overview.value = card_html(card, "overview")
        self._jobs.value = card_html(card, "jobs")

    async def update(self) -> None:
        """Show the present state of the cluster."""
        try:
            self.show(await self._card())
        except Exception:  # else it is repeated twice per second
            logger.debug("the widget of a cluster was not updated", exc_info=True)

    def updates(self) -> PeriodicCallback:
        """Return the callback that updates the widget, as often as dask's."""
        name = "distributed.deploy.cluster-repr-interval"
        seconds = parse_timedelta(dask.config.get(name), default="ms")
        return PeriodicCallback(self.update, seconds * 1000)

    # -- buttons -----------------------------------------------------------------------------------
    def _buttons(self) -> Box:
        controls, sections = self._controls, {}
        for title, action, row in (
            ("Manual Scaling", controls.scale, self._scale_row),
            ("Adaptive Scaling", controls.adapt, self._adapt_row),
        ):
            if action is not None:
                rows = [row(action, group, n) for group, n in controls.groups.items()]
                sections[title] = self._kit.VBox(rows)
        if not sections:
            return self._kit.Label("This process cannot scale the cluster.")
        accordion = self._kit.Accordion(list(sections.values()), selected_index=0)
        for index, title in enumerate(sections):
            accordion.set_title(index, title)
        return accordion

    def _scale_row(self, scale: Action, group: str, workers: int) -> Box:
        number = self._number("Workers", workers)
        button = self._button("Scale", lambda: scale(group, number.value))
        return self._row(group, [number, button])

    def _adapt_row(self, adapt: Action, group: str, most: int) -> Box:
        minimum, maximum = self._number("Minimum", 0), self._number("Maximum", most)
        button = self._button("Adapt", lambda: adapt(group, minimum.value, maximum.value))
        return self._row(group, [minimum, maximum, button])

    def _row(self, group: str, children: Sequence[Box]) -> Box:
        shown = list(children)
        if group:
            shown.insert(0, self._kit.Label(group, layout={"width": "8rem"}))
        return self._kit.HBox(shown, layout={"flex_flow": "row wrap"})

    def _number(self, name: str, value: int) -> Box:
        layout = {"width": "10rem"}
        return self._kit.BoundedIntText(value, 0, 10**6, description=name, layout=layout)

    def _button(self, name: str, action: Callable[[], Result]) -> Box:
        button = self._kit.Button(description=name, layout={"width": "8rem"})
        button.on_click(lambda _: self._loop.add_callback(self._run, action))
        return button

    async def _run(self, action: Callable[[], Result]) -> None:
        """Call an action, and show why it failed."""
        self._message.value = ""
        try:
            result = action()
            if isawaitable(result):
                await result
        except Exception as error:
            self._message.value = f"<p style='line-height: 1.4'>{html.escape(str(error))}</p>"
        await self.update()


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

    # -- in a notebook -----------------------------------------------------------------------------
    def _repr_html_(self, cluster_status: str | None = None) -> str:
        return card_html(self._card())

    async def _live_card(self) -> Card:
        """Return the content of the live widget; called on the event loop."""
        return self._card()

    def _widget(self) -> Any:
        """Return the live widget, None without ipywidgets; dask's `_ipython_display_` calls it."""
        try:
            import ipywidgets
        except ImportError:
            return None
        if self._live is None:
            live = ClusterWidget(ipywidgets, self.loop, self._live_card, self._controls())
            live.show(self._card())
            self.loop.add_callback(self._keep_live, live)
            self._live = live
        return self._live.tabs

    def _keep_live(self, live: ClusterWidget) -> None:
        updates = self.periodic_callbacks["cluster-repr"] = live.updates()
        updates.start()

    async def _close(self) -> None:
        await super()._close()  # type: ignore[misc]
        if self._live is not None:
            await self._live.update()
