"""Words and messages in the output of Slurm's commands."""

from __future__ import annotations

import re

from .jobs import JobState, JobStatus

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

_HELD_AFTER_FAILURE = {
    "launch failed requeued held": "a node could not start it",
    "launch failure limit exceeded requeued held": "nodes could not start it, again and again",
    "user env retrieval failed requeued held": "a node could not read its user's environment",
    "job requeued in special exit state": "it ended with an exit code for which Slurm holds jobs",
    "JobHoldMaxRequeue": "it was started too often",
}
"""Reasons of jobs that Slurm holds because they failed, until they are cancelled or released."""
_NEEDS_A_PERSON = {
    "JobHeldUser": "held by its user, until `scontrol release`",
    "JobHeldAdmin": "held by an administrator",
    "job requeued in held state": "held by `scontrol requeuehold`, until `scontrol release`",
    "DependencyNeverSatisfied": "the job that it waits for ended in another way than it asks for",
    "BadConstraints": "no node has all that it requests",
    "PartitionNodeLimit": "it requests more or fewer nodes than the partition allows now",
    "PartitionTimeLimit": "its walltime is longer than the partition allows now",
    "ReservationDeleted": "its reservation was deleted",
    "ReservationInvalid": "its reservation is over, or not for it",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
}
"""Reasons of jobs that do not start unless a person changes something, which may still happen."""


def waiting_status(native: str, reason: str, starts: str) -> JobStatus:
    """Return the status of a job that waits, by the state and the reason of squeue.

    The reason is `state_desc` of the job, which some releases write with underscores, or else a
    word of Slurm's job_state_reason.c.
    """
    text = reason.replace("_", " ")
    if native == "SPECIAL_EXIT":
        text = "job requeued in special exit state"
    if text in _HELD_AFTER_FAILURE or text.endswith("requeued held"):
        words = _HELD_AFTER_FAILURE.get(text, "Slurm holds it after a failure")
        return JobStatus(JobState.FAILED, native, f"{text}: {words}", stuck=True)
    if words := _NEEDS_A_PERSON.get(text, ""):
        return JobStatus(JobState.PENDING, native, f"{text}: {words}")
    return JobStatus(JobState.PENDING, native, reason, starts=starts)


AWAY = re.compile(
    r"unable to contact slurm controller|socket timed out|zero bytes were transmitted|"
    r"connection (refused|timed out|reset)|communication (connection|shutdown) failure|"
    r"temporarily (unable|disabled)|resource temporarily unavailable|"
    r"unable to establish (controller|control machine)|in standby mode|slurm backup controller|"
    r"authentication error|unable to create job record",
    re.I,
)
"""Messages of a command that did not reach the controller, or that it could not take then."""

_ROW = re.compile(r"\d+\|.*")


def is_listing(stdout: str, columns: str) -> bool:
    """Return whether squeue has written a whole list of jobs with these ``columns``.

    It has a header, rows that begin with a number, and ends with the end of a line.
    """
    lines = [line for line in stdout.splitlines() if not line.startswith("CLUSTER: ")]
    header, *rows = lines or [""]
    titled = header.count("|") == columns.count("|") and not _ROW.match(header)
    return titled and stdout.endswith("\n") and all(map(_ROW.match, rows))
