"""Choose a protocol that both this process and the cluster can use."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace

from ..batch import process
from ..errors import InputError
from ..injob.loopback import confine
from ..planning.plan import Plan


def with_usable_protocols(plan: Plan, *, only_one: bool) -> tuple[Plan, str]:
    """Return ``plan`` with the protocols that work in this process, and why ucxx does not, or "".

    ``only_one``: of the first protocol, since a dask scheduler in this process uses it. Raises
    InputError if no protocol works.
    """
    transport = plan.transport
    reason = _ucxx_problem(transport.interface) if "ucxx" in transport.protocols else ""
    usable = tuple(name for name in transport.protocols if not (reason and name == "ucxx"))
    if not usable:
        raise InputError(reason, hint="network={'protocol': 'auto'}")
    protocols = usable[:1] if only_one else usable
    if len(protocols) == 1 and transport.loopback:
        confine(protocols[0])
    if protocols == ("ucxx",) and transport.loopback:
        os.environ.setdefault("UCX_NET_DEVICES", transport.loopback)
    return replace(plan, transport=replace(transport, protocols=protocols)), reason


def _ucxx_problem(interface: str | None) -> str:
    """Return why ucxx cannot be used in this process, or ""."""
    options = ["--interface", interface] if interface else []
    result = process.run([sys.executable, "-m", "gpujobs.injob", "try-ucxx", *options])
    if result.exit_code == 0:
        return ""
    lines = [line.strip() for line in result.message.splitlines() if line.strip()]
    return f"ucxx does not work on {socket.gethostname()}: {lines[-1][:300]}"
