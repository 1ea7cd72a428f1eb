"""Text in `env` and `run` arrives in a real bash byte for byte; control characters are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest

from gpujobs.clusters.findings import notes
from gpujobs.clusters.folderstate import read_state
from gpujobs.errors import InputError
from gpujobs.planning.render import render
from gpujobs.text import control_character

from ..conftest import slow_variant
from ..support.jobevents import facts_of
from .support import plan

LINE_BREAKERS = ("Cc", "Zl", "Zp", "Cs")
SPECIAL = [
    "", " ", "'", '"', "\\", "`id`", "$(id)", "$HOME", "*", "!!", "a;b", "a&b", "#x", "~", "{a,b}", "\\n",
    "--run", "--workers", "-", "é", "日本",
]  # fmt: skip
STUB = "import json, os, sys\nopen(os.environ['GPUJOBS_FOLDER'] + '/got.json', 'w').write(json.dumps([sys.argv, dict(os.environ)]))\n"


def texts() -> Any:
    """Return a strategy for text that arrives."""
    from hypothesis import strategies as st  # half a second, in each test process if it stood above

    return st.text(st.characters(exclude_categories=LINE_BREAKERS), max_size=40) | st.sampled_from(
        SPECIAL
    )


def local_profile(folder: Path, setup: str = "") -> dict[str, object]:
    """Return a profile for this machine whose command does nothing."""
    environment = {"setup": setup, "python": sys.executable}
    return {"gpus": 0, "run": ["true"], "environment": environment, "workdir": str(folder)}


def run_script(text: str, home: Path, **more: str) -> tuple[list[str], dict[str, str]]:
    """Run a script in a bare bash with a stub of injob.pyz; return its arguments and environment."""
    folder = home / ".gpujobs" / "svd-0000"
    for name in ("jobs", "logs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "injob.pyz").write_text(STUB)
    script = home / "script.sh"
    script.write_text(text)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "GPUJOBS_INDEX": "0", **more}
    variables = [f"{name}={value}" for name, value in env.items()]
    argv = ["env", "-i", *variables, "bash", script]
    done = subprocess.run(argv, capture_output=True, check=False)
    log = (folder / "logs" / "job-0.log").read_text()
    assert done.returncode == 0, (done, log)
    assert done.stdout + done.stderr == b""
    arguments, environ = json.loads((folder / "got.json").read_text())
    return arguments, environ


@pytest.mark.parametrize("examples", [25, slow_variant(100)])
def test_text_arrives_byte_for_byte(monkeypatch: pytest.MonkeyPatch, examples: int) -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    names = st.from_regex(r"[A-Z][A-Z0-9_]{0,8}X", fullmatch=True)

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(texts(), min_size=1, max_size=4), st.dictionaries(names, texts(), max_size=3))
    def check(run: list[str], env: dict[str, str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            monkeypatch.setenv("HOME", str(home))
            profile = {**local_profile(home), "run": run, "env": env}
            text = render(plan(home, profile, "local"), "svd-0000")[0].text
            arguments, environ = run_script(text, home)
            assert arguments[arguments.index("--run") + 1 :] == run
            assert {name: environ[name] for name in env} == env

    check()


def test_control_characters_are_refused(tmp_path: Path) -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    bad_ones, places = st.characters(categories=LINE_BREAKERS), ["run", "env", "workdir", "python"]

    @settings(max_examples=100, deadline=None)
    @given(texts(), bad_ones, texts(), st.sampled_from(places))
    def check(before: str, bad: str, after: str, where: str) -> None:
        text = before + bad + after
        assert control_character(text)
        profiles: dict[str, dict[str, object]] = {
            "run": {"run": ["echo", text]},
            "env": {"env": {"A": text}},
            "workdir": {"workdir": text},
            "python": {"environment": {"python": text}},
        }
        with pytest.raises(InputError):
            plan(tmp_path, {"gpus": 0, **profiles[where]}, "local")

    check()


def test_control_characters_are_those_of_the_categories() -> None:
    from hypothesis import given
    from hypothesis import strategies as st

    @given(st.text(max_size=30))
    def check(text: str) -> None:
        assert bool(control_character(text)) == any(category(c) in LINE_BREAKERS for c in text)

    check()


@pytest.mark.parametrize(
    "setup",
    [
        "export A=1",
        "set -e; false || true",
        "f() { echo hi; }\nf",
        "cat <<'X'\ntext\nX",
        "# only a comment",
        "set -u",
    ],
)
def test_setup_is_verbatim(setup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = render(plan(tmp_path, local_profile(tmp_path, setup), "local"), "svd-0000")[0].text
    assert setup in text
    run_script(text, tmp_path)


def test_a_setup_cannot_change_what_the_script_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    setup = (
        "host=x folder=x number=x cluster=x python=x job=x; cd /; set -euo pipefail; trap - EXIT"
    )
    text = render(plan(tmp_path, local_profile(tmp_path, setup), "local"), "svd-0000")[0].text
    arguments, environ = run_script(text, tmp_path)
    assert arguments[0] == str(tmp_path / ".gpujobs" / "svd-0000" / "injob.pyz")
    assert environ["GPUJOBS_JOB"] == "0"


def test_a_tmpdir_that_this_node_lacks_is_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = render(plan(tmp_path, local_profile(tmp_path), "local"), "svd-0000")[0].text
    assert "TMPDIR" not in run_script(text, tmp_path, TMPDIR="/nosuch/login")[1]
    assert run_script(text, tmp_path, TMPDIR=str(tmp_path))[1]["TMPDIR"] == str(tmp_path)


@pytest.mark.parametrize(
    ("given", "arrived"),
    [
        ("$TMPDIR", "/tmp"),
        ("${NOT_SET:-/else}/a b", "/else/a b"),
        ("~/it's", "HOME/it's"),
        ('/a/$(id)`id`"\\$', '/a/$(id)`id`"\\$'),
        ("/plain $", "/plain $"),
    ],
)
def test_local_directory_is_expanded_in_the_job(
    given: str, arrived: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    profile = {**local_profile(tmp_path), "workers": {"local_directory": given}}
    text = render(plan(tmp_path, profile, "local"), "svd-0000")[0].text
    arguments, _ = run_script(text, tmp_path, TMPDIR="/tmp")
    assert f"--local-directory={arrived.replace('HOME', str(tmp_path))}" in arguments


def test_a_worker_may_start_as_long_as_the_profile_says(tmp_path: Path) -> None:
    profile = {**local_profile(tmp_path), "start_timeout": "15m"}
    text = render(plan(tmp_path, profile, "local"), "svd-0000")[0].text
    assert "--death-timeout=900" in text
    profile["workers"] = {"death_timeout": "20s"}
    text = render(plan(tmp_path, profile, "local"), "svd-0000")[0].text
    assert "--death-timeout=20" in text
    ranks = {"layout": "mpi", "gpus": 4, "start_timeout": "15m", "account": "p12345"}
    text = render(plan(tmp_path, ranks, "example-slurm"), "svd-0000")[0].text
    assert "--death-timeout=900" in text
    script = {**ranks, "run_on": "ranks", "run": ["all.py"]}
    text = render(plan(tmp_path, script, "example-slurm"), "svd-0000")[0].text
    assert '"death_timeout": 900' in text


@pytest.mark.parametrize(
    ("setup", "noted"),
    [
        ("no_such_module load cuda", "no_such_module load cuda failed (exit code 127)"),
        (
            "false\nexit_later=1\n(exit 3)",
            "false failed (exit code 1); ( exit 3 ) failed (exit code 3)",
        ),
        ("f() { false; true; }\nf; false || true; if false; then :; fi; ! true", ""),
        ("source ./fine.sh", ""),
        ("source ./bad.sh", "source ./bad.sh failed (exit code 4)"),
        ("trap 'own=1' ERR; false", ""),
    ],
)
def test_a_line_of_setup_that_fails_is_noted(
    setup: str, noted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "fine.sh").write_text("false; true\n")
    (tmp_path / "bad.sh").write_text("return 4\n")
    setup += "\nexport GOES_ON=1\n"
    text = render(plan(tmp_path, local_profile(tmp_path, setup), "local"), "svd-0000")[0].text
    _, environ = run_script(text, tmp_path)
    assert environ["GOES_ON"] == "1"
    folder = tmp_path / ".gpujobs" / "svd-0000"
    assert facts_of(folder, 0).setup == noted
    assert noted in " ".join(notes(read_state(folder)))
