"""The words of a command that `gpujobs --host` sends."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpujobs.cli.laptop import make_request, named_site, search_path
from gpujobs.cli.main import main
from gpujobs.errors import InputError

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


def test_a_command_names_its_site_by_an_option_the_profile_or_a_variable(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (home / f"{name}.yaml").write_text(SLURM)
    with_site, without = home / "with.yaml", home / "without.yaml"
    with_site.write_text("site: ./a.yaml\n")
    without.write_text("gpus: 1\n")

    def name(**params: object) -> str | None:
        found = named_site(params)
        return found and found.name

    assert name() is name(profile=without) is None
    assert name(site="./b.yaml") == name(site="./b.yaml", profile=without) == "b"
    assert name(profile=with_site) == "a"
    assert name(site="./b.yaml", profile=with_site) == "b"
    monkeypatch.setenv("GPUJOBS_SITE", "./c.yaml")
    assert name() == name(profile=without) == "c"
    assert name(profile=with_site) == "a" and name(site="./b.yaml") == "b"


def test_a_job_folder_brings_no_sites_to_a_login_node(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that is called `sites`, with a script that is called as a site file."""
    monkeypatch.setenv("GPUJOBS_SITE_PATH", "/own")
    assert search_path(home / "sent" / "0a") == f"{home}/sent/0a/sites:/own"
    assert search_path(home / "folders" / "0a") == "/own"


def test_a_large_profile_is_not_read(home: Path) -> None:
    """Neither here nor for a login node."""
    profile = home / "large.yaml"
    with profile.open("wb") as file:
        file.truncate(2**31)
    command = main.commands["plan"]
    tracemalloc.start()
    for name in ("", "login"):
        done = CliRunner().invoke(main, ["--host", name, "plan", str(profile)])
        assert (done.exit_code, done.stderr.count("larger than 256 KiB")) == (2, 1), done.output
    with pytest.raises(InputError, match="larger than 256 KiB"):
        make_request(command, [str(profile)], {"profile": profile})
    assert tracemalloc.get_traced_memory()[1] < 2**27
    tracemalloc.stop()
