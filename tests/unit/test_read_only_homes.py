"""A home or a folder of gpujobs that cannot be written, here or on a login node: an error with the cure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.cli import ROOT
from .support import SLURM

READ_ONLY = "/sys"
"""A folder in which not even root can make a file."""
SSH = """#!/bin/bash
case "$*" in *-Ocheck*) exit 0 ;; *" -- login "*) exec env -i SHELL=/bin/sh {env} sh -c "${{@: -1}}" ;; esac
"""
"""ssh to this host, with another environment."""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run gpujobs, with variables; those of the login node are in ``there``."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "gpujobs").write_text(
        f"#!/bin/sh\nPYTHONPATH={ROOT} PATH={programs}:$PATH exec {sys.executable} -m gpujobs \"$@\"\n"
    )  # fmt: skip
    (programs / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "s.yaml").write_text(SLURM)
    (tmp_path / "p.yaml").write_text("gpus: 1\nrun: [echo, done]\n")

    def run(*words: str, there: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        (programs / "ssh").write_text(SSH.format(env=there))
        for path in (tmp_path / "gpujobs", programs / "ssh", programs / "sbatch"):
            path.chmod(0o755)
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        own = {"HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "gpujobs", *words], env={**own, **env}, cwd=tmp_path, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode and "Traceback" not in done.stderr, done.stderr
        return done

    return run


@pytest.mark.parametrize("remote", ["python3", "gpujobs"])
def test_a_read_only_home_on_the_login_node_is_one_error(
    run: Run, tmp_path: Path, remote: str
) -> None:
    """It gets gpujobs first, or has it, and gets the files of a command."""
    command = {"python3": sys.executable, "gpujobs": str(tmp_path / "gpujobs")}[remote]
    done = run(
        "--host", "login", "submit", "p.yaml", "--site", "./s.yaml", there=f"HOME={READ_ONLY}", GPUJOBS_REMOTE=command
    )  # fmt: skip
    assert f"cannot write in {READ_ONLY}/.gpujobs" in done.stderr
    assert "hint: commands with --host need a writable ~/.gpujobs there" in done.stderr
    assert done.stderr.count("error:") == 1, done.stderr


STATE = "hint: XDG_STATE_HOME=FOLDER keeps the records"


def test_a_read_only_state_folder_on_the_login_node_is_named(run: Run, tmp_path: Path) -> None:
    there = f"HOME={tmp_path / 'home'} XDG_STATE_HOME={READ_ONLY}/state"
    command = str(tmp_path / "gpujobs")
    words = ("--host", "login", "submit", "p.yaml", "--site", "./s.yaml")
    done = run(*words, there=there, GPUJOBS_REMOTE=command)
    assert f"{READ_ONLY}/state/gpujobs/clusters cannot be used" in done.stderr
    assert STATE in done.stderr
    left = [path for path in (tmp_path / "home" / ".gpujobs").iterdir() if path.name != "sent"]
    assert left == []


@pytest.mark.parametrize("host", ["", "login"])
def test_a_read_only_state_folder_of_this_computer_is_named(run: Run, host: str) -> None:
    words = ("--host", host, "submit", "p.yaml", "--site", "./s.yaml")
    done = run(*words, XDG_STATE_HOME=f"{READ_ONLY}/state")
    assert (
        f"{READ_ONLY}/state/gpujobs/{'hosts' if host else 'clusters'} cannot be used" in done.stderr
    )
    assert STATE in done.stderr


def test_read_only_folders_of_clusters_and_scripts_are_named(run: Run, tmp_path: Path) -> None:
    with (tmp_path / "s.yaml").open("a") as file:
        file.write(f"directory: {READ_ONLY}/clusters\n")
    done = run("submit", "p.yaml", "--site", "./s.yaml")
    assert f"{READ_ONLY}/clusters cannot be used" in done.stderr
    assert "hint: see `directory` of the site" in done.stderr
    done = run("render", "p.yaml", "--site", "./s.yaml", "-o", f"{READ_ONLY}/jobs")
    assert "hint: -o names a folder that you can write" in done.stderr
