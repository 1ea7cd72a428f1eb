"""Messages that a new user meets first: ended clusters, foreign hosts, dead links, numbers of one."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpujobs.cli.main import main
from gpujobs.clusters.connect import _dashboard_lines, _dashboard_link
from gpujobs.clusters.folderstate import FolderState
from gpujobs.clusters.handle import ClusterHandle
from gpujobs.clusters.ledger import ClusterRecord, Ledger
from gpujobs.config.sitefiles import load_site, selects_this_host
from gpujobs.doctor.host import check_host
from gpujobs.errors import JobFailedError
from gpujobs.injob.folder import Ended, EndKind, Folder
from gpujobs.text import alike, note_text

from ..support.folderstate import folder_state, job_trace
from .report_data import RECORD
from .support import SLURM
from .test_cli import submitted


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nosuch")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        (EndKind.DONE, "had ended already"),
        (EndKind.FAILED, "had ended already"),
        (EndKind.CANCELLED, "is cancelled"),
        (None, "is cancelled"),
    ],
)
def test_only_a_cluster_that_has_not_ended_is_cancelled(
    home: Path, kind: EndKind | None, outcome: str
) -> None:
    submitted(home, "svd-0001", scheduler="local", submissions=())
    folder = home / ".gpujobs" / "svd-0001"
    folder.chmod(0o700)
    if kind:
        Folder(str(folder)).end(Ended(kind, 0))
    done = CliRunner().invoke(main, ["cancel", "svd-0001"])
    assert (done.exit_code, done.output) == (0, f"svd-0001 {outcome}\n")


def test_a_walltime_that_was_too_short_names_the_cure(home: Path) -> None:
    submitted(home, "svd-0001", scheduler="local", submissions=())
    folder = home / ".gpujobs" / "svd-0001"
    folder.chmod(0o700)
    Folder(str(folder)).end(Ended(EndKind.WALLTIME, 143, "run: the walltime is nearly over"))
    cure = "a longer `walltime`, or checkpoints and `requeue`"
    ledger = Ledger()
    with pytest.raises(JobFailedError) as found:
        ClusterHandle("svd-0001", ledger).wait()
    assert found.value.hint == f"{cure}; gpujobs status svd-0001"
    done = CliRunner().invoke(main, ["status", "svd-0001"])
    assert f"  cure     {cure}\n" in done.output


def test_clusters_of_doctor_are_listed_by_their_id_only(home: Path) -> None:
    submitted(home, "svd-0001", submissions=(), finished=True)
    submitted(home, "doctor-0001", submissions=(), finished=True, trial=True)
    for name in ("svd-0001", "doctor-0001"):
        (home / ".gpujobs" / name).chmod(0o700)
    listed = CliRunner().invoke(main, ["status", "--all"]).output
    assert "svd-0001" in listed and "doctor-0001" not in listed
    assert "doctor-0001" in CliRunner().invoke(main, ["status", "doctor-0001"]).output


def test_doctor_says_that_a_host_is_none_of_the_site(home: Path) -> None:
    (home / "s.yaml").write_text(f"{SLURM}hostnames: ['delta-login.*']\n")
    checks = {check.name: check for check in check_host(load_site("./s.yaml"))}
    here = socket.gethostname()
    assert checks["cluster"].result == f"this host, {here}, is none that s names"
    assert "sites init" in checks["cluster"].remedy


@pytest.mark.parametrize(("own", "hosts"), [(True, "['.*']"), (False, "[nosuch]"), (None, "[]")])
def test_a_site_selects_the_hosts_that_it_names(home: Path, own: bool | None, hosts: str) -> None:
    (home / "s.yaml").write_text(f"{SLURM}hostnames: {hosts}\n")
    assert selects_this_host(load_site("./s.yaml").document.value) is own


def test_doctor_says_that_the_batch_scheduler_has_none_of_the_queues(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine with Slurm: sinfo, in the place of its own, knows the partition `other`."""
    program = home / "sinfo"
    columns = ("n1", 80), ("other*", 80), ("idle", 40), ("0/8/0/8", 40), ("gpu:4", 400), ("", 400)
    row = "".join(text.ljust(width) for text, width in (*columns, ("1000", 30), ("up", 20)))
    program.write_text(f"#!/bin/sh\necho '{row}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:/usr/bin:/bin")
    (home / "s.yaml").write_text(SLURM)
    found = [check.result for check in check_host(load_site("./s.yaml")) if check.name == "queues"]
    assert found == ["this is not s: slurm has none of its queues (gpu)"]
    (home / "s.yaml").write_text(SLURM.replace("  gpu:", "  other:"))
    assert "queues" not in {check.name for check in check_host(load_site("./s.yaml"))}


STATE = folder_state(
    head=0, jobs={0: job_trace("gpu01")}, address="tls://10.0.0.1:8786", dashboard=8787
)


@pytest.mark.parametrize(
    ("dashboard", "state", "link"),
    [
        ("local", STATE, "http://127.0.0.1:8787/status"),
        ("on", STATE, "http://10.0.0.1:8787/status"),
        ("on", replace(STATE, head=None), "http://127.0.0.1:8787/status"),
        ("off", STATE, None),
        ("local", replace(STATE, dask=replace(STATE.dask, dashboard=None)), None),
    ],
)
def test_the_link_of_a_client_leads_to_the_dashboard(
    dashboard: str, state: FolderState, link: str | None
) -> None:
    assert _dashboard_link(replace(RECORD, dashboard=dashboard), state) == link


@pytest.mark.parametrize("there", [True, False])
def test_connect_says_that_the_dashboard_needs_bokeh(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    if not there:
        monkeypatch.setitem(__import__("sys").modules, "bokeh", None)
    record: ClusterRecord = replace(RECORD, dashboard="local")
    (first, *_) = _dashboard_lines(record, STATE, "10.0.0.1", 8787)
    assert ("if the Python of the jobs has bokeh" in first) is not there


def test_a_note_is_named_once() -> None:
    assert note_text("space is low") == "note: space is low"
    assert note_text("warning: run: there is no file") == "warning: run: there is no file"


def test_words_that_are_alike_are_found() -> None:
    sites = ["perlmutter", "pelle", "delta", "polaris"]
    assert alike("perl", sites) == ["perlmutter", "pelle"]
    assert alike("zzz", sites) == alike("", sites) == []
