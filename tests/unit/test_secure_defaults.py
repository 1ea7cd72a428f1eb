"""What listens where, and sites that require encryption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpujobs.errors import InputError
from gpujobs.injob.options import parse
from gpujobs.planning.plan import Machine
from gpujobs.planning.render import render

from .support import error_of, made_plan

MACHINE = Machine(gpus=("0",), cpus=8, memory=32 * 2**30, busy={})


def text(home: Path, site: str = "s.yaml", **network: object) -> str:
    made = made_plan(home, {"gpus": 1, "network": network}, site, MACHINE)
    text = "\n".join(script.text for script in render(made, "svd-1"))
    return " ".join(text.replace("\\\n", " ").split())


@pytest.mark.parametrize("site", ["s.yaml", "local"])
def test_the_dashboard_listens_on_loopback_unless_asked_otherwise(home: Path, site: str) -> None:
    for network in ({}, {"dashboard": "local"}):
        assert "--dashboard-address=127.0.0.1:0" in text(home, site, **network)

    assert "--dashboard-address=:0" in text(home, site, dashboard="on")
    off = text(home, site, dashboard="off")
    assert "--dashboard-address=127.0.0.1:0 --no-dashboard" in off
    notes = made_plan(home, {"gpus": 1, "network": {"dashboard": "on"}}, site, MACHINE).notes
    assert any("without a password" in note for note in notes)


def test_a_wrong_word(home: Path) -> None:
    error = error_of(home, {"gpus": 1, "network": {"dashboard": "yes"}})
    assert "`network.dashboard`: 'yes' is not one of off, local or on" in error


def test_the_ranks_know_it(home: Path) -> None:
    ranks = {"layout": "mpi", "run_on": "ranks", "run": ["svd.py"], "gpus": 1}
    script = render(made_plan(home, {**ranks, "network": {"dashboard": "off"}}), "svd-1")[0].text
    assert "--script --dashboard=off" in script
    argv = ["rank", "--folder=x", "--size=1", "--gpus=1", "--dashboard=off", "--", "svd.py"]
    parsed: Any = parse(argv)
    assert parsed.dashboard == "off"


# -- encryption --------------------------------------------------------------------------------------------------
@pytest.fixture
def strict(home: Path) -> str:
    network = "network: {encryption: required}\ncontact: help@example.org\n"
    (home / "strict.yaml").write_text((home / "s.yaml").read_text() + network)
    return "strict.yaml"


@pytest.mark.parametrize(
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
