"""Words and messages in the output of Slurm's commands."""

from __future__ import annotations

import re

from .jobs import JobState

STATES = {
    "PENDING": JobState.PENDING, "CONFIGURING": JobState.PENDING, "REQUEUED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING, "REQUEUE_FED": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING, "SPECIAL_EXIT": JobState.PENDING,
    "EXPEDITING": JobState.PENDING,  # requeued, from 25.11 on
    "RUNNING": JobState.RUNNING, "COMPLETING": JobState.RUNNING, "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING, "STAGE_OUT": JobState.RUNNING,
    "SUSPENDED": JobState.SUSPENDED, "STOPPED": JobState.SUSPENDED,
    "COMPLETED": JobState.COMPLETED,
    "FAILED": JobState.FAILED, "BOOT_FAIL": JobState.FAILED, "LAUNCH_FAILED": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED, "REVOKED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIMEOUT, "DEADLINE": JobState.TIMEOUT,
    "PREEMPTED": JobState.PREEMPTED, "NODE_FAIL": JobState.NODE_FAIL,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
}  # fmt: skip
"""The state of a job by Slurm's word for it."""

LAUNCH_FAILED = "launch failed requeued held"
"""The reason of a pending job that could not be launched, and is held until it is released.

Some releases write underscores.
"""

UNREACHABLE = re.compile(
    r"unable to contact slurm controller|socket timed out|zero bytes were transmitted|"
    r"connection (refused|timed out|reset)|communication (connection|shutdown) failure|"
    r"temporarily (unable|disabled)|resource temporarily unavailable|"
    r"unable to establish (controller|control machine)|in standby mode|slurm backup controller",
    re.I,
)
"""Messages of a command that did not reach the controller."""
