"""The sub-commands of `injob.pyz`."""

from __future__ import annotations

import sys
import traceback

from .loopback import confine
from .names import LOOPBACK_INTERFACE
from .network import try_ucxx
from .options import (
    LaunchOptions,
    RankOptions,
    RetireOptions,
    SuperviseOptions,
    TrialOptions,
    UsageOptions,
    WorkersOptions,
    parse,
)
from .outside import launch
from .rank import run_rank
from .retire import retire
from .supervise import supervise
from .trial import trial
from .usage import sample_usage


def main(argv: list[str]) -> int:
    """Run the sub-command in ``argv``; return its exit code."""
    # Python's own printer of exceptions does not find source lines in a zip file.
    sys.excepthook = traceback.print_exception
    options = parse(argv)
    if isinstance(options, SuperviseOptions):
        return supervise(options)
    if isinstance(options, WorkersOptions):
        from .workerhost import run_workers  # imports multiprocessing

        run_workers(options)
        return 0
    if isinstance(options, RankOptions):
        run_rank(options)
        return 0
    if isinstance(options, RetireOptions):
        return retire(options.workers, options.timeout)
    if isinstance(options, LaunchOptions):
        return launch(options)
    if isinstance(options, UsageOptions):
        return sample_usage(options)
    if options.interface == LOOPBACK_INTERFACE:
        for protocol in ("ucxx", "ws", "wss"):
            confine(protocol)
    if isinstance(options, TrialOptions):
        return trial(options)
    return try_ucxx(options.interface)
