"""A cluster in a notebook: HTML from its report. It contains no script, and escapes all values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..text import printable
from .connect import dashboard_node
from .report import JOB_HEADER, ONLY_GROUP, ClusterReport, ClusterState, group_rows, job_cells

if TYPE_CHECKING:
    from jinja2 import Environment, Template


# -- the templates of HTML pages. They escape all values: names and reasons are data ---------------
def html_template(name: str) -> Template:
    """Return a template of the package."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from ..config.sitefiles import data_folder

    return Environment(
        loader=FileSystemLoader(data_folder("templates")),
        autoescape=True,
        # Without control characters; Markup, of a template, stays.
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


# -- a cluster in a notebook -----------------------------------------------------------------------
TEMPLATE = "cluster.html.j2"
SHOWN_JOBS = 50
"""Jobs that are listed: the page is sent again after each change."""


@dataclass(frozen=True)
class Card:
    """The content of the page of one cluster."""

    report: ClusterReport
    title: str
    """Name of the class of the object that is shown."""
    status: str = ""
    """Replaces the state of the cluster, as ``closed``."""
    dashboard: str = ""
    """Link to the dashboard; "" if there is none."""
    problem: str = ""
    """Of the whole cluster, that is not the reason of its state."""
    adaptive: Collection[str] = ()
    """Names of the groups that scale adaptively; "" in a cluster without groups."""


def card_html(card: Card) -> str:
    """Return the page."""
    report = card.report
    # Active ones first, then the newest.
    newest = sorted(report.jobs, key=lambda job: (not job.active, -job.number))[:SHOWN_JOBS]
    jobs = sorted(newest, key=lambda job: (not job.active, job.number))
    return html_template(TEMPLATE).render(
        card=card,
        record=report.record,
        state=card.status or report.state.value.lower(),
        tone=_tone(card),
        linked=_is_web_link(card.dashboard),
        node=dashboard_node(report.record, report.folder),
        groups=group_rows(report),
        problems=[card.problem, *report.errors],
        adaptive={name or ONLY_GROUP for name in card.adaptive},
        header=JOB_HEADER,
        rows=[(job.failed, job_cells(job)) for job in jobs],
        hidden=len(report.jobs) - len(jobs),
    )


def _tone(card: Card) -> str:
    """Return the class of the style of the cluster's state."""
    if card.status:
        return "soft"
    tones = {
        ClusterState.PENDING: "wait",
        ClusterState.STARTING: "wait",
        ClusterState.SUSPENDED: "wait",
        ClusterState.RUNNING: "good",
        ClusterState.FAILED: "bad",
    }
    return tones.get(card.report.state, "soft")


def _is_web_link(link: str) -> bool:
    """Return whether a link is a page, and not for example a script."""
    try:
        return urlsplit(link).scheme in ("", "http", "https")
    except ValueError:
        return False
