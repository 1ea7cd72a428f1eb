"""Options that only one kind of worker has."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from gpujobs.config.model import keys_of
from gpujobs.config.profile import RESERVED_OPTIONS, Workers
from gpujobs.injob.configuration import LIFE
from gpujobs.injob.job import life
from gpujobs.injob.log import Walltime
from gpujobs.injob.options import SuperviseOptions
from gpujobs.planning import workeroptions

from .support import error_of, made_plan

DURATION = "DASK_DISTRIBUTED__WORKER__LIFETIME__DURATION"


def names(command: object) -> set[str]:
    """Return the options of a command line of click."""
    parameters = command.params  # type: ignore[attr-defined]
    words = {word for item in parameters for word in (*item.opts, *item.secondary_opts)}
    return {word.removeprefix("--").removeprefix("no-").replace("-", "_") for word in words}


def test_options_that_dask_cuda_does_not_have_are_known() -> None:
    cuda = pytest.importorskip("dask_cuda.cli").worker
    from distributed.cli.dask_worker import main

    assert names(main) - names(cuda) - {"version"} == set(workeroptions._ONLY_PLAIN)


def test_options_are_those_of_dask() -> None:
    """Each option of the commands is known here: as a key, as set by gpujobs, or as another one."""
    cuda = pytest.importorskip("dask_cuda.cli").worker
    from distributed.cli.dask_worker import main

    keys = {*keys_of(Workers), *RESERVED_OPTIONS, "preload_nanny", "version"}
    own = {*keys, *(name.replace("enable_", "disable_") for name in keys)}
    assert names(cuda) - own == {*workeroptions._COMMAND, *workeroptions._ONLY_CUDA}
    others = {*workeroptions._COMMAND, *workeroptions._ONLY_PLAIN}
    assert names(main) - own == others - {"nanny", "nworkers", "preload_nanny"}


def test_keywords_are_those_of_dask() -> None:
    dask_cuda = pytest.importorskip("dask_cuda")
    from distributed import Nanny, Worker

    def keywords(kind: type) -> set[str]:
        return set(inspect.signature(kind).parameters)

    passed_on = keywords(Nanny) | keywords(Worker)
    assert {*workeroptions._NANNY, *workeroptions._OF_CLASS["nanny"]} <= passed_on
    assert {*workeroptions._OF_CLASS["cuda"]} <= keywords(dask_cuda.CUDAWorker)


@pytest.mark.parametrize(
    ("option", "part"),
    [("lifetime", "DURATION"), ("lifetime-stagger", "STAGGER"), ("no_nanny", "")],
)
def test_options_of_plain_workers_are_refused_for_cuda_workers(
    home: Path, option: str, part: str
) -> None:
    workers = {"options": {option: "1h"}}
    made_plan(home, {"gpus": 1, "workers": {**workers, "worker_class": "nanny"}})
    error = error_of(home, {"gpus": 1, "workers": workers})
    assert "is an option of `dask worker`, not of `dask cuda worker`" in error
    assert (f"set {DURATION[:-8]}{part} in `env`" in error) is bool(part)


def test_workers_know_the_end_of_their_job_only_with_a_walltime() -> None:
    options = SuperviseOptions("f", 0, started=5.0, task_time=9)

    def words(walltime: Walltime, *, endless: bool = False) -> list[float]:
        return [float(word) for word in life(options, walltime, endless=endless)[LIFE].split()]

    began, ends, task_time = words(Walltime(0.0, 10**10, 60))
    assert (began, task_time) == (5.0, 9.0) and abs(ends - (10**10 - 60)) < 5
    assert words(Walltime(0.0, 0, 60))[1] == float("inf")
    assert words(Walltime(0.0, 10**10, 60), endless=True)[1] == float("inf")
