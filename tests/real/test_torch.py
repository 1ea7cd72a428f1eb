"""`run_ddp` of examples/ddp, with gloo on CPU workers of this machine; those that need PyTorch are slow."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import gpujobs
from gpujobs.errors import GpujobsError

from ..conftest import need_library
from ..support.backend import Backend
from ..support.cli import NVML, ROOT, Cli
from ..support.processes import patience

DDP = ROOT / "examples" / "ddp"
sys.path.append(str(DDP))
import ranks  # noqa: E402 - of the example
from ranks import RankError, run_ddp  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

VARIABLES = ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME"]


@pytest.fixture(scope="module", autouse=True)
def functions_by_value() -> Iterator[None]:
    """The workers cannot import this module."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def without(folder: Path, name: str) -> dict[str, str]:
    """Return the environment of workers that cannot import a package."""
    (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}')\n")
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def home_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        yield folder


def cluster_of(env: dict[str, str], workers: int = 2) -> gpujobs.GPULocalCluster:
    return gpujobs.GPULocalCluster(
        gpus_per_job=0,
        n_workers=workers,
        worker_memory="1GiB",
        env=env,
        quiet=True,
        scheduler_options={"dashboard_address": ":0"},
    )


@pytest.fixture(scope="module")
def cluster(home_of_module: Path) -> Iterator[Any]:
    """Two workers, in an environment without gpujobs."""
    need_library("torch")
    with cluster_of(without(home_of_module, "gpujobs")) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Any) -> Iterator[Any]:
    cluster.wait_for_workers(2, timeout=patience(120))
    with cluster.get_client() as client:
        yield client


def gather_ranks(text: str) -> tuple[str, list[int], dict[str, str]]:
    """Return the text, the ranks that took part, and the variables of this one."""
    import torch

    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(int(os.environ["WORLD_SIZE"]))]
    torch.distributed.all_gather(ranks, torch.tensor([int(os.environ["RANK"])]))
    return text, [int(rank) for rank in ranks], {name: os.environ[name] for name in VARIABLES}


def variables_left() -> list[str]:
    return [name for name in VARIABLES if name in os.environ]


@pytest.mark.slow
def test_all_workers_are_ranks(client: Any) -> None:
    first, second = run_ddp(client, gather_ranks, "hello")
    assert first[:2] == second[:2] == ("hello", [0, 1])
    assert [found["RANK"] for _, _, found in (first, second)] == ["0", "1"]
    own = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    own["GLOO_SOCKET_IFNAME"] = "lo"  # that of the workers' addresses
    for _, _, found in (first, second):
        assert {name: found[name] for name in own} == own
    assert first[2]["MASTER_PORT"] == second[2]["MASTER_PORT"]
    assert set(map(str, client.run(variables_left).values())) == {"[]"}
    ((_, ranks, _),) = run_ddp(client, gather_ranks, "again", n_workers=1)
    assert ranks == [0]


@pytest.mark.slow
def test_rank_0_listens_before_the_others_know_its_port(client: Any) -> None:
    """A port that is only chosen may be taken by another process before the ranks start."""
    first = dict(list(ranks._workers(client)[0].items())[:1])
    (port,) = ranks._run(client, first, [ranks._Call(ranks._listen)])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    (_, _, found), _ = run_ddp(client, gather_ranks, "")
    for closed in (port, int(found["MASTER_PORT"])):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", closed)).close()


def fail(rank: int) -> None:
    import torch

    if int(os.environ["RANK"]) == rank:
        raise ValueError("broken record")
    torch.distributed.barrier()


def die(rank: int) -> None:
    import torch

    if int(os.environ["RANK"]) == rank:
        os._exit(3)
    torch.distributed.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_stops_the_others(client: Any, cluster: Any, rank: int) -> None:
    pids = set(client.run(os.getpid).values())
    with pytest.raises(
        RankError, match=f"rank {rank} of 2 on worker .*-{rank}: ValueError: broken"
    ):
        run_ddp(client, fail, rank)
    cluster.wait_for_workers(2, timeout=patience(120))
    assert not pids & set(client.run(os.getpid).values())  # none waits for the failed rank
    assert [ranks for _, ranks, _ in run_ddp(client, gather_ranks, "")] == [[0, 1], [0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_worker_dies_is_an_error_and_the_next_run_works(
    client: Any, cluster: Any, rank: int
) -> None:
    with pytest.raises(RankError, match=f"rank {rank}: worker .*-{rank} was lost"):
        run_ddp(client, die, rank)
    cluster.wait_for_workers(2, timeout=patience(120))
    assert [ranks for _, ranks, _ in run_ddp(client, gather_ranks, "")] == [[0, 1], [0, 1]]


def test_too_few_workers_and_a_missing_torch_are_errors(home_of_module: Path) -> None:
    with cluster_of(without(home_of_module, "torch"), workers=1) as cluster:
        cluster.wait_for_workers(1, timeout=patience(60))
        with cluster.get_client() as client:
            with pytest.raises(RankError, match="run_ddp needs 2 workers; only 1 connected"):
                run_ddp(client, print, n_workers=2)
            with pytest.raises(
                RankError, match=r"worker .* cannot import torch: No module named torch"
            ):
                run_ddp(client, print)


def test_the_old_name_says_where_it_is() -> None:
    from gpujobs import torch

    with pytest.raises(GpujobsError, match="no part of gpujobs any more") as error:
        torch.run_ddp(None, print, n_workers=2)
    assert "examples/ddp/ranks.py" in error.value.hint


@pytest.fixture
def local(home: Path) -> Iterator[Cli]:
    need_library("torch")
    made = Cli(home, {"GPUJOBS_SITE": "local"}, None)
    shutil.copytree(DDP, made.work, dirs_exist_ok=True)
    yield made
    made("cancel", "--all")


@pytest.mark.slow
def test_the_example_trains_on_all_workers(local: Cli) -> None:
    words = ["--set", "gpus=0", "--set", "workers.count=2", "--set", "start_workers=2"]
    done = local("submit", "profile.yaml", "--wait", *words)
    assert done.returncode == 0, done.stderr
    assert local("logs", done.stdout.strip()).stdout.splitlines() == [
        "rank 0 on cpu: [1.0, -2.0, 3.0, 0.5]",
        "rank 1 on cpu: [1.0, -2.0, 3.0, 0.5]",
    ]


GROUPS = """
import os, sys
from distributed import Client
from ranks import run_ddp

def places(names):
    from distributed import get_worker
    return get_worker().name, os.environ["RANK"]

if __name__ == "__main__":
    with Client() as client:
        client.wait_for_workers(3)
        for rank, (name, number) in enumerate(run_ddp(client, places, None, backend="gloo")):
            assert rank == int(number)
            print(name.partition("-gpu-")[2])
        run_ddp(client, places, None)
"""


@pytest.mark.slow
def test_ranks_are_the_workers_with_gpus(local: Cli) -> None:
    """A PyTorch without CUDA on a GPU worker is an error, unless gloo is asked for."""
    fake = {"PYTHONPATH": str(NVML), "DASK_CUDA_TEST_SINGLE_GPU": "1", "FAKE_NVML_GPUS": "2"}
    local.env.update(fake)
    local.write("groups.py", GROUPS)
    groups = {"gpu": {"gpus": 2}, "prep": {"gpus": 0, "workers": {"count": 1}}}
    profile = {"groups": groups, "env": fake, "run": ["python", "groups.py"]}
    path = local.write("p.yaml", profile)
    done = local("submit", str(path), "--wait")
    assert done.returncode == 5, done.stderr
    (cluster,) = done.stdout.split()
    lines = local("logs", cluster).stdout.splitlines()
    assert lines[:2] == ["0-0", "0-1"]
    assert "has a GPU that its PyTorch" in lines[-1]


NODES = """
from distributed import Client
from ranks import run_ddp

def look():
    import os, socket, torch
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return socket.gethostname(), os.environ["MASTER_ADDR"], int(total)

if __name__ == "__main__":
    with Client() as client:
        print(*map(str, run_ddp(client, look, backend="gloo")), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sge"], indirect=True)
def test_ranks_of_several_nodes_meet_at_an_address_of_the_first(cli: Cli, backend: Backend) -> None:
    """The nodes of the Grid Engine have addresses of their own."""
    need_library("torch")
    cli.write("nodes.py", NODES)
    cli.write("ranks.py", (DDP / "ranks.py").read_text())
    profile = {
        "gpus": 2 * backend.gpus_per_node,
        "workers": {"gpus_per_worker": backend.gpus_per_node},
        "start_workers": 2,
        "run": ["python", "nodes.py"],
    }
    cluster = cli.submit(profile, "--wait")
    first, second = map(ast.literal_eval, cli("logs", cluster).stdout.splitlines())
    assert first[0] != second[0]
    assert first[1] == second[1] and not first[1].startswith("127.")
    assert first[2] == second[2] == 2
