"""Supervise one job."""

from __future__ import annotations

import os
import time

from .attempts import begin_attempt, end_attempt, over
from .folder import AFTER, EXIT_FAILED, Ended, EndKind, Folder
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
    names = folder.names()
    if over(options.attempt) in names:
        log(f"attempt {options.attempt} ended before this job started")
        return 0
    begins = options.attempt == 1 and "head" not in names
    if begins and (reason := _failed_before(folder)):
        folder.end(Ended(EndKind.FAILED, EXIT_FAILED, reason, options.job))
        return EXIT_FAILED
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


def _failed_before(folder: Folder) -> str:
    """Return that the cluster after which this one starts has failed; "" if it has not."""
    after = folder.read(AFTER)
    if not after or after["any_end"]:
        return ""
    ended = Folder(after["folder"]).read("ended")
    if ended and Ended.parse(ended).exit_code == 0:
        return ""
    reason = Ended.parse(ended).reason if ended else "it has not written how it ended"
    return f"{after['cluster']}, which must succeed before, has failed: {reason}"


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
