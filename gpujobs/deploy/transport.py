"""What a Python process and its cluster talk over: nothing that only one of them can."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace

from ..batch import process as commands
from ..planning.plan import Plan


def without_unusable_ucxx(plan: Plan) -> tuple[Plan, str]:
    """Return ``plan`` without ucxx where it does not work in this process, and why it does not."""
    transport, reason = plan.transport, ""
    if "ucxx" in transport.schemes:
        interface = ["--interface", transport.interface] if transport.interface else []
        result = commands.run([sys.executable, "-m", "gpujobs.injob", "try-ucxx", *interface])
        if result.exit_code != 0:
            said = [line.strip() for line in result.message.splitlines() if line.strip()]
            reason = f"ucxx does not work on {socket.gethostname()}: {said[-1][:300]}"
            others = tuple(scheme for scheme in transport.schemes if scheme != "ucxx")
            transport = replace(transport, schemes=others)
    return replace(plan, transport=transport), reason
