"""The protocols of a plan, and why ucxx is not one of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpujobs.clusters.connect import silence_ucx
from gpujobs.injob.names import UCX_WARNINGS
from gpujobs.planning.plan import Machine
from gpujobs.planning.render import render

from .support import SLURM, error_of, made_plan

MANAGED = "workers: {rmm_managed_memory: true}\n"


@pytest.fixture
def fast(home: Path) -> Path:
    """A site that lists ucxx."""
    (home / "s.yaml").write_text(SLURM + "network: {protocols: [ucxx, tcp]}\n")
    return home


def test_ucxx_is_not_chosen_for_managed_memory(fast: Path) -> None:
    made = made_plan(fast, f"gpus: 4\n{MANAGED}")
    assert made.transport.protocols == ("tls",)
    (note,) = [note for note in made.notes if "ucxx" in note]
    assert note.startswith("ucxx is not used: with `rmm_managed_memory` it is slower than tcp")
    assert "8 to 16 s" in note and "0.07 s" in note


@pytest.mark.parametrize("workers", ["", "workers: {rmm_managed_memory: false}\n"])
def test_ucxx_is_chosen_otherwise(fast: Path, workers: str) -> None:
    made = made_plan(fast, f"gpus: 4\n{workers}")
    assert made.transport.protocols == ("ucxx", "tls")
    assert not any("managed" in note for note in made.notes)


def test_explicit_ucxx_is_taken_with_a_warning(fast: Path) -> None:
    made = made_plan(fast, f"gpus: 4\nnetwork: {{protocol: ucxx}}\n{MANAGED}")
    assert made.transport.protocols == ("ucxx",)
    assert any("warning: " in note and "8 to 16 s" in note for note in made.notes)


def test_a_site_with_only_ucxx(fast: Path) -> None:
    (fast / "s.yaml").write_text(SLURM + "network: {protocols: [ucxx]}\n")
    assert made_plan(fast, f"gpus: 4\n{MANAGED}").transport.protocols == ("tls",)


def test_no_note_if_ucxx_was_not_possible(home: Path) -> None:
    made = made_plan(home, f"gpus: 4\n{MANAGED}")
    assert not any("ucxx" in note for note in made.notes)


# -- this machine --------------------------------------------------------------------------------------------------------
DGX = Machine(gpus=("0", "1", "2", "3"), cpus=8, memory=32 * 2**30, busy={}, nvlink=4)
UCXX = "network: {protocol: ucxx}\n"


def test_ucxx_on_this_machine_needs_no_site_file(home: Path) -> None:
    made = made_plan(home, f"gpus: 4\n{UCXX}", "local", DGX)
    assert made.transport.protocols == ("ucxx",)
    assert made.transport.interface == "lo"
    assert any(note.startswith("not encrypted") for note in made.notes)
    (script,) = render(made, "x-0000")
    assert 'UCX_NET_DEVICES="${UCX_NET_DEVICES:-lo}"' in script.text
    assert script.text.count("--interface=lo") == 3  # supervisor, dask scheduler, workers
    assert "--host" not in script.text


def test_a_local_site_that_lists_protocols_decides(home: Path) -> None:
    text = "description: x\nscheduler: local\nqueues: {local: {}}\nnetwork: {protocols: [tcp]}\n"
    (home / "own.yaml").write_text(text)
    assert "the site does not list it" in error_of(home, f"gpus: 2\n{UCXX}", "own.yaml", DGX)


def test_ucxx_elsewhere_needs_the_site(home: Path) -> None:
    assert "the site does not list it" in error_of(home, f"gpus: 2\n{UCXX}")


def test_ones_own_interface_is_not_confined(home: Path) -> None:
    profile = "gpus: 4\nnetwork: {protocol: ucxx, interface: eth0}\n"
    made = made_plan(home, profile, "local", DGX)
    assert (made.transport.interface, made.transport.loopback) == ("eth0", "")


@pytest.mark.parametrize(
    ("profile", "linked"),
    [
        ("gpus: 4\n", 4),
        ("gpus: 2\n", 2),
        ("gpus: 1\n", 0),
        ("gpus: 0\n", 0),
        (f"gpus: 4\n{UCXX}", 0),
        ("gpus: 4\nnetwork: {protocol: tcp}\n", 0),
        (f"gpus: 4\n{MANAGED}", 0),
    ],
)
def test_auto_is_encrypted_and_says_what_it_leaves_unused(
    home: Path, profile: str, linked: int
) -> None:
    made = made_plan(home, profile, "local", DGX)
    notes = [note for note in made.notes if "NVLink" in note]
    expected = (
        f"NVLink between {linked} GPUs is left unused: dask uses tls; "
        "`protocol: ucxx` uses it, not encrypted"
    )
    assert notes == ([expected] if linked else [])
    assert made.transport.encrypted or UCXX in profile


@pytest.mark.parametrize(("encryption", "noted"), [("false", True), ("true", False)])
def test_ws_listens_on_all_interfaces(home: Path, encryption: str, noted: bool) -> None:
    """Dask gives Tornado the port only; with TLS, a certificate is required there."""
    profile = f"gpus: 0\nnetwork: {{protocol: ws, encryption: {encryption}}}\n"
    notes = made_plan(home, profile, "local").notes
    assert any("ws accepts connections on all interfaces" in note for note in notes) is noted


def test_clients_of_ucxx_have_no_warning_of_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UCX_WARNINGS, raising=False)
    silence_ucx("tls")
    assert UCX_WARNINGS not in os.environ
    silence_ucx("tls", "ucxx")
    assert os.environ[UCX_WARNINGS] == "n"
    monkeypatch.setenv(UCX_WARNINGS, "y")
    silence_ucx("ucxx")
    assert os.environ[UCX_WARNINGS] == "y"
