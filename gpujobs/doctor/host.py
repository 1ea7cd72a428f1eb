"""The checks of `gpujobs doctor` on this host."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..batch.client import SchedulerClient
from ..batch.process import is_available
from ..clusters.clusterfolder import private_folder
from ..clusters.freequeues import read_with, site_client
from ..clusters.plannotes import site_notes
from ..clusters.space import space_problems
from ..config.sitefiles import SiteFile, selects_this_host
from ..errors import GpujobsError
from ..planning.bash import expand_directory
from ..schedulers.base import needed_commands
from . import jobcheck
from .checks import Check, failed, passed, warning


def check_host(site_file: SiteFile) -> Iterator[Check]:
    """Check commands, batch scheduler, shared folder, network interface and versions."""
    site = site_file.site
    yield passed("site", f"{site_file.name} ({site.scheduler}): {site_file.path}")
    client = site_client(site_file)
    for note in list(site_notes(site)) or _notes_of_host(site_file):
        yield warning("cluster", note, DRAFT)
    yield from _check_commands(client, site_file.name)
    yield from _check_queues(site_file, client)
    yield _check_directory(site.directory, site.quota_command)
    yield _check_interface(site.network.interface)
    versions = jobcheck.versions()
    yield passed("versions", ", ".join(f"{name} {number}" for name, number in versions.items()))
    if "ucxx" in site.network.protocols:
        yield _check_ucxx()


DRAFT = "`gpujobs sites init -o NAME.yaml` drafts a site file for this one"


def _notes_of_host(site_file: SiteFile) -> Iterator[str]:
    """Yield that the site file has names of hosts, and this one is none of them."""
    if selects_this_host(site_file.document.value) is False:
        yield f"this host, {socket.gethostname()}, is none that {site_file.name} names"


def _check_queues(site_file: SiteFile, client: SchedulerClient) -> Iterator[Check]:
    """Yield that the batch scheduler of this host has none of the site's queues."""
    kind, site = client.scheduler.inventory, site_file.site
    if kind is None or not site.queues:
        return
    inventory = kind(client.scheduler.cluster)
    try:
        there = {node.queue for node in read_with(client, inventory, inventory.nodes)}
    except GpujobsError:  # `_check_scheduler` says why
        return
    names = set(map(site.queue_name, site.queues))
    if there and "" not in there and not names & there:
        message = f"this is not {site_file.name}: {client.scheduler.name} has none of its queues"
        yield warning("queues", f"{message} ({', '.join(sorted(names))})", DRAFT)


def _check_commands(client: SchedulerClient, site: str) -> Iterator[Check]:
    names = sorted(needed_commands(client.scheduler))
    missing = [name for name in names if not is_available(client.commands.get(name, name))]
    if missing:
        remedy = (
            f"is this a login node of {site}? If it is, write the paths of the commands in the "
            f"site file: commands: {{{missing[0]}: /path}}"
        )
        yield failed("commands", f"not found: {', '.join(missing)}", remedy)
        return
    yield passed("commands", ", ".join(sorted(Path(name).name for name in names)))
    yield _check_scheduler(client, site)


def _check_scheduler(client: SchedulerClient, site: str) -> Check:
    try:
        client.find("gpujobs-doctor")
    except GpujobsError as error:
        name, problem = client.scheduler.name, str(error).splitlines()[0]
        message = f"{name} does not answer on this host: {problem}"
        cure = error.hint or "try again when it answers"
        remedy = f"is this a login node of {site}? If it is, {cure}"
        return failed("batch scheduler", message, remedy)
    return passed("batch scheduler", f"{client.scheduler.name} answers")


def _check_directory(template: str, quota_command: Sequence[str] = ()) -> Check:
    try:
        path = Path(expand_directory(template))
        private_folder(path)
        probe = path / f".doctor-{os.getpid()}"
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except (GpujobsError, OSError) as error:
        remedy = "set `directory` of the site file to a folder that login and compute nodes share"
        return failed("directory", str(error).splitlines()[0], remedy)
    if problems := list(space_problems(path, quota_command)):
        return warning("directory", "; ".join(problems), "remove files, or ask for a larger quota")
    return passed("directory", f"{path} is writable from this host")


def _check_interface(name: str | None) -> Check:
    interfaces = jobcheck.interfaces()
    if name is None:
        return passed("interface", f"none configured; this host has {', '.join(interfaces)}")
    if name in interfaces:
        return passed("interface", f"{name} is on this host")
    result = f"{name} is not on this host, which has {', '.join(interfaces)}"
    return warning("interface", result, 'clusters from Python need scheduler="job" on this host')


def _check_ucxx() -> Check:
    if find_spec("distributed_ucxx"):
        return passed("ucxx", "distributed-ucxx is installed")
    result = "the site lists ucxx, but distributed-ucxx is not installed here"
    remedy = (
        "pip install distributed-ucxx-cu12 (or -cu13) in the environment of the jobs; "
        "without it dask uses tcp"
    )
    return warning("ucxx", result, remedy)
