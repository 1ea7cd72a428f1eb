"""The batch schedulers: one file each, formats and parsers only."""

from __future__ import annotations

from importlib import import_module

from .base import CommandResult, JobId, JobState, JobStatus, Scheduler

__all__ = [
    "SCHEDULERS",
    "CommandResult",
    "JobId",
    "JobState",
    "JobStatus",
    "Scheduler",
    "get_scheduler",
]

SCHEDULERS = {
    "slurm": "Slurm", "pbs": "PBS", "torque": "Torque", "lsf": "LSF", "sge": "GridEngine", "local": "Local",
}  # fmt: skip
"""What a site file calls them, and the class in the module of that name."""


def get_scheduler(name: str) -> type[Scheduler]:
    """Return the class of the batch scheduler that site files call ``name``."""
    if name not in SCHEDULERS:
        from ..errors import InputError

        raise InputError(
            f"batch scheduler {name} is not supported yet; supported: {', '.join(SCHEDULERS)}"
        )
    found: type[Scheduler] = getattr(import_module(f".{name}", __package__), SCHEDULERS[name])
    return found
