"""The checks of `gpujobs doctor` that need no job: they run on this host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ..batch.client import SchedulerClient
from ..batch.process import is_available
from ..clusters.files import private_folder
from ..clusters.runnotes import site_notes
from ..clusters.siteclient import site_client
from ..config.sitefiles import SiteFile
from ..errors import GpujobsError
from ..planning.directory import expand_directory
from ..schedulers.commandnames import needed_commands
from . import jobcheck
from .checks import Check, failed, passed, warning


def check_host(site_file: SiteFile) -> Iterator[Check]:
    """Check commands, batch scheduler, shared folder, network interface and versions."""
    site = site_file.site
    yield passed("site", f"{site_file.name} ({site.scheduler}): {site_file.path}")
    for note in site_notes(site):
        yield warning("cluster", note, "`gpujobs sites init` writes a site file for this one")
    yield from _check_commands(site_client(site_file))
    yield _check_directory(site.directory)
    yield _check_interface(site.network.interface)
    versions = jobcheck.versions()
    yield passed("versions", ", ".join(f"{name} {number}" for name, number in versions.items()))
    if "ucxx" in site.network.protocols:
        yield _check_ucxx()


def _check_commands(client: SchedulerClient) -> Iterator[Check]:
    names = sorted(needed_commands(client.scheduler))
    missing = [name for name in names if not is_available(client.commands.get(name, name))]
    if missing:
        remedy = (
            "is this a login node? Else write the paths of the commands in the site file: "
            f"commands: {{{missing[0]}: /path}}"
        )
        yield failed("commands", f"not found: {', '.join(missing)}", remedy)
        return
    yield passed("commands", ", ".join(sorted(Path(name).name for name in names)))
    yield _check_scheduler(client)


def _check_scheduler(client: SchedulerClient) -> Check:
    try:
        client.find("gpujobs-doctor")
    except GpujobsError as error:
        message = str(error).splitlines()[0]
        return failed("batch scheduler", message, error.hint or "try again when it answers")
    return passed("batch scheduler", f"{client.scheduler.name} answers")


def _check_directory(template: str) -> Check:
    try:
        path = Path(expand_directory(template))
        private_folder(path)
        probe = path / f".doctor-{os.getpid()}"
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except (GpujobsError, OSError) as error:
        remedy = "set `directory` of the site file to a folder that login and compute nodes share"
        return failed("directory", str(error).splitlines()[0], remedy)
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
