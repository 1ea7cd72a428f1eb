"""The client of a site's batch scheduler, for questions that a user waits for."""

from __future__ import annotations

from ..batch.client import SchedulerClient
from ..config.sitefiles import SiteFile
from ..schedulers import get_scheduler

TIMEOUT = 10.0
"""Seconds for which the batch scheduler may fail to answer."""


def site_client(site_file: SiteFile) -> SchedulerClient:
    """Return a client of the batch scheduler of a site."""
    site = site_file.site
    scheduler = get_scheduler(site.scheduler)(site.cluster)
    return SchedulerClient(scheduler, site.commands, timeout=TIMEOUT)
