"""The environment of processes on the login node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import gpujobs
from gpujobs.batch import process

from ..support.cli import ROOT

PACKAGES = f"{ROOT}{os.pathsep}{sysconfig.get_paths()['purelib']}"
"""What a module system puts on PYTHONPATH."""
BARE = str(
    Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
)
"""An interpreter without packages of its own."""


def in_bare_python(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), **env}
    return subprocess.run(
        [BARE, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True, check=False
    )


def test_our_interpreter_finds_what_this_one_finds(tmp_path: Path) -> None:
    """Packages that come by PYTHONPATH, and those that a program adds to sys.path."""
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "own.py").touch()
    code = (
        "import sys; sys.path.append('added')\n"
        "from gpujobs.batch import process\n"
        "again = [sys.executable, '-c', 'import gpujobs, distributed, own']\n"
        "result = process.run(again); print(result.exit_code, result.stderr)"
    )
    done = in_bare_python(code, tmp_path, PYTHONPATH=PACKAGES)
    assert (done.stdout.strip(), done.stderr) == ("0", "")


def test_commands_of_the_batch_scheduler_do_not_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/opt/modules/python")
    result = process.run(["env"])
    assert result.exit_code == 0 and "PYTHON" not in result.stdout
    code = "import json, os; print(json.dumps(os.environ['PYTHONPATH'].split(':')))"
    seen = json.loads(process.run([sys.executable, "-c", code]).stdout)
    assert not [folder for folder in seen if folder.startswith(sys.prefix)]


def test_jobs_of_this_machine_find_packages_that_come_by_pythonpath(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        "gpus: 0\nworkers: {count: 1, memory: 512MiB}\nrun: [python, -c, 'print(\"ran\")']\n"
    )
    code = (
        "import sys; sys.argv[1:] = ['submit', 'p.yaml', '--site', 'local', '--wait']\n"
        "from gpujobs.cli.main import main; sys.exit(main())"
    )
    done = in_bare_python(code, tmp_path, PYTHONPATH=PACKAGES)
    assert done.returncode == 0, done.stderr
    assert "| ran" in done.stderr or "ran\n" in done.stdout + done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_user_without_a_name_has_the_number() -> None:
    code = "import os; from gpujobs.batch.client import user_name; os.setuid(54321)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(user_name())"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(gpujobs.__file__).parents[1])},
    )
    assert (done.stdout, done.returncode) == ("54321\n", 0), done.stderr


def test_a_background_process_that_holds_the_pipe_delays_nothing() -> None:
    program = "sleep 600 & echo $!; echo why >&2; cat"
    result = process.run(["bash", "-c", program], stdin="x" * 2**18)
    os.kill(int(result.stdout.split("\n")[0]), signal.SIGKILL)  # which it has outlived
    assert (result.exit_code, result.stderr, len(result.stdout.split("\n")[1])) == (
        0,
        "why\n",
        2**18,
    )


def test_output_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MOST_OUTPUT", 2**20)
    result = process.run(["yes"], timeout=30)
    assert (result.exit_code, result.problem) == (None, "yes wrote more than 1 MiB")
    assert len(result.stdout) < 2**21


def test_a_command_that_does_not_end_is_stopped_with_its_output() -> None:
    result = process.run(["bash", "-c", "echo before; exec sleep 30"], timeout=0.3)
    assert (result.exit_code, result.stdout) == (None, "before\n")
    result = process.run(["bash", "-c", "exec >&- 2>&- <&-; exec sleep 30"], timeout=0.3)
    assert result.problem == "bash did not respond within 0 s"
