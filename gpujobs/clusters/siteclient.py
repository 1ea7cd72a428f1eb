"""The client of a site's batch scheduler, for questions that a user waits for."""

from __future__ import annotations

from collections.abc import Sequence

from ..batch.client import SchedulerClient
from ..config.sitefiles import SiteFile
from ..errors import UnavailableError
from ..schedulers import get_scheduler
from ..schedulers.inventory import Ask, Inventory

TIMEOUT = 10.0
"""Seconds for which the batch scheduler may fail to answer."""


def site_client(site_file: SiteFile) -> SchedulerClient:
    """Return a client of the batch scheduler of a site."""
    site = site_file.site
    scheduler = get_scheduler(site.scheduler)(site.cluster)
    return SchedulerClient(scheduler, site.commands, timeout=TIMEOUT)


def ask_with(client: SchedulerClient, inventory: Inventory) -> Ask:
    """Return the function with which an inventory runs commands.

    It raises UnavailableError if the command that reports the nodes fails; the output of others is
    "" then.
    """
    needed = inventory.nodes_command()

    def ask(argv: Sequence[str]) -> str:
        try:
            result = client.query(argv)
        except UnavailableError:
            if list(argv) == needed:
                raise
            return ""
        if result.exit_code != 0 and list(argv) == needed:
            raise UnavailableError(f"{argv[0]} failed: {result.message}")
        return result.stdout if result.exit_code == 0 else ""

    return ask
