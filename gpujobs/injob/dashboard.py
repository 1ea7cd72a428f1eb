"""The dashboard of a dask scheduler in a job, which is imported when its first page is opened.

Bokeh takes a third of the time in which a dask scheduler starts, and most dashboards are not looked
at. Preloaded by a dask scheduler that was started with `--no-dashboard`: its HTTP server runs.
"""

from __future__ import annotations

from typing import Any

from distributed import Scheduler
from distributed.http.utils import get_handlers
from tornado import web


def dask_setup(scheduler: Scheduler) -> None:
    """Offer the dashboard; dask calls this when the dask scheduler starts."""
    scheduler.http_application.add_application(LateDashboard(scheduler))


class LateDashboard(web.Application):
    """Asked for a page that dask's HTTP server does not have, it adds the dashboard to it."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler: Scheduler | None = scheduler

    def find_handler(self, request: Any, **kwargs: Any) -> Any:
        """Return a handler for a page; later applications are asked, too."""
        if self._scheduler is not None:
            scheduler, self._scheduler = self._scheduler, None
            self._connect(scheduler)
        return super().find_handler(request, **kwargs)

    def _connect(self, scheduler: Scheduler) -> None:
        try:
            from distributed.dashboard.scheduler import connect
        except ImportError:  # no Bokeh, or another version: a page says what to install
            missing = ["distributed.http.scheduler.missing_bokeh"]
            self.add_handlers(".*", get_handlers(scheduler, missing))
        else:
            connect(scheduler.http_application, scheduler.http_server, scheduler)
