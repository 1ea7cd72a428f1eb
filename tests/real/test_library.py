"""`gpujobs.plan`, `gpujobs.submit` and `ClusterHandle`: for workflow managers and other programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpujobs
from gpujobs.errors import InputError, JobFailedError, NoSuchClusterError

from ..conftest import local_cli
from ..support.processes import patience, processes_with, until

PROFILE: dict[str, Any] = {"site": "local", "gpus": 0, "workers": {"count": 1}}


@pytest.fixture(autouse=True)
def folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    for name, value in local_cli(home, request).env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    yield home
    # The script of a job writes that it has ended just before it exits.
    until(lambda: not processes_with(str(home)), 20, lambda: str(processes_with(str(home))))


def test_a_plan_is_made_from_a_mapping_and_from_a_file(folder: Path) -> None:
    plan = gpujobs.plan({**PROFILE, "workers": {"count": 3}})
    assert [group.n_workers for group in plan.groups] == [3]
    path = folder / "prep.yaml"
    path.write_text("gpus: 0\nworkers: {count: 2}\n")
    plan = gpujobs.plan(path, site="local", settings={"workers": {"count": 4}})
    assert (plan.name, [group.n_workers for group in plan.groups]) == ("prep", [4])


def test_a_wrong_value_is_named() -> None:
    with pytest.raises(InputError, match=r"workers\.count"):
        gpujobs.plan({**PROFILE, "workers": {"count": "many"}})
    with pytest.raises(NoSuchClusterError):
        gpujobs.ClusterHandle("svd-0000")


@pytest.mark.stub
def test_a_run_to_its_end_is_done_and_has_its_output() -> None:
    cluster = gpujobs.submit({**PROFILE, "run": ["echo", "hello"]})
    states: list[str] = []
    report = cluster.wait(patience(120), watch=lambda report: states.append(report.state))
    assert report.state == states[-1] == "DONE"
    assert list(cluster.logs()) == ["hello"]
    assert gpujobs.ClusterHandle(cluster.id).status().state == "DONE"


@pytest.mark.stub
def test_a_run_that_fails_is_an_error_with_its_exit_code() -> None:
    cluster = gpujobs.submit({**PROFILE, "run": ["sh", "-c", "exit 3"]})
    with pytest.raises(JobFailedError, match=f"{cluster.id}: .*3"):
        cluster.wait(patience(120))


def test_a_cluster_that_stays_computes_scales_and_is_cancelled() -> None:
    cluster = gpujobs.submit(PROFILE)
    try:
        assert cluster.wait(patience(120)).connected == 1
        with cluster.client() as client:
            assert client.submit(sum, [1, 2]).result() == 3
        cluster.scale(2)
        until(lambda: cluster.status().connected == 2, 60)
        with pytest.raises(InputError, match="no group"):
            cluster.scale(gpu=1)
    finally:
        cluster.cancel()
    with pytest.raises(JobFailedError, match="cancelled"):
        cluster.wait(patience(60))


@pytest.mark.stub
def test_a_wait_that_takes_too_long_is_a_timeout() -> None:
    cluster = gpujobs.submit({**PROFILE, "run": ["sleep", "600"]})
    try:
        with pytest.raises(TimeoutError, match=cluster.id):
            cluster.wait(patience(1))
    finally:
        cluster.cancel()
    until(lambda: not cluster.status().active, 60)
