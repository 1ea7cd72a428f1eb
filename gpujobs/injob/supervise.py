"""Supervise one job."""

from __future__ import annotations

import os
import time

from .attempts import begin_attempt, end_attempt, over
from .folder import EXIT_FAILED, Ended, EndKind, Folder
from .head import Head
from .log import log
from .network import node_name
from .options import SuperviseOptions
from .workers import Workers


def supervise(options: SuperviseOptions) -> int:
    """Be the head if this job is the first that may be it, else a job of workers.

    Returns the exit code of the job.
    """
    folder = Folder(options.folder)
    _write_start(folder, options)
    if over(options.attempt) in folder.names():
        log(f"attempt {options.attempt} ended before this job started")
        return 0
    if not begin_attempt(folder, options.attempt):
        reason = f"attempt {options.attempt} has not begun: its first job did not set it up"
        folder.end(Ended(EndKind.FAILED, EXIT_FAILED, reason, options.job))
        return EXIT_FAILED
    if not options.scheduler:
        return Workers(options).run()
    try:
        (folder.path / "head").mkdir()
    except FileExistsError:
        return _second_start(folder, options)
    folder.write("head/owner", {"job": options.job, "node": node_name(), "time": time.time()})
    return Head(options).run()


def _write_start(folder: Folder, options: SuperviseOptions) -> None:
    start = {
        "node": node_name(),
        "started": options.started,
        "pid": os.getpid(),
        "job_id": folder.read_text(f"jobs/{options.job}.claim"),
    }
    try:
        folder.write(f"jobs/{options.job}.started", start)
    except OSError as error:
        log(f"cannot write to {folder.path}: {error}")


def _second_start(folder: Folder, options: SuperviseOptions) -> int:
    """Another job is the head, or this one was before."""
    owner = folder.read("head/owner").get("job")
    if owner != options.job and options.workers:
        return Workers(options).run()
    # The batch scheduler restarted the head: the dask scheduler's state and `run` are lost.
    reason = f"the batch scheduler started the head's job again, on {node_name()}; submit again"
    if options.attempt < options.attempts:
        log(reason)
        end_attempt(folder, options.attempt, reason)
        return 0
    folder.end(Ended(EndKind.FAILED, EXIT_FAILED, reason, options.job))
    return Head(options).run()
