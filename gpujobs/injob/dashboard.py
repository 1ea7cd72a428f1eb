"""The dashboard of a dask scheduler in a job, which is imported when its first page is opened.

Bokeh takes a third of the time in which a dask scheduler starts, and most dashboards are not looked
at. Preloaded by a dask scheduler that was started with `--no-dashboard`: its HTTP server runs.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from distributed import Scheduler
from distributed.http.utils import get_handlers
from tornado import web

_DASHBOARD = "distributed.dashboard.scheduler"


def dask_setup(scheduler: Scheduler) -> None:
    """Offer the dashboard; dask calls this when the dask scheduler starts."""
    scheduler.http_application.add_application(LateDashboard(scheduler))


class LateDashboard(web.Application):
    """Asked for a page that dask's HTTP server does not have, it adds the dashboard to it."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._loading: asyncio.Future[None] | None = None

    def find_handler(self, request: Any, **kwargs: Any) -> Any:
        """Return a handler for a page; later applications are asked, too."""
        if self._loading is None or not self._loading.done():
            return self.get_handler_delegate(request, EarlyPage, {"dashboard": self})
        return super().find_handler(request, **kwargs)

    async def load(self) -> None:
        """Add the dashboard, once."""
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._load())
        await asyncio.shield(self._loading)

    async def _load(self) -> None:
        scheduler = self._scheduler
        try:
            # In a thread: from a shared file system it may take longer than workers wait.
            dashboard = await asyncio.to_thread(importlib.import_module, _DASHBOARD)
        except ImportError:  # no Bokeh, or another version: a page says what to install
            missing = ["distributed.http.scheduler.missing_bokeh"]
            self.add_handlers(".*", get_handlers(scheduler, missing))
        else:
            dashboard.connect(scheduler.http_application, scheduler.http_server, scheduler)


class EarlyPage(web.RequestHandler):
    """A page that is opened before the dashboard is there: it waits, and is opened again."""

    def initialize(self, dashboard: LateDashboard) -> None:
        """Take over the dashboard; tornado calls this."""
        self._dashboard = dashboard

    async def prepare(self) -> None:
        """Wait for the dashboard; tornado calls this for each method."""
        await self._dashboard.load()
        if self.request.headers.get("Upgrade", "").lower() == "websocket":
            self.set_status(503)  # of a page of an earlier dask scheduler; it does not follow
            self.set_header("Retry-After", "1")
            self.finish()
            return
        # Relative, for proxies with a path of their own; "./", since a page may look like a URL.
        page = self.request.path.rpartition("/")[2]
        query = f"?{self.request.query}" if self.request.query else ""
        self.redirect(f"./{page}{query}")
