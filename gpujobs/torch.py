"""Where `run_ddp` was until 0.2.0."""

from __future__ import annotations

from typing import NoReturn

from .errors import GpujobsError


def run_ddp(*arguments: object, **options: object) -> NoReturn:
    """Raise GpujobsError, which names the replacement."""
    raise GpujobsError(
        "gpujobs.torch.run_ddp is no part of gpujobs any more",
        hint="copy examples/ddp/ranks.py beside your program: from ranks import run_ddp",
    )
