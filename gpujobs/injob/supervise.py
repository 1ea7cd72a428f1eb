"""`supervise`: the supervisor of a job begins, and decides whether the job is the head."""

from __future__ import annotations

import json
import os
import time

from .folder import AFTER, EXIT_FAILED, Ended, EndKind, Folder, Run, head_folder, owner_file
from .head import Head
from .job import clear_for_head, end_attempt, over
from .jobevents import append_event, job_events, job_facts, run_name
from .log import log
from .names import RUN_OF_JOB, job_file
from .network import node_name
from .options import SuperviseOptions
from .workers import Workers


def supervise(options: SuperviseOptions) -> int:
    """Be the head if this job is the first that may be it, else workers; return the exit code."""
    folder = Folder(options.folder)
    _write_start(folder, options)
    names = folder.names()
    if over(options.attempt) in names:
        log(f"attempt {options.attempt} ended before this job started")
        return 0
    head = head_folder(options.attempt)
    if options.attempt > 1:
        end_attempt(folder, options.attempt - 1, "the next attempt has begun")
    elif head not in names and (reason := _failed_before(folder)):
        folder.end(Ended(EndKind.FAILED, EXIT_FAILED, reason, options.job))
        return EXIT_FAILED
    if not options.scheduler:
        return Workers(options).run()
    try:
        (folder.path / head).mkdir()  # succeeds once, on NFS too
    except FileExistsError:
        return _second_start(folder, options)
    owner = {"job": options.job, "node": node_name(), "time": time.time()}
    folder.write(owner_file(options.attempt), owner)
    if options.attempt > 1:
        clear_for_head(folder)
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
    claimed = folder.read_text(job_file(options.job, "claim"))
    run = Run(
        job=options.job,
        id=claimed,
        name=run_name(),
        node=node_name(),
        started=options.started,
        setup=job_facts(folder, options.job).setup,
    )
    os.environ[RUN_OF_JOB] = json.dumps(run)  # its workers tell the dask scheduler
    name = job_events(options.job)
    append_event(folder, name, "started", began=options.started, pid=os.getpid())


def _second_start(folder: Folder, options: SuperviseOptions) -> int:
    """Another job is the head, or this one was before."""
    owner = folder.read(owner_file(options.attempt)).get("job")
    if owner != options.job and options.workers:
        return Workers(options).run()
    # The batch scheduler restarted the head: the dask scheduler's state and `run` are lost.
    reason = f"the batch scheduler started the head's job again, on {node_name()}; submit again"
    if options.has_next_attempt:
        log(reason)
        end_attempt(folder, options.attempt, reason)
        return 0
    folder.end(Ended(EndKind.FAILED, EXIT_FAILED, reason, options.job))
    return Head(options).run()
