"""Bytes and seconds as text for people, the way the two YAML files write them."""

from __future__ import annotations


def size_text(n_bytes: int) -> str:
    """Return 64424509440 as ``60GiB``: the largest unit that keeps it whole, else two decimals."""
    units = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    for unit, name in units:
        if n_bytes >= unit and n_bytes % unit == 0:
            return f"{n_bytes // unit}{name}"
    for unit, name in units:
        if n_bytes >= unit:
            return f"{n_bytes / unit:.2f}".rstrip("0").rstrip(".") + name
    return f"{n_bytes}B"


def walltime_text(seconds: int) -> str:
    """Return 5400 as ``1h30m``."""
    hours, rest = divmod(seconds, 3600)
    minutes, left = divmod(rest, 60)
    parts = ((hours, "h"), (minutes, "m"), (left, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def clock_text(seconds: float) -> str:
    """Return 41 as ``00:41`` and 3661 as ``1:01:01``."""
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes:02d}:{left:02d}"


def count(number: int, what: str) -> str:
    """Return ``1 job`` or ``2 jobs``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
