"""Clients of this process that get the address of an encrypted cluster, and nothing else."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import dask.config
import pytest
from distributed import Client, LocalCluster
from distributed.security import Security

import gpujobs
from gpujobs.deploy import credentials
from gpujobs.deploy.credentials import LOADER, security_for
from gpujobs.errors import InputError

from ..support.processes import patience

QUIET: dict[str, Any] = {"quiet": True, "gpus_per_job": 0, "network": {"dashboard": "off"}}


def made(**keywords: Any) -> gpujobs.GPULocalCluster:
    return gpujobs.GPULocalCluster(n_workers=0, **{**QUIET, **keywords})


def workers_seen(address: str) -> int:
    with Client(address, timeout=patience(20)) as client:
        return len(client.nthreads())


def test_the_address_of_each_cluster_of_this_process_is_enough(home: Path) -> None:
    with made() as one, made() as two:
        assert one.scheduler_address.startswith("tls://")
        assert workers_seen(one.scheduler_address) == workers_seen(two.scheduler_address) == 0
        with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as another:
            assert workers_seen(another.scheduler_address) == 1
        with gpujobs.GPUJobQueueCluster.from_name(one.id) as attached:
            assert workers_seen(attached.scheduler_address) == 0


def test_a_second_view_of_a_cluster_has_its_certificate_when_the_first_is_gone() -> None:
    views = [View("tls://a:1"), View("tls://a:1")]
    for view in views:
        credentials.offer(view)
    assert views[0] == views[1]
    del view, views[0]
    gc.collect()
    assert security_for({"address": "tls://a:1"}) == "security"


class View:
    """Equal to others of its address, as clusters of dask are to those of their name."""

    security = "security"

    def __init__(self, address: str) -> None:
        self.scheduler_address = address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View)

    def __hash__(self) -> int:
        return 1


def test_an_address_of_another_cluster_gets_no_certificate_of_ours(home: Path) -> None:
    with made() as cluster:
        assert security_for({"address": cluster.scheduler_address}) is cluster.security
        assert security_for({"address": "tls://127.0.0.1:1"}) is None
        with pytest.raises(TypeError, match="ssl_context"):
            Client("tls://127.0.0.1:1", timeout=1)


def test_a_loader_of_the_user_stays(home: Path) -> None:
    own = f"{__name__}.{own_loader.__name__}"
    with dask.config.set({LOADER: own}), made() as cluster:
        assert dask.config.get(LOADER) == own
        with pytest.raises(TypeError, match="ssl_context"):
            Client(cluster.scheduler_address, timeout=1)


def own_loader(info: dict[str, str]) -> Security:
    return Security()


def test_a_file_that_the_jobs_do_not_read_is_refused(home: Path) -> None:
    options = {"scheduler_file": str(home / "mine.json")}
    with pytest.raises(InputError, match="the jobs read the one in the cluster's folder") as found:
        gpujobs.GPUSLURMCluster("./s.yaml", scheduler_options=options)
    assert "Client(cluster)" in str(found.value)


def test_the_file_in_the_folder_and_the_certificate_are_enough(home: Path) -> None:
    with made() as cluster:
        file = str(cluster.folder / "scheduler.json")
        with Client(scheduler_file=file, security=cluster.security) as client:
            assert client.nthreads() == {}


def test_dask_asks_no_function_for_the_certificate_of_a_file(home: Path) -> None:
    """If this fails, dask has learned it: docs/python.md, and the hint about files, can go."""
    with made() as cluster, pytest.raises(TypeError, match="ssl_context"):
        Client(scheduler_file=str(cluster.folder / "scheduler.json"), timeout=1)
