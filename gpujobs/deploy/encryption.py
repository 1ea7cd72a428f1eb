"""Options of a dask scheduler in this process, at a site that requires encryption."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import InputError, Position, Problem
from ..injob.loopback import on_loopback
from ..injob.names import is_encrypted
from ..planning.plan import Plan
from ..planning.transport import contact_text, encryption_rule


def check_encryption(plan: Plan, options: Mapping[str, Any], place: str) -> None:
    """Raise InputError if the site requires encryption, and ``options`` would open a listener
    without it. ``place`` names the options in the message.
    """
    required = plan.transport.encryption_required
    if required is None:
        return
    rule, contact = encryption_rule(plan.site_name), contact_text(plan.site)
    problems = [
        Problem(
            f"{rejected.option}: {rejected.message}: {rule}",
            Position(place),
            hint="; ".join(filter(None, (rejected.hint, contact))),
            related=required,
        )
        for rejected in _REJECTED
        if rejected.option in options and rejected.found(options[rejected.option])
    ]
    if problems:
        raise InputError(problems)


class _Rejected(NamedTuple):
    option: str
    message: str
    hint: str
    found: Callable[[Any], object]
    """Whether a value of the option is rejected."""


def _has_unencrypted(protocols: Any) -> bool:
    """Return whether one of the protocols, a text or a list, is not encrypted. None: it is tls."""
    listed = protocols if isinstance(protocols, list | tuple) else [protocols]
    return any(name and not is_encrypted(str(name)) for name in listed)


_REJECTED = (
    _Rejected(
        "protocol", "it is not encrypted", "leave it out: the protocol is tls", _has_unencrypted
    ),
    _Rejected(
        "security",
        "it would replace the certificate of the cluster",
        "leave it out: each cluster makes its own certificate",
        lambda security: True,
    ),
    _Rejected(
        "dashboard_address",
        "the dashboard is not encrypted",
        "leave it out: the dashboard listens on the loopback interface, "
        "and `gpujobs connect` prints the tunnel to it",
        lambda address: not on_loopback(address),
    ),
    _Rejected(
        "jupyter",
        "Jupyter and a listener for it are not encrypted",
        "leave it out, and start Jupyter on its own",
        bool,
    ),
    _Rejected("services", "services of dask are not encrypted", "leave it out", bool),
)
"""Other options open no listener, or one that is encrypted."""
