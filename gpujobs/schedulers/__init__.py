"""The batch schedulers: one class each, formats and parsers only, found by name."""

from __future__ import annotations

from .base import Scheduler
from .jobs import NOT_LISTED, CommandResult, JobId, JobState, JobStatus, Reply
from .registry import get_scheduler, scheduler_names

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
]
