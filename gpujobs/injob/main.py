"""The sub-commands of `injob.pyz`."""

from __future__ import annotations

import sys
import traceback

from .network import try_ucxx
from .options import RankOptions, RetireOptions, SuperviseOptions, parse
from .rank import run_rank
from .retire import retire
from .supervise import supervise


def main(argv: list[str]) -> int:
    """Run the sub-command in ``argv``; return its exit code."""
    # Python's own printer of exceptions does not find source lines in a zip file.
    sys.excepthook = traceback.print_exception
    options = parse(argv)
    if isinstance(options, SuperviseOptions):
        return supervise(options)
    if isinstance(options, RankOptions):
        run_rank(options)
        return 0
    if isinstance(options, RetireOptions):
        return retire(options.workers, options.timeout)
    return try_ucxx(options.interface)
