"""The sub-commands of `injob.pyz`. Each process imports only the module of its own."""

from __future__ import annotations

import importlib
import sys
import traceback

from .options import parse

COMMANDS = {
    "supervise": ("supervise", "supervise"),
    "node": ("workers", "run_node"),
    "scheduler": ("configuration", "run_scheduler"),
    "workers": ("workerhost", "run_workers"),
    "rank": ("rank", "run_rank"),
    "retire": ("workers", "retire"),
    "launch": ("rank", "launch"),
    "usage": ("sampler", "sample_usage"),
    "mps": ("mps", "keep_mps"),
    "gpu-errors": ("gpuerrors", "write_gpu_errors"),
    "try-ucxx": ("exchange", "try_ucxx"),
}
"""Module and function of each sub-command; the function gets the options of the sub-command."""


def main(argv: list[str]) -> int:
    """Run the sub-command in ``argv``; return its exit code."""
    # Python's own printer of exceptions does not find source lines in a zip file.
    sys.excepthook = traceback.print_exception
    options = parse(argv)
    module, function = COMMANDS[argv[0]]
    command = getattr(importlib.import_module(f".{module}", __package__), function)
    return command(options) or 0
