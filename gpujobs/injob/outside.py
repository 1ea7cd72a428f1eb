"""Start MPI outside of the container: by the batch script, in whose place this process stands.

The image has neither the launcher nor the batch scheduler's commands. Files of the cluster's
folder connect this process with `gpujobs_launch` of the batch script.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

from .folder import Folder
from .options import LaunchOptions

START, STOP, EXIT = "launch-start", "launch-stop", "launch-exit"
_POLL_INTERVAL = 0.2


def launch(options: LaunchOptions) -> int:
    """Let the batch script start MPI, and stop it on SIGTERM. Return the launcher's exit code."""
    folder = Folder(options.folder)

    def stop(number: int, frame: FrameType | None) -> None:
        (folder.path / STOP).touch()

    signal.signal(signal.SIGTERM, stop)
    (folder.path / START).touch()
    while not (exit_code := folder.read_text(EXIT)):
        time.sleep(_POLL_INTERVAL)
    return int(exit_code)
