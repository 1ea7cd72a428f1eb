"""Wait for a cluster, as `gpujobs submit --wait` does."""

from __future__ import annotations

import time

from .. import text as text
from ..clusters import logs
from ..clusters import monitor as clusters
from ..clusters.ledger import ClusterRecord, Ledger
from ..errors import JobFailedError
from . import display


def wait(record: ClusterRecord, ledger: Ledger) -> None:
    """Show the progress of a cluster and the output of its command on stderr, until the command has ended.

    Without one, until all workers are connected. Raises JobFailedError where it comes to nothing, and
    KeyboardInterrupt after saying that the cluster goes on.
    """
    progress = display.Progress()
    watch = clusters.ClusterWatcher(record, ledger, progress.say)
    output = logs.LogFollower(lambda: [record.path / "logs" / "run.log"])
    started = time.monotonic()
    try:
        while True:
            view = watch.look()
            for line in output.new_lines():
                progress.say(line)
            if view.over:
                break
            if not record.run and view.connected >= record.workers:
                progress.say(
                    f"all {record.workers} workers are connected; gpujobs connect {record.id} says how to use them"
                )
                return
            progress.show(display.progress(view, time.monotonic() - started))
            time.sleep(0.5)
    except KeyboardInterrupt:
        progress.say(f"the cluster goes on; to end it: gpujobs cancel {record.id}")
        raise
    view = clusters.wait_until_gone(watch, 15.0)
    for line in output.new_lines(last=True):
        progress.say(line)
    progress.clear()
    if view.state.value != "DONE":
        raise JobFailedError(
            f"{record.id}: {view.reason}", hint=f"gpujobs status {record.id}", code=view.exit_code
        )
    progress.say(f"{record.id} is done after {text.clock_text(time.monotonic() - started)}")
