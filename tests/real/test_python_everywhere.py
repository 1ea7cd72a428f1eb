"""The cluster class on every batch scheduler."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpujobs.deploy import GPUJobQueueCluster
from gpujobs.deploy.cluster import class_for
from gpujobs.errors import JobFailedError, RefusedError

from ..support.backend import Backend
from ..support.cli import text_of
from ..support.jobevents import supervisor_of
from ..support.processes import patience, processes_with, until

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.conformance]

QUIET = 8
"""Seconds in which a cluster that submits without end would have submitted again."""


@pytest.fixture
def make(
    backend: Backend, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Return a function that makes a cluster of the batch scheduler's class; ``site`` changes the site file."""
    for name, value in {**backend.env(), "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    made: list[Any] = []

    def cluster(site: dict[str, Any] | None = None, **keywords: Any) -> Any:
        path = home / "here.yaml"
        path.write_text(text_of(backend.site() | (site or {})))
        options = {"dashboard_address": ":0", **backend.scheduler_options}
        keywords = {
            "worker_memory": "1GiB",
            "quiet": True,
            "scheduler_options": options,
            **keywords,
        }
        made.append(class_for(backend.name, GPUJobQueueCluster)(str(path), **keywords))
        return made[-1]

    yield cluster
    for found in made:
        found.close()
    backend.wait_empty(60)


@pytest.mark.conformance
def test_a_cluster_scales_works_and_leaves_no_job(
    make: Callable[..., Any], backend: Backend
) -> None:
    cluster = make(gpus_per_job=2)
    cluster.scale(4)
    cluster.wait_for_workers(4, timeout=patience(120))
    assert (
        cluster.plan
        == cluster.observed
        == {f"{cluster.id}-{job}-{gpu}" for job in range(2) for gpu in range(2)}
    )
    with cluster.get_client() as client:
        assert client.submit(sum, [1, 2]).result() == 3
        assert client.scheduler.address.startswith("tls://")
    until(lambda: len({gpu["uuid"] for job in cluster.jobs for gpu in job["gpus"]}) == 4, 20)
    cluster.scale(2)
    until(lambda: len(cluster.scheduler_info["workers"]) == 2, 60)
    until(lambda: len([line for line in backend.queue() if cluster.id in line]) == 1, 60)


@pytest.mark.slow
def test_a_broken_environment_is_told(make: Callable[..., Any]) -> None:
    cluster = make(site={"setup": "echo broken on purpose; exit 3"})
    cluster.scale(2)
    with pytest.raises(JobFailedError, match="broken on purpose"):
        cluster.wait_for_workers(2, timeout=patience(120))


@pytest.mark.conformance("sge", "pbs")
def test_a_refused_submission_raises(make: Callable[..., Any], backend: Backend) -> None:
    queue = {**backend.site()["queues"]["main"], "name": "nosuch"}
    cluster = make(site={"queues": {"nosuch": queue}})
    with pytest.raises(RefusedError, match=r"nosuch|queue"):
        cluster.scale(2)
    assert cluster.plan == set()


@pytest.mark.slow
def test_a_cancelled_job_is_replaced(make: Callable[..., Any], backend: Backend) -> None:
    cluster = make(gpus_per_job=1)
    cluster.scale(2)
    cluster.wait_for_workers(2, timeout=patience(120))
    backend.kill_job(cluster.jobs[0]["id"])
    until(lambda: f"{cluster.id}-2" in cluster.observed, 120)


@pytest.mark.slow
def test_a_batch_scheduler_that_is_away_delays_a_scale_only(
    make: Callable[..., Any], backend: Backend
) -> None:
    cluster = make(gpus_per_job=1)
    with away(backend, 12):
        cluster.scale(2)
    cluster.wait_for_workers(2, timeout=patience(120))
    assert len([line for line in backend.queue() if cluster.id in line]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancelled", "killed"])
def test_a_head_that_goes_while_its_owner_lives_ends_the_cluster(
    make: Callable[..., Any], backend: Backend, how: str, capfd: Any, caplog: Any
) -> None:
    if how == "killed" and not backend.same_host:
        pytest.skip("its jobs run on other hosts")
    cluster = make(gpus_per_job=1, scheduler="job", scheduler_options=None, quiet=False)
    cluster.scale(2)
    cluster.wait_for_workers(2, timeout=patience(120))
    head = next(job for job in cluster.jobs if job["head"])
    if how == "cancelled":
        backend.kill_job(head["id"])
    else:  # its script and its supervisor, which have no time to write why
        supervisor = psutil.Process(supervisor_of(cluster.folder, head["number"]))
        for process in (supervisor.parent(), supervisor):
            process.kill()
    until(lambda: cluster._pool.errors, 120, "the end of the cluster")
    with pytest.raises(JobFailedError, match=f"{cluster.id} has ended: "):
        cluster.wait_for_workers(2)
    submitted = len(list((cluster.folder / "scripts").iterdir()))
    time.sleep(QUIET)
    with pytest.raises(JobFailedError, match="has ended"):
        cluster.scale(3)
    assert len(list((cluster.folder / "scripts").iterdir())) == submitted
    assert json.loads((cluster.folder / "ended").read_text())["kind"] in ("cancelled", "failed")
    backend.wait_empty(60)
    if backend.same_host:
        until(lambda: not processes_with(f"GPUJOBS_JOB_NAME={cluster.id}\0"), 30)
    out, err = capfd.readouterr()
    counts = [text.count("has ended") for text in (out, err, caplog.text)]
    assert max(counts) == 1, counts  # reported once, on stderr or to a handler or to both


@contextlib.contextmanager
def away(backend: Backend, seconds: float) -> Iterator[None]:
    if not backend.can_pause:
        pytest.skip("others use this batch scheduler")
    thread = threading.Thread(target=backend.pause, args=(seconds,))
    thread.start()
    yield
    thread.join()
