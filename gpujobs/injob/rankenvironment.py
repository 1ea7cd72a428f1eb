"""The environment of MPI ranks, which launchers may not pass on to the other nodes of a job."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from .folder import Folder
from .names import ENVIRONMENT, RANK_SCRIPT

_NEEDED = re.compile(r"(DASK|GPUJOBS|UCX)_.*|PYTHONPATH|LD_LIBRARY_PATH")
"""Variables that ranks get even if nothing has changed them."""
_LOCAL = re.compile(
    # of this node or this shell
    r"GPUJOBS_HOST|CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|NVIDIA_VISIBLE_DEVICES|TMPDIR|HOST(NAME)?"
    r"|PWD|OLDPWD|SHLVL|_|DISPLAY|XDG_RUNTIME_DIR|(BASH|SSH)_.*"
    # of the batch scheduler, or of a launcher, which forwards its own
    r"|(SLURM|SLURMD|LSB|LSF|LS|PBS|SGE|PMI|PMIX|PRTE|OMPI|OPAL|HYDRA|HYDI)_.*"
)
"""Variables that ranks only get if the profile sets them."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""An exported function has another name."""


def write_rank_script(folder: Folder, environ: Mapping[str, str], named: Iterable[str]) -> None:
    """Write the script that runs its arguments as a command in the environment of a rank.

    A shell sets the variables, because the interpreter itself may need ``LD_LIBRARY_PATH``, and
    ``exec`` keeps the descriptors that the launcher passes to MPI.
    """
    changes = rank_changes(_before_setup(folder.path), environ, named)
    lines = [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in sorted(changes.items())
    ]
    text = "\n".join([*lines, 'exec "$@"', ""])
    descriptor = os.open(folder.path / RANK_SCRIPT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)


def rank_changes(
    before: Mapping[str, str] | None, after: Mapping[str, str], named: Iterable[str]
) -> dict[str, str | None]:
    """Return the variables that ranks need, with None for those to be removed.

    ``before`` and ``after`` are the environments of the job before and after its setup, ``named``
    the variables that the profile sets.
    """
    before = after if before is None else before
    wanted = {name for name in after if _NEEDED.fullmatch(name)}
    wanted |= {name for name in {*before, *after} if before.get(name) != after.get(name)}
    wanted = {name for name in wanted if _NAME.fullmatch(name) and not _LOCAL.fullmatch(name)}
    return {name: after.get(name) for name in wanted.union(named)}


def _before_setup(folder: Path) -> dict[str, str] | None:
    """Return the environment that the script of the job saved, and remove the file."""
    path = folder / ENVIRONMENT
    try:
        text = path.read_bytes().decode(errors="surrogateescape")
        path.unlink()
    except OSError:
        return None
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
