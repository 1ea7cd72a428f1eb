"""`dask_mpi.initialize` in the ranks of a job with ``run_on: ranks``."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from .loopback import on_loopback
from .names import PRELOAD, PROTOCOL, dashboard_address, is_encrypted
from .options import RankOptions

_PLAN = "GPUJOBS_INITIALIZE"
"""Variable with the planned keywords of `dask_mpi.initialize`, as JSON."""
_PLANNED = (
    "worker_class",
    "nthreads",
    "memory_limit",
    "local_directory",
    "interface",
    "worker_options",
    "dashboard",
    "encryption",
)
_RULE = "the site requires encryption between its nodes; leave it out"


def write_plan(options: RankOptions) -> None:
    """Keep the planned keywords for `initialize` in this rank, whichever copy of it is called."""
    planned = {name: getattr(options, name) for name in _PLANNED}
    os.environ[_PLAN] = json.dumps(planned)


def initialize(*arguments: object, **keywords: object) -> Any:
    """`dask_mpi.initialize` with the profile's protocol, worker options, names and GPUs.

    In the ranks of a job with ``run_on: ranks``, scripts also find it as ``dask_mpi.initialize``.
    Elsewhere it is dask-mpi's own. Raises ValueError if an argument contradicts the plan of the
    job or the encryption that the site requires, RuntimeError if the script has no guard.
    """
    real = importlib.import_module("dask_mpi.initialize").initialize
    planned = json.loads(os.environ.get(_PLAN, "{}"))
    if not planned:
        return real(*arguments, **keywords)
    if not _is_guarded(sys._getframe()):
        # A worker starts its process by importing the script, which would start workers, and hang.
        raise RuntimeError('the script needs `if __name__ == "__main__":` around its main part')
    given = dict(inspect.signature(real).bind_partial(*arguments, **keywords).arguments)
    worker_class = given.get("worker_class", planned["worker_class"])
    if worker_class != planned["worker_class"]:
        raise ValueError(
            f"worker_class is {worker_class}, but the profile plans {planned['worker_class']}"
        )
    own_options = given.pop("worker_options", None) or {}
    if planned.pop("encryption") == "required":
        _check_encryption(given, own_options)
    worker_options = _worker_options(planned, own_options)
    defaults = {
        **planned,
        "protocol": os.environ[PROTOCOL],
        "dashboard": planned["dashboard"] != "off",
        "dashboard_address": dashboard_address(planned["dashboard"]),
    }
    return real(**{**defaults, **given, "worker_options": worker_options})


def _worker_options(planned: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Lay the script's ``own`` worker options over the planned ones."""
    if "name" in own:
        raise ValueError("worker_options: `name` is set by gpujobs")
    options = {**planned["worker_options"], **own}
    options["name"] = f"{os.environ['GPUJOBS_CLUSTER']}-{os.environ['GPUJOBS_RANK']}"
    options["preload"] = [*options.get("preload", []), PRELOAD]
    return options


def _check_encryption(given: dict[str, Any], worker_options: dict[str, Any]) -> None:
    """Raise ValueError for arguments of the script that open a listener without encryption."""
    protocol = given.get("protocol")
    if protocol and not is_encrypted(protocol):
        raise ValueError(f"protocol {protocol} is not encrypted: {_RULE}")
    for name, options in (("", given), ("worker_options: ", worker_options)):
        if "dashboard_address" in options and not on_loopback(options["dashboard_address"]):
            raise ValueError(f"{name}dashboard_address: HTTP is not encrypted: {_RULE}")


def _is_guarded(frame: FrameType | None) -> bool:
    """Return whether the script calls from below its ``if __name__ == "__main__":``.

    The script is the caller of ``frame`` that runs as a main module.
    """
    while frame is not None and not _is_main_module(frame):
        frame = frame.f_back
    if frame is None:
        return True
    script = Path(frame.f_code.co_filename)
    if not script.is_file():
        return True
    tree, line = ast.parse(script.read_bytes()), frame.f_lineno
    return any(
        isinstance(node, ast.If) and _contains(node, line) and _tests_name(node)
        for node in ast.walk(tree)
    )


def _is_main_module(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"


def _contains(node: ast.If, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def _tests_name(node: ast.If) -> bool:
    names = [part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)]
    return "__name__" in names
