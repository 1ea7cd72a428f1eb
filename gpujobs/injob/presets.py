"""Variables that dask's workers need before their libraries are loaded.

A nanny sets them before it starts a worker. A worker that is a fork is started already: it
needs them from the process that it is forked from.
"""

from __future__ import annotations

from collections.abc import Mapping

AT_LOAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Dask's defaults that libraries read when they are loaded."""
AT_START = {"MALLOC_TRIM_THRESHOLD_": "65536"}
"""Dask's defaults that are read when a process starts."""
PRESET = "GPUJOBS_PRESET"
"""Names of the variables that `preset` has added."""
_HASH_SEED = {"PYTHONHASHSEED": "6640"}
"""Nannies set this one for all workers of a cluster, whatever it was."""


def for_scheduling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` for a process that uses dask, but computes nothing.

    Else numpy starts a thread for each core when it is imported, which spins for a while.
    """
    return {**AT_LOAD, **environ}


def preset(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` for a process whose forks are workers."""
    defaults = {**AT_LOAD, **AT_START}
    added = {name: value for name, value in defaults.items() if name not in environ}
    return {**environ, **added, **_HASH_SEED, PRESET: " ".join(added)}


def without_preset(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the additions, over which dask's configuration has priority."""
    added = {PRESET, *environ.get(PRESET, "").split()}
    return {name: value for name, value in environ.items() if name not in added}


def with_defaults(environ: Mapping[str, str], configured: Mapping[str, object]) -> dict[str, str]:
    """Return ``environ`` with the variables that a nanny would add.

    ``configured``: dask's `distributed.nanny.pre-spawn-environ`, as far as a user has set it.
    """
    wanted: dict[str, object] = {**AT_LOAD, **AT_START, **configured}
    added = {name: str(value) for name, value in wanted.items() if value is not None}
    return {**added, **environ}


def missing(
    wanted: Mapping[str, str], at_start: Mapping[str, str], at_fork: Mapping[str, str]
) -> list[str]:
    """Return which of the variables ``wanted`` a fork lacks.

    ``at_start``: the environment with which the forked process was started. ``at_fork``: the one in
    which it has loaded its libraries.
    """
    return [
        name
        for name, value in wanted.items()
        if (at_fork if name in AT_LOAD else at_start).get(name) != value
    ]
