"""Groups in the cluster class, on a real Slurm."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest

import gpujobs
from gpujobs.errors import InputError, JobFailedError, RefusedError

from ..support.backend import SlurmBackend
from ..support.cli import text_of
from ..support.owner import backend, calls, make, site  # noqa: F401
from ..support.processes import patience, until

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]

PREP = {"gpus": 0, "queue": "cpu", "workers": {"threads": 2, "resources": {"MEMORY": 4}}}
GROUPS: dict[str, Any] = {"gpu": {"gpus_per_job": 2}, "prep": PREP}


def present(cluster: Any) -> dict[str, int]:
    """Return how many workers of each group are connected."""
    return dict(Counter(name.split("-")[2] for name in cluster.observed))


def where(n: int) -> str:
    from distributed import get_worker

    time.sleep(0.02)
    return str(get_worker().name)


def hold(n: int) -> str:
    from distributed import get_worker

    time.sleep(3)
    return str(get_worker().name)


@pytest.mark.slow
def test_groups_are_scaled_by_name(make: Callable[..., Any], home: Path) -> None:
    cluster = make(groups=GROUPS)
    assert calls(home, "sbatch") == 0  # no group says with how many workers it starts
    cluster.scale(gpu=4, prep=2)
    assert calls(home, "sbatch") == 2  # one array for each group
    cluster.wait_for_workers(6, timeout=patience(60))
    assert present(cluster) == {"gpu": 4, "prep": 2}
    assert cluster.plan == cluster.requested == cluster.observed
    assert set(cluster.workers) == {f"{cluster.id}-{name}" for name in ("gpu-0", "gpu-1", "prep-2", "prep-3")}  # fmt: skip
    options = {name: spec["options"]["nthreads"] for name, spec in cluster.worker_spec.items()}
    assert options[f"{cluster.id}-prep-2"] == 2 and options[f"{cluster.id}-gpu-0"] == 1
    with cluster.get_client() as client:
        for resource, group in (("GPU", "gpu"), ("MEMORY", "prep")):
            futures = client.map(where, range(12), resources={resource: 1}, pure=False)
            found = {name.split("-")[2] for name in client.gather(futures)}
            assert found == {group}
    cluster.scale(gpu=2)
    until(lambda: present(cluster) == {"gpu": 2, "prep": 2}, 30)
    cluster.scale(prep=0)
    until(lambda: present(cluster) == {"gpu": 2}, 30)
    assert [job["group"] for job in cluster.jobs if job["phase"] == "RUNNING"] == ["gpu"]
    assert "--group=prep" in cluster.job_script("prep")


def test_scaling_without_a_group_is_refused(make: Callable[..., Any]) -> None:
    cluster = make(groups=GROUPS)
    with pytest.raises(InputError, match="name those to scale"):
        cluster.scale(4)
    with pytest.raises(InputError, match="no group 'other'; it has gpu, prep"):
        cluster.scale(other=4)
    with pytest.raises(InputError, match="gpu=…"):
        cluster.adapt(maximum=4)
    with pytest.raises(InputError, match="a cluster with groups has a number of each"):
        make(groups=GROUPS, n_workers=2)
    with pytest.raises(InputError, match="has no groups, so no 'gpu'"):
        make().scale(gpu=4)
    with pytest.raises(InputError, match="waiting for 1 worker, but only 0 were asked for"):
        cluster.wait_for_workers(1)


@pytest.mark.slow
def test_one_groups_refusal_names_it_and_leaves_the_others(
    make: Callable[..., Any], backend: SlurmBackend
) -> None:
    wrong = {**PREP, "directives": ["--constraint=nosuchfeature"]}
    cluster = make(groups={"gpu": {"gpus_per_job": 2}, "prep": wrong})
    with pytest.raises(RefusedError, match=r"(?s)group prep: .* feature"):
        cluster.scale(gpu=2, prep=2)
    assert len(cluster.plan) == 2
    (shown,) = gpujobs.ClusterHandle(cluster.id).status().errors
    assert re.search(r"group prep: slurm refused the job: .* feature", shown), shown
    cluster.scale(gpu=4)
    cluster.wait_for_workers(4, timeout=patience(60))


@pytest.mark.slow
def test_a_broken_group_is_named_after_three_starts(make: Callable[..., Any]) -> None:
    broken = {**PREP, "environment": {"python": "/nosuch/python"}}
    cluster = make(groups={"gpu": {"gpus": 2, "gpus_per_job": 2}, "prep": broken})
    cluster.wait_for_workers(2, timeout=patience(60))  # a group with a number starts with it
    cluster.scale(prep=1)
    with pytest.raises(JobFailedError, match=r"group prep: 3 jobs in a row .*/nosuch/python"):
        cluster.wait_for_workers(3, timeout=patience(90))
    assert present(cluster) == {"gpu": 2}
    cluster.wait_for_workers(2)  # the others are there
    assert "no more jobs: group prep: 3 jobs in a row ended before" in cluster._repr_html_()


@pytest.mark.slow
def test_one_group_adapts_to_the_tasks_that_it_can_run(make: Callable[..., Any]) -> None:
    cluster = make(groups={"gpu": {"gpus_per_job": 1}, "prep": {**PREP, "workers": {**PREP["workers"], "count": 1}}})  # fmt: skip
    cluster.wait_for_workers(1, timeout=patience(60))
    cluster.adapt(group="gpu", minimum=0, maximum=3, interval="200ms", target_duration="100ms", hold="1s")  # fmt: skip
    with cluster.get_client() as client:
        assert client.submit(where, 0).result().split("-")[2] == "prep"
        plain = client.map(where, range(100, 300))
        client.gather(plain)
        assert present(cluster) == {"prep": 1}  # plain tasks start no GPU job
        futures = client.map(hold, range(6), resources={"GPU": 1})
        until(lambda: present(cluster).get("gpu") == 3, 60)
        assert {name.split("-")[2] for name in client.gather(futures)} == {"gpu"}
        del futures, plain
        until(lambda: present(cluster) == {"prep": 1}, 60)
    assert cluster._repr_html_().count(">adaptive<") == 1


@pytest.mark.slow
def test_two_groups_adapt_at_the_same_time(make: Callable[..., Any]) -> None:
    cluster = make(groups=GROUPS)
    options = {"interval": "200ms", "target_duration": "100ms", "hold": "1s"}
    cluster.adapt(group="gpu", maximum_jobs=1, **options)
    cluster.adapt(group="prep", maximum=2, **options)
    with cluster.get_client() as client, dask.annotate(resources={"GPU": 1}):
        assert dask.delayed(where)(1).compute(scheduler=client).split("-")[2] == "gpu"
    with cluster.get_client() as client:
        futures = client.map(hold, range(8), resources={"MEMORY": 4})
        assert {name.split("-")[2] for name in client.gather(futures)} == {"prep"}
        del futures
        until(lambda: present(cluster) == {}, 60)


@pytest.mark.slow
def test_the_dask_scheduler_runs_in_a_job_of_a_group(make: Callable[..., Any]) -> None:
    groups = {"gpu": {"gpus": 2, "gpus_per_job": 2}, "prep": {**PREP, "workers": {"count": 1}}}
    cluster = make(groups=groups, scheduler="job", head={"group": "prep"}, scheduler_options=None)
    cluster.wait_for_workers(3, timeout=patience(90))
    assert present(cluster) == {"gpu": 2, "prep": 1}
    assert [job["group"] for job in cluster.jobs if job["head"]] == ["prep"]
    cluster.adapt(group="gpu", minimum=1, maximum=2, interval="200ms")
    with cluster.get_client() as client:
        assert "gpu" in client.submit(where, 1, resources={"GPU": 1}).result()
    attached = gpujobs.GPUJobQueueCluster.from_name(cluster.id)
    with pytest.raises(InputError, match="owned by a Python process"):
        attached.scale(gpu=4)
    attached.close()


@pytest.mark.slow
def test_a_profile_with_groups_starts_with_all(site: Callable[..., str], home: Path) -> None:
    groups = {"gpu": {"gpus": 2}, "prep": {**PREP, "workers": {"count": 2, "memory": "1GiB"}}}
    path = home / "profile.yaml"
    path.write_text(text_of({"groups": groups}))
    options = {"quiet": True, "scheduler_options": {"dashboard_address": ":0"}}
    with gpujobs.GPUJobQueueCluster.from_profile(path, site=site(), **options) as cluster:
        cluster.wait_for_workers(4, timeout=patience(60))
        assert present(cluster) == {"gpu": 2, "prep": 2}
