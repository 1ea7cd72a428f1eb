"""What listens where, and sites that require encryption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.config
import pytest
from distributed import Security
from distributed.http.health import HealthHandler

import gpujobs
from gpujobs.errors import InputError
from gpujobs.injob.network import on_loopback
from gpujobs.injob.options import RankOptions, parse
from gpujobs.injob.rank import initialize, write_plan
from gpujobs.planning.plan import Machine
from gpujobs.planning.render import render

from ..support.each import each
from .support import error_of, made_plan

MACHINE = Machine(gpus=("0",), cpus=8, memory=32 * 2**30, busy={})


def text(home: Path, site: str = "s.yaml", **network: object) -> str:
    made = made_plan(home, {"gpus": 1, "network": network}, site, MACHINE)
    text = "\n".join(script.text for script in render(made, "svd-1"))
    return " ".join(text.replace("\\\n", " ").split())


@each("site", ["s.yaml", "local"])
def test_the_dashboard_listens_on_loopback_unless_asked_otherwise(home: Path, site: str) -> None:
    for network in ({}, {"dashboard": "local"}):
        assert "--dashboard-address=127.0.0.1:0" in text(home, site, **network)

    assert "--dashboard-address=:0" in text(home, site, dashboard="on")
    off = text(home, site, dashboard="off")
    assert "--dashboard-address=127.0.0.1:0 --no-dashboard" in off
    notes = made_plan(home, {"gpus": 1, "network": {"dashboard": "on"}}, site, MACHINE).notes
    assert any("without a password" in note for note in notes)


def test_a_wrong_word_for_the_dashboard_is_refused(home: Path) -> None:
    error = error_of(home, {"gpus": 1, "network": {"dashboard": "yes"}})
    assert "`network.dashboard`: 'yes' is not one of off, local or on" in error


def test_the_ranks_know_where_the_dashboard_listens(home: Path) -> None:
    ranks = {"layout": "mpi", "run_on": "ranks", "run": ["svd.py"], "gpus": 1}
    script = render(made_plan(home, {**ranks, "network": {"dashboard": "off"}}), "svd-1")[0].text
    assert "--dashboard=off" in script.partition(" rank ")[2]
    argv = ["rank", "--folder=x", "--size=1", "--gpus=1", "--dashboard=off", "--", "svd.py"]
    parsed: Any = parse(argv)
    assert parsed.dashboard == "off"


# -- encryption --------------------------------------------------------------------------------------------------
@pytest.fixture
def strict(home: Path) -> str:
    network = "network: {encryption: required}\ncontact: help@example.org\n"
    (home / "strict.yaml").write_text((home / "s.yaml").read_text() + network)
    return "strict.yaml"


@each(
    ("network", "words"),
    [
        ({"protocol": "ucxx"}, "ucxx is not encrypted"),
        ({"protocol": "ucx"}, "ucxx is not encrypted"),
        ({"protocol": "tcp", "encryption": False}, "`encryption: false` is not possible"),
        ({"protocol": "ws", "encryption": False}, "`encryption: false` is not possible"),
        ({"dashboard": "on"}, "the dashboard is not encrypted"),
    ],
)
def test_a_site_may_require_encryption(home: Path, strict: str, network: Any, words: str) -> None:
    error = error_of(home, {"gpus": 2, "network": network}, strict)
    assert f"{words}: site strict requires encryption between its nodes" in error
    assert "help@example.org" in error and "strict.yaml:" in error and "svd.yaml:" in error


def test_what_is_encrypted_is_accepted(home: Path, strict: str) -> None:
    for network in ({}, {"encryption": True}, {"protocol": "ws"}):
        assert made_plan(home, {"gpus": 2, "network": network}, strict).transport.encrypted


def test_a_site_contradicts_itself(home: Path) -> None:
    network = "network: {encryption: required, protocols: [ucxx, tcp]}\n"
    (home / "odd.yaml").write_text((home / "s.yaml").read_text() + network)
    with pytest.raises(InputError, match="ucxx has no encryption"):
        made_plan(home, {"gpus": 2}, "odd.yaml")


WITHOUT_ENCRYPTION: list[dict[str, Any]] = [
    {"dashboard_address": ":8787"},
    {"dashboard_address": 8787},
    {"dashboard_address": "0.0.0.0:0"},
    {"dashboard_address": "127.0.0.1:0,:0"},
    {"dashboard_address": ["127.0.0.1:0", 8787]},
    {"dashboard_address": None},  # dask: the address of the dask scheduler
    {"dashboard": False, "dashboard_address": ":0"},  # the HTTP server is there without it, too
    {"protocol": "tcp"},
    {"protocol": "tcp://"},
    {"protocol": "ucxx"},
    {"protocol": ["tls", "tcp"], "host": ["127.0.0.1", "127.0.0.1"]},
    {"protocol": "", "security": Security()},
    {"security": None},
    {"jupyter": True},
    {"services": {("health", ":0"): HealthHandler}},
]
"""Options of a dask scheduler that open a listener without encryption."""


def rejected(option: str, **keywords: Any) -> InputError:
    """Return the error of a cluster at the site that requires encryption."""
    with pytest.raises(InputError) as caught:
        gpujobs.GPUSLURMCluster("./strict.yaml", quiet=True, **keywords)
    message = str(caught.value)
    assert f": {option}: " in message
    assert "site strict requires encryption between its nodes" in message
    assert "strict.yaml:" in message and "help@example.org" in message
    return caught.value


def left(home: Path) -> list[str]:
    """Return the folders of clusters."""
    return [path.name for path in (home / "home" / ".gpujobs").glob("*/*")]


@each("options", WITHOUT_ENCRYPTION, ids=str)
def test_options_of_a_dask_scheduler_that_break_the_encryption_are_refused(
    home: Path, strict: str, options: dict[str, Any]
) -> None:
    option = next(name for name in reversed(options) if name not in ("host", "dashboard"))
    error = rejected(option, scheduler_options=options)
    assert str(error.problems[0].position) == "scheduler_options"
    assert all("leave it out" in problem.hint for problem in error.problems)
    assert left(home) == []


def test_several_options_are_reported_together(home: Path, strict: str) -> None:
    options = {"protocol": "tcp", "dashboard_address": ":0"}
    assert len(rejected("protocol", scheduler_options=options).problems) == 2


def test_options_in_dasks_configuration_that_break_the_encryption_are_refused(
    home: Path, strict: str
) -> None:
    with dask.config.set({"jobqueue.slurm.scheduler-options": {"dashboard_address": ":8787"}}):
        error = rejected("dashboard_address")
        place = "dask configuration jobqueue.slurm.scheduler-options"
        assert str(error.problems[0].position) == place
        quiet = {"scheduler_options": {"dashboard_address": "127.0.0.1:0"}}
        with gpujobs.GPUSLURMCluster("./strict.yaml", quiet=True, **quiet):  # has priority
            pass


def test_options_beside_a_profile_that_break_the_encryption_are_refused(
    home: Path, strict: str
) -> None:
    (home / "p.yaml").write_text("gpus: 1\n")
    options = {"scheduler_options": {"dashboard_address": ":8787"}}
    with pytest.raises(InputError, match="the dashboard is not encrypted"):
        gpujobs.GPUSLURMCluster.from_profile("p.yaml", site="./strict.yaml", **options)


@each(
    "keywords",
    [
        {"dashboard_address": ":8787"},
        {"dashboard_address": 8787},
        {"scheduler_kwargs": {"dashboard_address": ":8787"}},
        {"scheduler_kwargs": {"protocol": "tcp"}},
        {"scheduler_options": {"security": Security()}},
        {"network": {"dashboard": "on"}},
        {"network": {"encryption": False}},
        {"protocol": "ucxx"},
        {"security": None, "network": {"protocol": "tcp", "encryption": False}},
        {"worker_options": {"dashboard_address": ":0"}},
        {"worker_extra_args": ["--dashboard-address", ":0"]},
    ],
    ids=str,
)
def test_a_local_cluster_refuses_keywords_that_break_the_sites_encryption(
    home: Path, keywords: dict[str, Any]
) -> None:
    site = "description: x\nscheduler: local\nnetwork: {encryption: required}\n"
    (home / "here.yaml").write_text(f"{site}queues: {{this: {{}}}}\n")
    with pytest.raises(InputError, match="site here requires encryption between its nodes"):
        gpujobs.GPULocalCluster("./here.yaml", gpus_per_job=0, **keywords)
    assert left(home) == []


def test_options_that_keep_the_encryption_are_accepted(home: Path, strict: str) -> None:
    options = {"protocol": "tls://", "dashboard_address": "localhost:0", "host": "127.0.0.1"}
    keywords: dict[str, Any] = {"scheduler_options": options, "quiet": True}
    with gpujobs.GPUSLURMCluster("./strict.yaml", **keywords) as cluster:
        assert cluster.scheduler_address.startswith("tls://")
        assert cluster.scheduler.http_server.address in ("127.0.0.1", "::1")
    options = {"protocol": "tcp", "security": None, "dashboard_address": ":0", "host": "127.0.0.1"}
    keywords = {"scheduler_options": options, "network": {"encryption": False}, "quiet": True}
    with gpujobs.GPUSLURMCluster("./s.yaml", **keywords) as cluster:  # does not require it
        assert cluster.scheduler_address.startswith("tcp://")


@each("address", [":0", "0.0.0.0:0", 9000, None])
def test_a_strict_site_refuses_http_servers_of_workers_that_others_reach(
    home: Path, strict: str, address: Any
) -> None:
    workers = {"options": {"dashboard_address": address}}
    error = error_of(home, {"gpus": 1, "workers": workers}, strict)
    assert "the HTTP server of a worker is not encrypted" in error
    assert "strict.yaml:" in error and "svd.yaml:" in error
    groups = {"a": {"gpus": 1}, "b": {"gpus": 1, "workers": workers}}
    assert "group b: the HTTP server" in error_of(home, {"groups": groups}, strict)
    assert made_plan(home, {"gpus": 1, "workers": workers})
    there = {"options": {"dashboard_address": "127.0.0.1:9000"}}
    assert made_plan(home, {"gpus": 1, "workers": there}, strict)


@each(
    ("address", "expected"),
    [
        ("127.0.0.1:8787", True),
        ("127.0.0.1", True),
        ("127.1.2.3:0", True),
        ("localhost:0", True),
        (["127.0.0.1:0", ("localhost", 1)], True),
        ("127.0.0.1:0,localhost:0", True),
        (":0", False),
        ("", False),
        ("8787", False),
        (8787, False),
        ("0.0.0.0:0", False),
        ("10.0.0.1:0", False),
        ("localhost.example.org:0", False),
        ("127.0.0.1:0,:0", False),
        (["127.0.0.1:0", ":0"], False),
        ([], False),
        (None, False),
    ],
)
def test_addresses_on_the_loopback_interface_are_recognized(
    address: object, expected: bool
) -> None:
    assert on_loopback(address) is expected


RANKS = {"layout": "mpi", "run_on": "ranks", "run": ["svd.py"], "gpus": 1}


@each(
    "keywords",
    [
        {"protocol": "tcp"},
        {"protocol": "ucxx://"},
        {"dashboard_address": ":8787"},
        {"worker_options": {"dashboard_address": ":0"}},
    ],
    ids=str,
)
def test_a_script_in_the_ranks_of_mpi_keeps_the_encryption_of_the_site(
    home: Path, strict: str, monkeypatch: pytest.MonkeyPatch, keywords: dict[str, Any]
) -> None:
    assert "--encryption=required" in render(made_plan(home, RANKS, strict), "svd-1")[0].text
    assert "--encryption" not in render(made_plan(home, RANKS), "svd-1")[0].text
    argv = ["rank", "--folder=x", "--size=1", "--gpus=1", "--encryption=required"]
    parsed = parse([*argv, "--worker-class=dask_cuda.CUDAWorker", "--", "svd.py"])
    assert isinstance(parsed, RankOptions)
    monkeypatch.setenv("GPUJOBS_INITIALIZE", "")
    write_plan(parsed, [0])
    with pytest.raises(ValueError, match="the site requires encryption between its nodes"):
        initialize(**keywords)
