"""The choice of the protocol from measured rates, the settings of UCX, the GPUs that a job cannot open."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.clusters.folderstate import read_state
from gpujobs.injob.folder import TRANSPORT, Folder
from gpujobs.injob.gpus import gpu_models, hidden_gpus
from gpujobs.injob.network import node_name
from gpujobs.injob.options import SuperviseOptions
from gpujobs.injob.transport import (
    ISOLATED_UCX,
    Choice,
    HeadsChoice,
    Measured,
    choose,
    cluster_ucx_settings,
    ucx_settings,
)

from ..support.each import each
from ..support.events import write_events

BOTH = ("ucxx", "tls")


@each(
    ("ucxx", "tls", "gpus", "chosen"),
    [
        (Measured(107), Measured(1.2), 4, "ucxx"),
        (Measured(107, 2.4), Measured(1.2, 1.1), 2, "ucxx"),
        # half of the traffic at 107 does not make up for the other half at 0.3
        (Measured(107, 0.3), Measured(1.2, 1.2), 2, "tls"),
        # a job of one GPU has no traffic within
        (Measured(107, 0.9), Measured(1.2, 1.2), 1, "tls"),
        (Measured(5, 1.5), Measured(9, 1.2), 1, "ucxx"),
        # the order of the site decides between similar rates
        (Measured(1.15), Measured(1.2), 2, "ucxx"),
        (Measured(0.4), Measured(1.3), 2, "tls"),
        # not measured: the order of the site
        (Measured(), Measured(), 0, "ucxx"),
        (Measured(), Measured(1.2), 2, "ucxx"),
        (Measured(problem="ucxx hangs"), Measured(1.2), 2, "tls"),
        (Measured(problem="ucxx hangs"), Measured(), 2, "tls"),
    ],
)
def test_the_fastest_protocol_that_works_is_chosen(
    ucxx: Measured, tls: Measured, gpus: int, chosen: str
) -> None:
    scheme, reason = choose(BOTH, {"ucxx": ucxx, "tls": tls}, gpus)
    assert scheme == chosen
    assert bool(reason) == (chosen == "tls")


def test_a_choice_has_its_reason() -> None:
    slow = {"ucxx": Measured(0.4), "tls": Measured(1.3)}
    assert choose(BOTH, slow, 2) == ("tls", "tls is faster here than ucxx")
    broken = {"ucxx": Measured(problem="ucxx does not work on n1: no rmm"), "tls": Measured(1.3)}
    assert choose(BOTH, broken, 2) == ("tls", "ucxx does not work on n1: no rmm")
    assert choose(("ucxx",), broken, 2) == ("", "ucxx does not work on n1: no rmm")


def test_the_text_of_a_choice_has_the_measured_rates() -> None:
    measured = {"tls": Measured(1.2, 1.1), "ucxx": Measured(107.2, 2.4)}
    assert Choice("ucxx", measured=measured).text() == (
        "ucxx: 107 GB/s within a job, 2.4 GB/s between jobs; "
        "tls: 1.2 GB/s within a job, 1.1 GB/s between jobs"
    )
    broken = {"ucxx": Measured(problem="no rmm"), "tls": Measured()}
    assert Choice("tls", measured=broken).text() == "tls: works; ucxx: does not work"
    assert Choice("tls").text() == ""


def test_a_choice_is_read_as_it_was_written() -> None:
    measured = {"ucxx": Measured(107.2, None), "tls": Measured(problem="x")}
    choice = Choice("ucxx", "why", measured, {"UCX_TLS": "^sm"}, "remark")
    assert Choice.parse(choice.json()) == choice
    assert Choice.parse({"scheme": "tls", "reason": "why"}) == Choice("tls", "why")


def test_isolated_jobs_get_settings_of_ucx() -> None:
    assert ucx_settings({}, hidden_gpus=0) == ({}, "")
    assert ucx_settings({"PATH": "/bin"}, hidden_gpus=3) == (ISOLATED_UCX, "")
    assert set(ISOLATED_UCX) == {"UCX_TLS", "UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"}


def test_the_users_settings_win() -> None:
    settings, remark = ucx_settings({"UCX_TLS": "all"}, hidden_gpus=3)
    assert settings == {}
    assert "UCX_TLS=all" in remark


def test_jobs_choose_their_settings_if_the_head_has_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpujobs.injob.gpus.hidden_gpus", lambda: 3)
    folder = Folder(str(tmp_path))
    options = SuperviseOptions(folder=str(tmp_path), job=0, started=0, gpus=1)
    assert cluster_ucx_settings(options, {}) == ISOLATED_UCX  # the dask scheduler has no job
    single = replace(options, single_job=True)
    assert cluster_ucx_settings(single, {}) == {}
    (tmp_path / "head-1").mkdir()
    folder.write(TRANSPORT, Choice("ucxx").json())
    assert cluster_ucx_settings(options, {}) == {}
    folder.write(TRANSPORT, Choice("ucxx", environ={"UCX_TLS": "tcp"}).json())
    assert cluster_ucx_settings(options, {}) == {"UCX_TLS": "tcp"}
    folder.write(TRANSPORT, Choice("ucxx", environ=None).json())
    assert cluster_ucx_settings(options, {}) == ISOLATED_UCX


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    for minor in range(4):
        folder = tmp_path / "proc" / "gpus" / f"0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 41\nDevice Minor: \t {minor}\n"
        (folder / "information").write_text(text)
    (tmp_path / "dev").mkdir()
    return tmp_path


@pytest.mark.parametrize("own", [0, 1, 4])
def test_gpus_that_a_job_cannot_open_are_counted(driver: Path, own: int) -> None:
    for minor in range(own):
        (driver / "dev" / f"nvidia{minor}").touch()
    for minor in range(own, 4):  # root may open a file without permissions, but no such link
        (driver / "dev" / f"nvidia{minor}").symlink_to(f"nvidia{minor}")
    assert hidden_gpus(driver / "proc", driver / "dev") == 4 - own
    assert gpu_models(driver / "proc") == ["NVIDIA H200"] * 4


def test_without_a_driver_no_gpu_is_hidden(tmp_path: Path) -> None:
    assert hidden_gpus(tmp_path, tmp_path) == 0
    assert gpu_models(tmp_path) == []


@each(
    ("program", "problem"),
    [
        ("raise SystemExit(0)", ""),
        ("raise SystemExit(1)", "no answer"),
        ("raise SystemExit('cannot import rmm')", "cannot import rmm"),
    ],
)
def test_a_check_of_ucxx_that_fails_says_where_and_why(
    program: str, problem: str, tmp_path: Path
) -> None:
    folder = Folder(str(tmp_path))
    folder.logs.mkdir()
    folder.archive.write_text(program)  # which answers instead of the package
    options = SuperviseOptions(folder=str(tmp_path), job=0, started=time.time(), schemes=BOTH)
    choice = HeadsChoice(options, os.environ)
    assert choice.is_open and choice.likely.scheme == "ucxx"
    found = choice.settle(time.sleep)
    expected = f"ucxx does not work on {node_name()}: {problem}" if problem else ""
    assert found.measured["ucxx"].problem == expected
    assert found.scheme == ("tls" if problem else "ucxx")
    # The head has no GPU: each job with workers chooses the settings of UCX, which tls has none of.
    assert found.environ == ({} if problem else None)


def test_a_head_that_has_nothing_to_say_about_its_protocol_writes_no_file(tmp_path: Path) -> None:
    """The protocol is in the address of the dask scheduler, which `status` reads anyhow."""
    (tmp_path / "logs").mkdir()
    options = SuperviseOptions(folder=str(tmp_path), job=0, started=time.time(), schemes=("tls",))
    assert HeadsChoice(options, {}).settle(time.sleep) == Choice("tls")
    assert not (tmp_path / TRANSPORT).exists()
    write_events(tmp_path, {"event": "opened", "address": "tls://n1:1"}, {"event": "closed"})
    state = read_state(tmp_path)
    assert (state.transport, state.scheme, state.encrypted) == (Choice("tls"), "tls", True)
