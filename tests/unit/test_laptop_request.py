"""The words of a command that `gpujobs --host` sends."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpujobs.cli.laptop import make_request
from gpujobs.cli.main import main

from .support import SLURM

PROFILE, SITE = "\0/submit", "s"


def test_only_the_profile_and_the_site_are_replaced(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the command, an option's value or another argument is the same word."""
    monkeypatch.chdir(home)
    Path("submit").write_text("gpus: 1\n")
    Path("s.yaml").write_text(SLURM)
    for words, sent in (
        ("submit", PROFILE),
        ("./submit", PROFILE),
        ("--after submit submit", f"--after submit {PROFILE}"),
        ("submit --after submit", f"{PROFILE} --after submit"),
        ("--set name=submit -- submit", f"--set name=submit -- {PROFILE}"),
        ("--site s.yaml --after s.yaml submit", f"--site {SITE} --after s.yaml {PROFILE}"),
        ("--after --site=s.yaml --site=s.yaml submit", f"--after --site=s.yaml --site={SITE} {PROFILE}"),
    ):  # fmt: skip
        command = main.commands["submit"]
        params = command.make_context("submit", words.split()).params
        assert " ".join(make_request(command, words.split(), params).argv) == f"submit {sent}"
