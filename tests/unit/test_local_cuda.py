"""Keywords of LocalCUDACluster: docs/migrating.md says what becomes of each."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import distributed
import pytest
from dask_cuda import LocalCUDACluster

from gpujobs.clusters.freequeues import this_machine
from gpujobs.clusters.machines import machine_names
from gpujobs.deploy import GPUJobQueueCluster, GPULocalCluster
from gpujobs.deploy.clusteroptions import device_list, options_of_scheduler
from gpujobs.deploy.keywords import spec_of
from gpujobs.deploy.vocabulary import LOCAL
from gpujobs.errors import InputError
from gpujobs.planning.plan import Machine, Plan, make_plan
from gpujobs.planning.render import render

from ..support.each import each
from ..support.migrating import names
from .support import PYTHON

POPPED = {"data", "jit_unspill"}
"""Keywords that are in no signature: taken from ``**kwargs``, and of earlier versions."""
MACHINE = Machine(gpus=("0", "1"), cpus=8, memory=32 * 2**30, busy={})


ROWS = names("LocalCUDACluster keywords")
VALUES: dict[str, tuple[Any, str]] = {
    "threads_per_worker": (3, "--nthreads=3"),
    "memory_limit": (2**30, "--memory-limit=1GiB"),
    "device_memory_limit": (10**9, "--device-memory-limit=1000000000"),
    "enable_cudf_spill": (True, "--enable-cudf-spill"),
    "cudf_spill_stats": (1, "--cudf-spill-stats=1"),
    "local_directory": ("/fast", "--local-directory=/fast"),
    "protocol": ("ucx", "--schemes=ucxx --interface=lo"),
    "enable_tcp_over_ucx": (True, "--schemes=ucxx(.|\n)*--enable-tcp-over-ucx"),
    "enable_infiniband": (True, "--schemes=ucxx(.|\n)*--enable-infiniband"),
    "enable_nvlink": (True, "--schemes=ucxx(.|\n)*--enable-nvlink"),
    "enable_rdmacm": (True, "--enable-rdmacm"),
    "rmm_pool_size": (10**9, "--rmm-pool-size=1000000000"),
    "rmm_managed_memory": (True, "--rmm-managed-memory"),
    "rmm_async": (True, "--rmm-async"),
    "rmm_allocator_external_lib_list": (
        ["torch", "cupy"],
        "--set-rmm-allocator-for-libs=torch,cupy",
    ),
    "rmm_log_directory": ("/logs", "--rmm-log-directory=/logs"),
    "rmm_track_allocations": (True, "--rmm-track-allocations"),
    "pre_import": ("cudf,rmm", "--pre-import=cudf,rmm"),
    "worker_class": ("nanny", "distributed.cli.dask_worker"),
    "interface": ("lo", "--interface=lo"),
    "name": ("mine", "mine-0000"),
}
"""A value of each keyword that becomes part of a plan, and its trace in the script."""
WITH = {
    "rmm_maximum_pool_size": ({"rmm_pool_size": 0.5}, "2GiB", "--rmm-maximum-pool-size=2147483648"),
    "rmm_release_threshold": ({"rmm_async": True}, 0.5, "--rmm-release-threshold=0.5"),
}
"""The same of keywords that need another one."""
OF_THE_CLASS = {
    "CUDA_VISIBLE_DEVICES", "n_workers", "host", "scheduler_port", "dashboard_address",
    "scheduler_kwargs", "asynchronous", "loop", "silence_logs",
}  # fmt: skip
"""Keywords that are no part of a plan."""


def test_a_misspelled_keyword_comes_before_missing_gpus() -> None:
    with pytest.raises(InputError, match=r"keyword n_worker: (.|\n)*hint: use n_workers"):
        GPULocalCluster(n_worker=2, quiet=True)


def test_more_workers_than_gpus_are_refused() -> None:
    gpus = len(this_machine(None).gpus)
    with pytest.raises(InputError, match=f"{gpus + 1} GPUs? wanted, {gpus} free") as caught:
        GPULocalCluster(n_workers=gpus + 1, quiet=True)
    hint = "n_workers='auto' takes the free ones, gpus_per_job=0 CPU workers"
    assert [problem.hint for problem in caught.value.problems] == [hint]


def test_a_pool_of_the_asynchronous_allocator_has_the_warning_of_dask_cuda() -> None:
    with pytest.warns(FutureWarning) as caught, pytest.raises(InputError):
        GPULocalCluster(rmm_async=True, rmm_pool_size="1GB", n_worker=2, quiet=True)
    words = re.findall(r'"([^"]*)"', inspect.getsource(LocalCUDACluster.__init__))
    assert str(caught[0].message) in "".join(words)
    assert caught[0].filename == __file__


def planned(**keywords: Any) -> Plan:
    """Return the plan of keywords, with two GPUs."""
    spec = spec_of(keywords, "local", 2, ("local",), vocabulary=LOCAL)
    return make_plan(spec, python=PYTHON, machine=MACHINE, replaces="owner")


def script(**keywords: Any) -> str:
    """Return the script of these keywords."""
    plan = planned(**keywords)
    return render(plan, f"{plan.name}-0000", site_folder=Path.cwd())[0].text


def test_every_keyword_has_a_row() -> None:
    methods = [LocalCUDACluster.__init__, distributed.LocalCluster.__init__]
    names = {name for method in methods for name in inspect.signature(method).parameters}
    assert set(ROWS) == (names | POPPED) - {"self", "kwargs", "worker_kwargs"}


@each("name", ROWS)
def test_a_keyword_does_what_its_row_says(home: Path, name: str) -> None:
    row = ROWS[name]
    if row.here == "refused":
        with pytest.raises(InputError) as caught:
            planned(**{name: "x"})
        (problem,) = caught.value.problems
        assert (str(problem.position), problem.hint) == (f"keyword {name}", row.text)
    elif name in OF_THE_CLASS:
        classes = (GPULocalCluster, GPUJobQueueCluster)
        assert any(name in inspect.signature(kind.__init__).parameters for kind in classes)
    elif name in WITH:
        others, value, trace = WITH[name]
        assert re.search(trace, script(**others, **{name: value}))
    else:
        value, trace = VALUES[name]
        assert re.search(trace, script(**{name: value}))


def test_defaults_of_localcudacluster_mean_the_same(home: Path) -> None:
    text = script(memory_limit="auto", device_memory_limit="default", protocol=None)
    assert text == script()
    assert "--device-memory-limit=0 " in script(device_memory_limit="auto")


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"memory_limit": 0}, "keyword memory_limit: 0 (no limit) is not supported"),
        ({"worker_class": distributed.Nanny}, "keyword worker_class: "),
        (
            {"protocol": "tcp", "enable_nvlink": True},
            "keyword enable_nvlink: sets `network.protocol`, as keyword protocol does",
        ),
        ({"rmm_pool_sise": 1}, "did you mean `rmm_pool_size`"),
    ],
)
def test_errors_name_the_keyword(home: Path, keywords: dict[str, Any], error: str) -> None:
    with pytest.raises(InputError) as caught:
        planned(**keywords)
    assert error in str(caught.value)


@pytest.mark.parametrize(("threads", "noted"), [(4, False), (8, True)])
def test_threads_are_limited_by_no_share_of_the_cpus(home: Path, threads: int, noted: bool) -> None:
    plan = planned(threads_per_worker=threads)
    assert plan.groups[0].shape.worker_threads == threads
    assert ("16 threads of workers on 8 CPUs" in plan.notes) is noted


def test_one_worker_takes_the_cpus_of_the_machine(home: Path) -> None:
    spec = spec_of({"threads_per_worker": 8}, "local", 1, ("local",), vocabulary=LOCAL)
    plan = make_plan(spec, python=PYTHON, machine=MACHINE, replaces="owner")
    assert plan.groups[0].shape.cpus == 8 and not plan.notes


def test_a_protocol_may_be_said_twice(home: Path) -> None:
    assert planned(protocol="ucxx", enable_nvlink=True).transport.protocols == ("ucxx",)


@pytest.mark.parametrize("value", ["ws1,ws2", "ws1, ws2", ["ws1", "ws2"]])
def test_machines_are_named_by_a_list_or_a_text_with_commas(value: str | list[str]) -> None:
    assert machine_names(value) == ("ws1", "ws2")
    assert machine_names("ws1") == ("ws1",)


@pytest.mark.parametrize("value", ["3,1", [3, 1], ("3", " 1")])
def test_cuda_visible_devices_chooses_the_gpus(value: Any) -> None:
    devices = device_list(value)
    assert devices == ("3", "1")
    assert this_machine(devices).gpus == devices


@pytest.mark.parametrize("value", [[], 3, [1, 1]])
def test_a_bad_cuda_visible_devices_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES"):
        GPULocalCluster(CUDA_VISIBLE_DEVICES=value)


def test_options_of_the_dask_scheduler_are_joined_unless_they_differ() -> None:
    found = options_of_scheduler({"a": 1}, {"b": 2}, port=8786, host=None)
    assert found == {"a": 1, "b": 2, "port": 8786}
    with pytest.raises(InputError, match="keyword port"):
        options_of_scheduler({"port": 1}, None, port=2)


def test_a_machine_without_a_free_gpu_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InputError, match="this machine has no free GPU"):
        GPULocalCluster()
