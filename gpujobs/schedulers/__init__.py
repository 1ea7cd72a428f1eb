"""The batch schedulers: one class each, formats and parsers only, found by name."""

from __future__ import annotations

from .base import Scheduler, get_scheduler, scheduler_names, usable_schedulers
from .jobs import NOT_LISTED, CommandResult, JobId, JobState, JobStatus, Reply

__all__ = [
    "NOT_LISTED",
    "CommandResult",
    "JobId",
    "JobState",
    "JobStatus",
    "Reply",
    "Scheduler",
    "get_scheduler",
    "scheduler_names",
    "usable_schedulers",
]
