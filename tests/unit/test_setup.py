"""Bash text of `setup` in a job's script: its traps, its end, and the line that is named."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from gpujobs.planning.render import render

from ..support.each import each
from ..support.jobevents import facts_of
from .support import plan
from .test_quoting import STUB, local_profile

FUNCTIONS = """\
conda() { if [ "$1" = activate ]; then
    inner
fi; }
inner() { \\return 3; }
check() { echo checks; exit 5; }
"""
"""Functions of the environment, as conda and Lmod define them."""


LMOD = """\
module()
{
  eval "$(echo 'echo unknown >&2; false')" \\
    && eval "$(echo :)"
  _status=$?
  return $_status
}
"""


class Ran:
    """What a job left whose script was run in a bare bash."""

    def __init__(self, folder: Path, code: int) -> None:
        self.code = code
        self.log = (folder / "logs" / "job-0.log").read_text()
        facts = facts_of(folder, 0)
        assert facts.left
        self.exit_code = facts.left.exit_code
        self.reason, self.setup = facts.reason, facts.setup
        self.started = (folder / "got.json").exists()


def ran(home: Path, monkeypatch: pytest.MonkeyPatch, setup: str, supervisor: str = STUB) -> Ran:
    """Run a job with ``setup``, on the local site."""
    monkeypatch.setenv("HOME", str(home))
    folder = home / ".gpujobs" / "svd-0000"
    for name in ("jobs", "logs"):
        (folder / name).mkdir(parents=True)
    (folder / "injob.pyz").write_text(supervisor)
    text = render(plan(home, local_profile(home, setup), "local"), "svd-0000")[0].text
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "GPUJOBS_INDEX": "0"}
    (home / "script.sh").write_text(text)
    done = subprocess.run(["bash", home / "script.sh"], env=env, check=False)
    return Ran(folder, done.returncode)


@pytest.mark.parametrize(
    "trap",
    [
        "trap 'echo removed' EXIT",
        "trap -- 'echo removed' 0 INT TERM",
        "set -u; trap \"echo 'removed'\" EXIT TERM",
        "set -o posix; trap 'echo removed' EXIT; set +o posix",
    ],
)
def test_a_trap_of_setup_runs_and_reasons_stay(
    trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "import sys\nprint('OSError: disk', file=sys.stderr)\nsys.exit(9)"
    found = ran(tmp_path, monkeypatch, f"{trap}\n(trap 'echo own' EXIT)", fails)
    assert found.code == found.exit_code == 9
    assert found.reason.endswith("could not start, or was killed (exit code 9): OSError: disk")
    assert [line for line in found.log.splitlines() if "gpujobs:" not in line] == [
        "own",
        "OSError: disk",
        "removed",
    ]


def test_a_trap_of_setup_sees_its_folder_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = "cd /tmp\ntrap 'echo left $PWD with $?' EXIT"
    found = ran(tmp_path, monkeypatch, setup, "raise SystemExit(4)")
    assert found.log.endswith("left /tmp with 4\n") and found.code == 4


@pytest.mark.parametrize(
    ("setup", "code", "line"),
    [
        ("export A=1\nexit 0", 0, "exit 0"),
        ("exit 3", 3, "exit 3"),
        ("set -e\ntrap 'echo bye' EXIT\nls /nosuch\necho on", 2, "ls /nosuch"),
        (f"{FUNCTIONS}check here", 5, "check here"),
        ("set -u\necho $NOT_SET\n", 1, "echo $NOT_SET"),
    ],
)
def test_a_setup_that_ends_the_job_is_named(
    setup: str, code: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ran(tmp_path, monkeypatch, setup)
    assert f"(exit code {code}): " in found.reason and not found.started
    assert f"setup ended the job: {line}" in found.reason
    assert found.exit_code == (code or 70)
    ended = json.loads((tmp_path / ".gpujobs/svd-0000/ended").read_text())
    assert (ended["kind"], ended["reason"]) == ("failed", found.reason)


@each(
    ("line", "noted"),
    [
        ("conda activate env", "conda activate env failed (exit code 3)"),
        ("conda \\\n  activate env", "conda activate env failed (exit code 3)"),
        (
            "for e in a b; do conda activate $e; done; (exit 4)",
            "conda activate $e failed (exit code 3); ( exit 4 ) failed (exit code 4)",
        ),
        ("eval 'conda activate env'", "conda activate env failed (exit code 3)"),
        (
            "conda activate env && true; conda activate env || true; if conda activate env; then :; fi",
            "",
        ),
        (
            "a=$(conda activate env)\n[ 1 = 2 ]",
            "a=$(conda activate env) failed (exit code 3); [ 1 = 2 ] failed (exit code 1)",
        ),
        ("trap 'seen=1' DEBUG\nfalse", "false failed (exit code 1)"),
        ("source ./lmod.sh\nmodule load nosuch", "module load nosuch failed (exit code 1)"),
        ("source ./lmod.sh\nA=1 module load nosuch", "A=1 module load nosuch failed (exit code 1)"),
    ],
)
def test_the_line_of_the_user_is_noted_not_the_inside_of_a_function(
    line: str, noted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lmod.sh").write_text(LMOD)
    found = ran(tmp_path, monkeypatch, f"{FUNCTIONS}{line}")
    assert found.setup == noted and found.started and found.code == 0


def test_a_reason_keeps_quotes_and_backslashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = r"""it's "C:\dir" & $(id) `id` %s é"""
    fails = f"import sys\nprint({error!r} + chr(7) + 'x error', file=sys.stderr)\nsys.exit(9)"
    found = ran(tmp_path, monkeypatch, "shopt -s xpg_echo; false '\"' \\\\", fails)
    assert f"{error} x error" in found.reason and "false '\"' \\\\ failed" in found.reason
    ended = json.loads((tmp_path / ".gpujobs" / "svd-0000" / "ended").read_text())
    assert ended["reason"] == found.reason and found.setup in found.reason


def test_a_setup_sees_no_trace_of_being_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`$_`, PIPESTATUS and `$?` are what they are without a trap, and nothing is exported."""
    setup = "set -a\nmkdir -p x/y && cd $_\ntrue | (exit 2) | true\necho ${PIPESTATUS[*]}\nfalse\necho $? ${PWD##*/}\nset +a"
    found = ran(tmp_path, monkeypatch, setup)
    assert found.log.splitlines()[:2] == ["0 2 0", "1 y"]
    environ = json.loads((tmp_path / ".gpujobs/svd-0000/got.json").read_text())[1]
    assert not [name for name in environ if name.startswith(("gpujobs_", "BASH_FUNC_trap"))]


def test_the_reason_of_a_supervisor_is_its_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "class Boom(Exception): pass\nraise Boom('lost')  # an error"
    found = ran(tmp_path, monkeypatch, "export A=1", fails)
    assert found.reason.endswith("(exit code 1): __main__.Boom: lost") or found.reason.endswith(
        "(exit code 1): Boom: lost"
    )
