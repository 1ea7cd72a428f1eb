"""Choose a protocol that both this process and the cluster can use."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace

from ..batch import process
from ..planning.plan import Plan


def without_unusable_ucxx(plan: Plan) -> tuple[Plan, str]:
    """Return ``plan`` without ucxx if it does not work in this process, and the reason."""
    transport = plan.transport
    if "ucxx" not in transport.protocols:
        return plan, ""
    interface = ["--interface", transport.interface] if transport.interface else []
    result = process.run([sys.executable, "-m", "gpujobs.injob", "try-ucxx", *interface])
    if result.exit_code == 0:
        return plan, ""
    lines = [line.strip() for line in result.message.splitlines() if line.strip()]
    reason = f"ucxx does not work on {socket.gethostname()}: {lines[-1][:300]}"
    others = tuple(name for name in transport.protocols if name != "ucxx")
    return replace(plan, transport=replace(transport, protocols=others)), reason
