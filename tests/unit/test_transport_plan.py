"""The protocols of a plan, and why ucxx is not one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support import SLURM, made_plan

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
