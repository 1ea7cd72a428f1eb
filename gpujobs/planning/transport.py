"""The protocols that dask's processes use, and whether they are encrypted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..config.profile import Profile
from ..injob.names import LOOPBACK, LOOPBACK_INTERFACE
from ..injob.ports import port_range
from ..schedulers import Scheduler, get_scheduler
from .diagnostics import Diagnostics
from .shape import JobGroup

ENCRYPTED = {"tcp": "tls", "ws": "wss"}
"""Dask's names of protocols without and with TLS. ucxx has no encryption."""
SLOW_MEMORY = {
    "managed": "with `rmm_managed_memory` it is slower than tcp "
    "(four H200, transpose of 12.8 GB: ucxx 8 to 16 s, tcp 1.5 to 3.3 s, "
    "ucxx without managed memory 0.07 s)",
    "async": "with `rmm_async` it is slower than tcp "
    "(blocks of 256 MiB between two H200: ucxx 0.44 GB/s, tcp 1.3 GB/s, "
    "ucxx without `rmm_async` more than 100 GB/s)",
}
"""Why ucxx is a bad choice for GPU memory that RMM allocates in these ways, as measured."""
WITHOUT_GPUS = (
    "nodes without GPUs may not have it; if all nodes do, `network: {protocol: ucxx}` takes it"
)


@dataclass(frozen=True)
class Transport:
    """How dask's processes connect.

    ``protocols`` are candidates, best first, by dask's names: tls, tcp, wss, ws, ucxx. All
    processes of a cluster use the first one that works in the head's job.
    """

    protocols: tuple[str, ...]
    interface: str | None
    """Network interface; None: chosen in the job."""

    @property
    def encrypted(self) -> bool:
        """Whether every candidate is encrypted."""
        return all(is_encrypted(protocol) for protocol in self.protocols)

    @property
    def certificate(self) -> bool:
        """Whether the cluster needs a certificate: one candidate is encrypted."""
        return any(is_encrypted(protocol) for protocol in self.protocols)

    @property
    def loopback(self) -> str:
        """The interface that ucxx is confined to; "" if it is not."""
        confined = "ucxx" in self.protocols and self.interface == LOOPBACK_INTERFACE
        return LOOPBACK_INTERFACE if confined else ""

    def interface_option(self) -> list[str]:
        """Return the option of dask's commands that names the interface, as bash, or nothing."""
        if not self.interface:
            return []
        return [f"--interface={shlex.quote(self.interface)}"]

    def listen_options(self, scheduler: Scheduler) -> list[str]:
        """Return the options that choose the address a process listens at, as bash."""
        if not self.interface and scheduler.on_this_machine:
            return [f"--host={LOOPBACK}"]
        return self.interface_option()


def is_encrypted(protocol: str) -> bool:
    """Return whether the protocol with dask's name ``protocol`` is encrypted."""
    return protocol in ENCRYPTED.values()


def choose_transport(diagnostics: Diagnostics, groups: Sequence[Profile]) -> Transport:
    """Return the transport for the profile's `network` at the site.

    ``groups``: the profiles of all groups of workers.
    """
    network = diagnostics.spec.profile.network
    site_network = diagnostics.spec.site.site.network
    if site_network.encryption == "required":
        _check_encryption(diagnostics)
    protocols = _candidates(diagnostics, groups)
    if network.encryption is not False:
        protocols = [ENCRYPTED.get(name, name) for name in protocols]
    if unencrypted := [name for name in protocols if not is_encrypted(name)]:
        names = " or ".join(unencrypted)
        diagnostics.note(f"not encrypted: traffic between dask's processes over {names}")
    if "ws" in protocols:  # with wss, a client must present the cluster's certificate
        diagnostics.note("ws accepts connections on all interfaces: dask ignores the address")
    if network.dashboard == "on":
        diagnostics.note(
            "warning: network.dashboard is on: the dashboard accepts connections on all interfaces "
            "of its node, without a password and without encryption"
        )
    interface = network.interface or site_network.interface
    if interface is None and "ucxx" in protocols and _on_this_machine(diagnostics):
        interface = LOOPBACK_INTERFACE  # UCX takes interfaces, not addresses
    return Transport(tuple(protocols), interface)


def _check_encryption(diagnostics: Diagnostics) -> None:
    """Report what is not encrypted in the profile of a site that requires encryption."""
    spec = diagnostics.spec
    network, contact = spec.profile.network, spec.site.site.contact
    unencrypted = {
        "protocol": network.protocol == "ucxx" and "ucxx is not encrypted",
        "encryption": network.encryption is False and "`encryption: false` is not possible",
        "dashboard": network.dashboard == "on" and "the dashboard is not encrypted",
    }
    for key, message in unencrypted.items():
        if message:
            diagnostics.profile_error(
                f"{message}: site {spec.site.name} requires encryption between its nodes",
                "network",
                key,
                hint=f"the contact of the site is {contact}" if contact else "",
                related=spec.site_position("network", "encryption"),
            )
    diagnostics.raise_problems()


def _on_this_machine(diagnostics: Diagnostics) -> bool:
    return get_scheduler(diagnostics.spec.site.site.scheduler).on_this_machine


def _candidates(diagnostics: Diagnostics, groups: Sequence[Profile]) -> list[str]:
    """Return the protocols by the names of profiles.

    A site that lists ucxx consents to unencrypted traffic within jobs.
    """
    profile = diagnostics.spec.profile
    allowed = diagnostics.spec.site.site.network.protocols
    if profile.network.protocol != "auto":
        _check_ucxx(diagnostics, groups)
        return [profile.network.protocol]
    # ucxx is there to move data between GPUs, and it cannot be encrypted.
    useful = any(group.gpus for group in groups) and not profile.network.encryption
    if useful and "ucxx" in allowed and (reason := _reason_against_ucxx(groups)):
        diagnostics.note(f"ucxx is not used: {reason}")
        useful = False
    if useful:
        return list(allowed)
    return [name for name in allowed if name != "ucxx"] or ["tcp"]


def _reason_against_ucxx(groups: Sequence[Profile]) -> str:
    if slow := _slow_memory(groups):
        return slow
    if not all(group.gpus for group in groups):
        return WITHOUT_GPUS
    return ""


def _slow_memory(groups: Sequence[Profile]) -> str:
    found = (SLOW_MEMORY.get(group.workers.gpu_memory, "") for group in groups)
    return next(filter(None, found), "")


def _check_ucxx(diagnostics: Diagnostics, groups: Sequence[Profile]) -> None:
    spec = diagnostics.spec
    network = spec.profile.network
    if network.protocol != "ucxx":
        return
    site_network = spec.site.site.network
    # Traffic that stays on this machine needs no consent of the site, unless it lists protocols.
    listed = "protocols" in site_network.given or not _on_this_machine(diagnostics)
    if listed and "ucxx" not in site_network.protocols:
        diagnostics.profile_error(
            "ucxx is not encrypted, and the site does not list it in `network.protocols`",
            "network",
            "protocol",
            related=spec.site_position("network"),
        )
    if slow := _slow_memory(groups):
        diagnostics.note(f"warning: network.protocol is ucxx: {slow}")
    if network.encryption:
        message, hint = "ucxx cannot be encrypted", "protocol: tcp"
        diagnostics.profile_error(message, "network", "encryption", hint=hint)


def check_ports(diagnostics: Diagnostics, groups: Sequence[JobGroup]) -> None:
    """Check that the site's range has ports for the workers of one job and the dask scheduler."""
    ports = diagnostics.spec.site.site.network.ports
    if ports is None or not groups:
        return
    workers = max(group.shape.workers // group.shape.nodes for group in groups)
    dashboard = diagnostics.spec.profile.network.dashboard == "on"
    wanted, there = 2 * workers + 1 + dashboard, len(port_range(ports))
    if there < wanted:
        message = f"{workers} workers on a node and the dask scheduler need {wanted} ports"
        diagnostics.site_error(f"{message}, but `network.ports` has {there}", "network", "ports")
