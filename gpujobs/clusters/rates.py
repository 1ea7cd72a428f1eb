"""Rates of protocols that `gpujobs doctor --run` measured, in a file beside the records."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..injob.folder import RATES, SHAPES, DamagedError, bounded, parse_json
from ..injob.transport import Measured, rates_of
from .clusterfolder import best_effort, write_atomically
from .ledger import Ledger

_MOST_BYTES = 2**18
_MOST_KINDS = 50
"""Of nodes; the oldest rates are left out."""


def read(ledger: Ledger) -> dict[str, Any]:
    """Return the entries by kind of node, {} without a file. Raises DamagedError."""
    path = ledger.folder / RATES
    try:
        with bounded(path, _MOST_BYTES) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise DamagedError(f"{path} is damaged: it belongs to another user")
            text = file.read().decode(errors="replace")
        entries: dict[str, Any] = parse_json(text, SHAPES[RATES])
    except FileNotFoundError:
        return {}
    except DamagedError as error:
        raise error.of(path) from None
    return entries


def copy(ledger: Ledger, folder: Path) -> list[str]:
    """Copy the rates into a cluster's folder; return a note if they are ignored."""
    try:
        entries = read(ledger)
    except DamagedError as error:
        return [f"the measured rates of protocols are ignored: {error}"]
    if entries:
        with best_effort():
            write_atomically(folder / RATES, json.dumps(entries))
    return []


def keep(ledger: Ledger, kind: str, measured: Mapping[str, Measured], now: float) -> None:
    """Keep rates of a kind of node, beside those that were not measured this time."""
    try:
        entries = read(ledger)
    except DamagedError:
        entries = {}
    known = rates_of(entries, kind)
    for protocol, new in measured.items():
        known[protocol] = _merged(known.get(protocol, Measured()), new)
    rates = {protocol: vars(one) for protocol, one in known.items()}
    entries[kind] = {"time": now, "measured": rates}
    newest = sorted(entries, key=lambda name: -entries[name]["time"])[:_MOST_KINDS]
    with best_effort():
        text = json.dumps({name: entries[name] for name in newest}, indent=1)
        write_atomically(ledger.folder / RATES, text)


def _merged(known: Measured, new: Measured) -> Measured:
    if new.problem:
        return new
    within = known.within if new.within is None else new.within
    between = known.between if new.between is None else new.between
    return replace(new, within=within, between=between)
