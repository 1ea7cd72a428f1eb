"""The protocols that dask's processes use, and whether they are encrypted."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from ..schedulers import Scheduler
from .diagnostics import Diagnostics

ENCRYPTED = {"tcp": "tls", "ws": "wss"}
"""Dask's names of protocols without and with TLS. ucxx has no encryption."""
MANAGED_MEMORY = (
    "with `rmm_managed_memory` it is slower than tcp "
    "(four H200, transpose of 12.8 GB: ucxx 8 to 16 s, tcp 1.5 to 3.3 s, "
    "ucxx without managed memory 0.07 s)"
)
"""Why ucxx is a bad choice for managed memory, as measured."""


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

    def interface_option(self) -> list[str]:
        """Return the option of dask's commands that names the interface, as bash, or nothing."""
        if not self.interface:
            return []
        return [f"--interface={shlex.quote(self.interface)}"]

    def listen_options(self, scheduler: Scheduler) -> list[str]:
        """Return the options that choose the address a process listens at, as bash."""
        if not self.interface and scheduler.on_this_machine:
            return ["--host=127.0.0.1"]
        return self.interface_option()


def is_encrypted(protocol: str) -> bool:
    """Return whether the protocol with dask's name ``protocol`` is encrypted."""
    return protocol in ENCRYPTED.values()


def choose_transport(diagnostics: Diagnostics) -> Transport:
    """Return the transport for the profile's `network` at the site."""
    network = diagnostics.spec.profile.network
    site_network = diagnostics.spec.site.site.network
    protocols = _candidates(diagnostics)
    if network.encryption is not False:
        protocols = [ENCRYPTED.get(name, name) for name in protocols]
    if unencrypted := [name for name in protocols if not is_encrypted(name)]:
        names = " or ".join(unencrypted)
        diagnostics.note(f"not encrypted: traffic between dask's processes over {names}")
    return Transport(tuple(protocols), network.interface or site_network.interface)


def _candidates(diagnostics: Diagnostics) -> list[str]:
    """Return the protocols by the names of profiles.

    A site that lists ucxx consents to unencrypted traffic within jobs.
    """
    profile = diagnostics.spec.profile
    allowed = diagnostics.spec.site.site.network.protocols
    if profile.network.protocol != "auto":
        _check_ucxx(diagnostics)
        return [profile.network.protocol]
    # ucxx is there to move data between GPUs, and it cannot be encrypted.
    useful = profile.gpus and not profile.network.encryption
    if useful and "ucxx" in allowed and profile.workers.rmm_managed_memory:
        diagnostics.note(f"ucxx is not used: {MANAGED_MEMORY}")
        useful = False
    if useful:
        return list(allowed)
    return [name for name in allowed if name != "ucxx"] or ["tcp"]


def _check_ucxx(diagnostics: Diagnostics) -> None:
    spec = diagnostics.spec
    network = spec.profile.network
    if network.protocol != "ucxx":
        return
    if "ucxx" not in spec.site.site.network.protocols:
        diagnostics.profile_error(
            "ucxx is not encrypted, and the site does not list it in `network.protocols`",
            "network",
            "protocol",
            related=spec.site_position("network"),
        )
    if spec.profile.workers.rmm_managed_memory:
        diagnostics.note(f"warning: network.protocol is ucxx: {MANAGED_MEMORY}")
    if network.encryption:
        message, hint = "ucxx cannot be encrypted", "protocol: tcp"
        diagnostics.profile_error(message, "network", "encryption", hint=hint)
