"""A view of a cluster as a cluster of dask: its status may be known on another host only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("distributed")
from distributed import LocalCluster

from gpujobs.clusters.connect import Connection
from gpujobs.deploy.attached import AttachedCluster
from gpujobs.errors import GpujobsError, InputError


class ViewFromAfar:
    """A cluster of which only the dask scheduler can be reached; it notes what it is asked to do."""

    id = "svd-7f3a"
    status = None

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.done: list[str] = []

    def connection(self) -> Connection:
        if not self.address:
            raise GpujobsError("there is no dask scheduler")
        return Connection(
            self.address, None, "", self.folder, {"": 2}, lambda: self.done.append("tunnel closed")
        )

    def scale(self, workers: int | None = None, **groups: int) -> None:
        self.done.append(f"scale {workers} {groups}")

    def cancel(self) -> None:
        self.done.append("cancel")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster:
        yield cluster.scheduler_address


def test_a_view_that_ends_with_its_close_cancels_once(address: str, tmp_path: Path) -> None:
    view = ViewFromAfar(address, tmp_path)
    cluster = AttachedCluster(view, ends=True)
    cluster.scale(jobs=3)
    cluster.close()
    cluster.close()
    assert view.done[:3] == ["scale 6 {}", "cancel", "tunnel closed"]
    assert view.done.count("cancel") == 1


def test_a_view_that_is_closed_leaves_the_cluster_unless_it_is_shut_down(
    address: str, tmp_path: Path
) -> None:
    for end, done in (("close", []), ("shutdown", ["cancel"])):
        view = ViewFromAfar(address, tmp_path)
        getattr(AttachedCluster(view), end)()
        assert view.done == [*done, "tunnel closed"]


def test_a_view_that_does_not_connect_cancels_what_it_has_submitted(tmp_path: Path) -> None:
    for ends, done in ((True, ["cancel"]), (False, [])):
        view = ViewFromAfar("", tmp_path)
        with pytest.raises(GpujobsError, match="there is no dask scheduler") as kept:
            AttachedCluster(view, ends=ends)
        assert view.done == done, kept  # its traceback keeps the object, as in a notebook


def test_a_view_whose_status_is_elsewhere_shows_what_dask_knows(
    address: str, tmp_path: Path
) -> None:
    cluster = AttachedCluster(ViewFromAfar(address, tmp_path))
    assert cluster.plan == cluster.requested == cluster.observed and len(cluster.observed) == 1
    assert "svd-7f3a" in cluster._repr_html_()
    with pytest.raises(InputError, match="known on its login node only"):
        cluster.jobs  # noqa: B018
    cluster.close()
