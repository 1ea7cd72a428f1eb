"""Compares a site file with the batch scheduler of this host, for `gpujobs sites check --live`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..batch.client import SchedulerClient
from ..batch.process import is_available
from ..batch.users import user_name
from ..clusters.siteclient import TIMEOUT, ask_with, site_client
from ..config.document import Document
from ..config.sitefiles import SiteFile
from ..errors import InputError, Problem, UnavailableError
from ..planning.sitecheck import NO_SETTINGS, Finding, findings, try_site
from ..schedulers import Scheduler, get_scheduler, scheduler_names
from ..schedulers.inventory import Survey
from ..text import plural
from .checks import Check, passed, warning
from .comparison import Comparison

OTHER_SCHEDULER = "is this a login node? --scheduler NAME names the one to ask"


def take_survey(client: SchedulerClient) -> Survey | None:
    """Return the queues and nodes of the batch scheduler; None if gpujobs cannot ask for them.

    Raises UnavailableError if the first command fails; the answers of others may be missing.
    """
    kind = client.scheduler.inventory
    if kind is None:
        return None
    inventory = kind(client.scheduler.cluster)
    return inventory.survey(ask_with(client, inventory), user_name())


def find_survey(name: str | None) -> tuple[SchedulerClient, Survey]:
    """Return the batch scheduler of this host, and its queues and nodes.

    ``name``: the value of `scheduler`; None: the first one that answers. Raises InputError if there
    is none.
    """
    reasons = []
    for client in _clients(name):
        try:
            survey = take_survey(client)
        except UnavailableError as error:
            reasons.append(f"{client.scheduler.name}: {error}")
            continue
        if survey and survey.nodes:
            return client, survey
        reasons.append(f"{client.scheduler.name} reports no nodes")
    if reasons:
        raise UnavailableError("\n".join(reasons), hint=OTHER_SCHEDULER)
    message = "no command of a batch scheduler was found on this host"
    raise InputError(message, hint=OTHER_SCHEDULER)


def _clients(name: str | None) -> list[SchedulerClient]:
    """Return the batch scheduler ``name``, or those whose commands are on this host."""
    kinds = [get_scheduler(known) for known in ([name] if name else scheduler_names())]
    return [SchedulerClient(kind(), timeout=TIMEOUT) for kind in kinds if name or _is_here(kind)]


def _is_here(kind: type[Scheduler]) -> bool:
    return kind.inventory is not None and is_available(kind.inventory.own_command)


def live_findings(
    site_file: SiteFile, settings: Document = NO_SETTINGS
) -> tuple[list[Finding], list[Check]]:
    """Return the differences between the file and the batch scheduler, and what was compared.

    ``settings``: keys of the profiles whose scripts the batch scheduler tests.

    Raises UnavailableError if the batch scheduler does not answer.
    """
    client = site_client(site_file)
    survey, name = take_survey(client), client.scheduler.name
    if survey is None:
        checks = [warning("live", f"{name}: gpujobs cannot ask for its queues")]
        found = []
    else:
        nodes = len({node.name for node in survey.nodes})
        number = f"{plural(len(survey.queues), 'queue')}, {plural(nodes, 'node')}"
        checks = [passed("live", f"{name} reports {number}")]
        if not any(node.gpus for node in survey.nodes):
            checks.append(warning("GPUs", f"not compared: {name} reports none"))
        comparison = Comparison(site_file, survey)
        found = [Finding(problem) for problem in comparison.problems()]
        checks += [*comparison.account_warnings(), *comparison.preemption_warnings()]
    refused, check = _test_scripts(client, site_file, settings)
    return [*found, *refused], [*checks, check]


def _test_scripts(
    client: SchedulerClient, site_file: SiteFile, settings: Document
) -> tuple[list[Finding], Check]:
    """Let the batch scheduler test each script, without submitting it."""
    argv = client.scheduler.estimate_command()
    if argv is None:
        return [], warning("scripts", f"not tested: {client.scheduler.name} has no such command")
    command, refused, tested = " ".join(argv), [], 0
    for result in try_site(site_file, settings, any_account=False):
        tested += len(result.scripts)
        messages = (client.refusal(script.text, Path.cwd()) for script in result.scripts)
        if message := next(filter(None, messages), None):
            position = site_file.document.key_position(result.trial.place)
            problem = Problem(f"{command} refuses the script: {message}", position)
            refused.append(replace(result, problems=(problem,)))
    if not tested:
        remedy = "if the site requires an account: --set account=…"
        return [], warning("scripts", "not tested: no profile can be planned", remedy)
    return findings(refused), passed("scripts", f"{plural(tested, 'script')}: {command}")
