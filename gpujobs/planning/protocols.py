"""The protocols of dask's processes: which are allowed, encrypted, slow with some GPU memory."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..config.profile import Profile, Workers
from ..config.site import Site
from ..config.sitekinds import Protocol
from ..config.sitequeue import SiteNetwork
from ..config.spec import group_specs
from ..errors import Position, Problem
from ..injob.names import LOOPBACK, LOOPBACK_INTERFACE, is_encrypted
from ..injob.network import on_loopback, port_range
from ..text import plural
from .bash import Diagnostics
from .shape import JobGroup

# -- GPU memory with which ucxx is slower than tcp -------------------------------------------------
SLOW_MEMORY = {
    "managed": "with `rmm_managed_memory` it is slower than tcp "
    "(four H200, transpose of 12.8 GB: ucxx 8 to 16 s, tcp 1.5 to 3.3 s, "
    "ucxx without managed memory 0.07 s)",
    "async": "with `rmm_async` it is slower than tcp "
    "(blocks of 256 MiB between two H200: ucxx 0.44 GB/s, tcp 1.3 GB/s, "
    "ucxx without `rmm_async` more than 100 GB/s)",
}
"""Why ucxx is a bad choice for GPU memory that RMM allocates in these ways, as measured."""
_NOT_MEASURED = {
    "managed": ("rmm_maximum_pool_size", "rmm_track_allocations"),
    "async": ("rmm_pool_size", "rmm_maximum_pool_size", "rmm_track_allocations"),
}
"""Options of workers that were not measured together with those ways."""


def slow_memory(groups: Sequence[Profile]) -> str:
    """Return why ucxx is slow for one of the groups, or ""."""
    return next(filter(None, (_slow_memory_of(group.workers) for group in groups)), "")


def _slow_memory_of(workers: Workers) -> str:
    text = SLOW_MEMORY.get(workers.gpu_memory, "")
    names = _NOT_MEASURED.get(workers.gpu_memory, ())
    others = [f"`{name}`" for name in names if getattr(workers, name)]
    if not others:
        return text
    return f"{text}; not measured together with {', '.join(others)}"


# -- the protocols that dask's processes use, and whether they are encrypted -----------------------
ENCRYPTED = {"tcp": "tls", "ws": "wss"}
"""Dask's names of protocols without and with TLS. ucxx has no encryption."""
_WEBSOCKETS = ("ws", "wss")
Networks = Mapping[str, SiteNetwork]
"""By the key of the queue."""
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
    encryption_required: Position | None = None
    """Where the site requires it, or one of the queues."""

    @property
    def encrypted(self) -> bool:
        """Whether every candidate is encrypted."""
        return all(is_encrypted(protocol) for protocol in self.protocols)

    @property
    def certificate(self) -> bool:
        """Whether the cluster needs a certificate: one candidate is encrypted."""
        return any(is_encrypted(protocol) for protocol in self.protocols)

    @property
    def ignores_address(self) -> bool:
        """Whether one candidate listens on all interfaces, whatever its address is."""
        return any(name in ("ucxx", *_WEBSOCKETS) for name in self.protocols)

    @property
    def loopback(self) -> str:
        """The interface that ucxx and ws are confined to; "" if they are not."""
        confined = self.interface == LOOPBACK_INTERFACE and self.ignores_address
        return LOOPBACK_INTERFACE if confined else ""

    def interface_option(self) -> list[str]:
        """Return the option of dask's commands that names the interface, as bash, or nothing."""
        if not self.interface:
            return []
        return [f"--interface={shlex.quote(self.interface)}"]

    def listen_options(self, site: Site) -> list[str]:
        """Return the options that choose the address a process listens at, as bash."""
        if not self.interface and site.one_machine:
            return [f"--host={LOOPBACK}"]
        return self.interface_option()


def choose_transport(
    diagnostics: Diagnostics, groups: Sequence[JobGroup], head: JobGroup | None
) -> Transport:
    """Return the transport for the profile's `network` at the site.

    The queues of all groups of workers and of the head's own job must have a protocol in common.
    """
    network = diagnostics.spec.profile.network
    networks = {jobs.queue_key: jobs.site.network for jobs in (*groups, head) if jobs}
    required = _requiring_encryption(diagnostics, networks)
    if required:
        _check_encryption(diagnostics, required)
    protocols = _candidates(diagnostics, [group.profile for group in groups], networks)
    if network.encryption is not False:
        protocols = [ENCRYPTED.get(name, name) for name in protocols]
    if unencrypted := [name for name in protocols if not is_encrypted(name)]:
        names = " or ".join(unencrypted)
        diagnostics.note(f"not encrypted: traffic between dask's processes over {names}")
    if network.dashboard == "on":
        diagnostics.note(
            "warning: network.dashboard is on: the dashboard accepts connections on all interfaces "
            "of its node, without a password and without encryption"
        )
    interface = network.interface or _interface(diagnostics, networks)
    transport = Transport(tuple(protocols), interface, encryption_required=required)
    by_name = transport.ignores_address or diagnostics.spec.profile.run_on == "ranks"
    if interface is None and by_name and diagnostics.spec.site.site.one_machine:
        # UCX and dask-mpi take interfaces, not addresses
        transport = replace(transport, interface=LOOPBACK_INTERFACE)
    if "ws" in protocols and not transport.loopback:
        # with wss, a client must present the cluster's certificate
        diagnostics.note("ws accepts connections on all interfaces: dask ignores the address")
    return transport


def _interface(diagnostics: Diagnostics, networks: Networks) -> str | None:
    """Return the interface that all queues have in common, else the one of the site."""
    names = {network.interface for network in networks.values()}
    if len(names) == 1:
        return names.pop()
    return diagnostics.spec.site.site.network.interface


def _requiring_encryption(diagnostics: Diagnostics, networks: Networks) -> Position | None:
    """Return where encryption is required: by the site, or by the first queue that does."""
    for key, network in networks.items():
        if network.encryption == "required":
            return _network_position(diagnostics, key, "encryption")
    return None


def _network_position(diagnostics: Diagnostics, queue: str, name: str) -> Position:
    """Return the position of the key ``name`` of `network` that applies in a queue."""
    return diagnostics.spec.in_queue(queue).site_position("network", name)


def _check_encryption(diagnostics: Diagnostics, required: Position) -> None:
    """Report what is not encrypted in the profile although the site requires encryption."""
    spec = diagnostics.spec
    network = spec.profile.network
    unencrypted = {
        "protocol": network.protocol == "ucxx" and "ucxx is not encrypted",
        "encryption": network.encryption is False and "`encryption: false` is not possible",
        "dashboard": network.dashboard == "on" and "the dashboard is not encrypted",
    }
    for key, message in unencrypted.items():
        if message:
            diagnostics.profile_error(
                f"{message}: {encryption_rule(spec.site.name)}",
                "network",
                key,
                hint=contact_text(spec.site.site),
                related=required,
            )
    _check_workers(diagnostics, required)
    diagnostics.raise_problems()


def encryption_rule(site: str) -> str:
    """Return the end of messages on what is not encrypted."""
    return f"site {site} requires encryption between its nodes"


def contact_text(site: Site) -> str:
    """Return whom to ask about a rule of the site, "" if it does not say."""
    return f"the contact of the site is {site.contact}" if site.contact else ""


def _check_workers(diagnostics: Diagnostics, required: Position) -> None:
    """Report HTTP servers of workers that accept connections from other nodes."""
    for name, spec in group_specs(diagnostics.spec).items():
        options = spec.profile.workers.options
        if "dashboard_address" in options and not on_loopback(options["dashboard_address"]):
            diagnostics.of_group(name, spec).profile_error(
                f"the HTTP server of a worker is not encrypted: {encryption_rule(spec.site.name)}",
                *("workers", "options", "dashboard_address"),
                hint="leave it out: it listens on the loopback interface of its node",
                related=required,
            )


def _allowed(diagnostics: Diagnostics, networks: Networks) -> tuple[Protocol, ...]:
    """Return the protocols that all queues allow, in the order of the first one."""
    first, *others = [network.protocols for network in networks.values()]
    allowed = set(first).intersection(*others)
    common = tuple(name for name in first if name in allowed)
    if not common:
        listed = "; ".join(f"{key}: {', '.join(one.protocols)}" for key, one in networks.items())
        message = f"the queues of the cluster allow no common protocol ({listed})"
        diagnostics.profile_error(message, "network", "protocol")
        diagnostics.raise_problems()
    return common


def _candidates(
    diagnostics: Diagnostics, groups: Sequence[Profile], networks: Networks
) -> list[str]:
    """Return the profile's protocols; a site that lists ucxx consents to unencrypted traffic."""
    profile = diagnostics.spec.profile
    if profile.network.protocol != "auto":
        _check_ucxx(diagnostics, groups, networks)
        return [profile.network.protocol]
    allowed = _allowed(diagnostics, networks)
    # ucxx is there to move data between GPUs, and it cannot be encrypted.
    useful = any(group.gpus for group in groups) and not profile.network.encryption
    if useful and "ucxx" in allowed:
        reason = _reason_against_ucxx(groups)
        if reason:
            diagnostics.note(f"ucxx is not used: {reason}")
            useful = False
    if useful:
        return list(allowed)
    return [name for name in allowed if name != "ucxx"] or ["tcp"]


def _reason_against_ucxx(groups: Sequence[Profile]) -> str:
    if slow := slow_memory(groups):
        return slow
    if not all(group.gpus for group in groups):
        return WITHOUT_GPUS
    return ""


def _check_ucxx(diagnostics: Diagnostics, groups: Sequence[Profile], networks: Networks) -> None:
    spec = diagnostics.spec
    network = spec.profile.network
    if network.protocol != "ucxx":
        return
    for key, site_network in networks.items():
        # Traffic that stays on this machine needs no consent, unless the site lists protocols.
        listed = "protocols" in site_network.given or not diagnostics.spec.site.site.one_machine
        if listed and "ucxx" not in site_network.protocols:
            message = "ucxx is not encrypted, and the site does not list it in `network.protocols`"
            place = _network_position(diagnostics, key, "protocols")
            diagnostics.profile_error(message, "network", "protocol", related=place)
            break
    if slow := slow_memory(groups):
        diagnostics.note(f"warning: network.protocol is ucxx: {slow}")
    if network.encryption:
        message, hint = "ucxx cannot be encrypted", "protocol: tcp"
        diagnostics.profile_error(message, "network", "encryption", hint=hint)


def check_ports(diagnostics: Diagnostics, groups: Sequence[JobGroup]) -> None:
    """Check that the site's range has ports for the workers of one job and the dask scheduler."""
    dashboard = diagnostics.spec.profile.network.dashboard == "on"
    for group in groups:
        ports = group.site.network.ports
        workers = group.shape.workers // group.shape.nodes
        wanted = 2 * workers + 1 + dashboard
        if ports and (there := len(port_range(ports))) < wanted:
            message = (
                f"{plural(workers, 'worker')} on a node and the dask scheduler need {wanted} ports"
            )
            place = _network_position(diagnostics, group.queue_key, "ports")
            diagnostics.add(Problem(f"{message}, but `network.ports` has {there}", place))
