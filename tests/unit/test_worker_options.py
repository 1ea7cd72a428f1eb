"""Options that only one kind of worker has."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpujobs.injob.launch import lifetime
from gpujobs.injob.walltime import Walltime
from gpujobs.planning import workeroptions

from .support import error_of, made_plan

DURATION = "DASK_DISTRIBUTED__WORKER__LIFETIME__DURATION"


def names(command: object) -> set[str]:
    """Return the options of a command line of click."""
    parameters = command.params  # type: ignore[attr-defined]
    words = {word for item in parameters for word in (*item.opts, *item.secondary_opts)}
    return {word.removeprefix("--").removeprefix("no-").replace("-", "_") for word in words}


def test_options_that_dask_cuda_does_not_have() -> None:
    cuda = pytest.importorskip("dask_cuda.cli").worker
    from distributed.cli.dask_worker import main

    assert names(main) - names(cuda) - {"version"} == set(workeroptions._ONLY_PLAIN)


@pytest.mark.parametrize(
    ("option", "part"),
    [("lifetime", "DURATION"), ("lifetime-stagger", "STAGGER"), ("no_nanny", "")],
)
def test_refused_for_cuda_workers(home: Path, option: str, part: str) -> None:
    workers = {"options": {option: "1h"}}
    made_plan(home, {"gpus": 1, "workers": {**workers, "worker_class": "nanny"}})
    error = error_of(home, {"gpus": 1, "workers": workers})
    assert "is an option of `dask worker`, not of `dask cuda worker`" in error
    assert (f"set {DURATION[:-8]}{part} in `env`" in error) is bool(part)


def test_a_lifetime_of_the_user_counts() -> None:
    walltime = Walltime(0.0, 10**10, 60)
    assert DURATION in lifetime(walltime, {})
    assert lifetime(walltime, {DURATION: "30m"}) == {}
