"""The live widget of a cluster in a notebook, drawn by ipywidgets."""

from __future__ import annotations

import html
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import TYPE_CHECKING

import dask
from dask.utils import parse_timedelta
from tornado.ioloop import IOLoop, PeriodicCallback

from ..clusters.notebook import Card, Part, card_html

if TYPE_CHECKING:
    from types import ModuleType

    from ipywidgets import Box, Tab

logger = logging.getLogger("gpujobs")

Result = Awaitable[object] | object
"""Of a button's action, which may have to be awaited."""


@dataclass(frozen=True)
class Controls:
    """The actions of the buttons. They are called on the cluster's event loop."""

    groups: Mapping[str, int] = field(default_factory=dict)
    """The groups that can be scaled, with their numbers of workers. "": there are no groups."""
    scale: Callable[[str, int], Result] | None = None
    """Scales a group to a number of workers."""
    adapt: Callable[[str, int, int], Result] | None = None
    """Scales a group adaptively, between two numbers of workers."""


def ipywidgets_module() -> ModuleType | None:
    """Return ipywidgets; None if it is not installed."""
    try:
        import ipywidgets
    except ImportError:
        return None
    module: ModuleType = ipywidgets
    return module


class ClusterWidget:
    """Tabs with the state of a cluster, its jobs, and buttons that scale it.

    ``tabs`` is displayed by the notebook.
    """

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
        self._overview.value = card_html(card, Part.OVERVIEW)
        self._jobs.value = card_html(card, Part.JOBS)

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
        controls = self._controls
        sections = {}
        if controls.scale is not None:
            scale = controls.scale
            rows = [self._scale_row(scale, group, n) for group, n in controls.groups.items()]
            sections["Manual Scaling"] = self._kit.VBox(rows)
        if controls.adapt is not None:
            adapt = controls.adapt
            rows = [self._adapt_row(adapt, group, n) for group, n in controls.groups.items()]
            sections["Adaptive Scaling"] = self._kit.VBox(rows)
        if not sections:
            return self._kit.Label("This process cannot scale the cluster.")
        accordion = self._kit.Accordion(list(sections.values()), selected_index=0)
        for index, title in enumerate(sections):
            accordion.set_title(index, title)
        return accordion

    def _scale_row(self, scale: Callable[[str, int], Result], group: str, workers: int) -> Box:
        number = self._number("Workers", workers)
        button = self._button("Scale", lambda: scale(group, number.value))
        return self._row(group, [number, button])

    def _adapt_row(self, adapt: Callable[[str, int, int], Result], group: str, most: int) -> Box:
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
