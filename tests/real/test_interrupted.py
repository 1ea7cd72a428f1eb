"""Commands that SIGKILL or Ctrl-C ends at any step: nothing is lost, and no job is left that nothing knows."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import slow_variant
from ..support.cli import ROOT
from ..support.transcripts import SQUEUE_FOUND_HEADER, SQUEUE_HEADER
from ..unit.support import SLURM

KILLS = int(os.environ.get("GPUJOBS_KILLS", "2"))
"""Steps of each command at which it is ended, by each signal; more by hand."""
SEED = int(os.environ.get("GPUJOBS_SEED", "1"))
PROGRAM = """
import os, signal, sys
home, step, number = sys.argv.pop(1), int(sys.argv.pop(1)), int(sys.argv.pop(1))
done = 0
def count(event, words):
    global done
    if event == "subprocess.Popen" or (
        event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.listdir", "os.scandir")
        and words and home in str(words[0])
    ):
        done += 1
        if done == step:
            os.kill(os.getpid(), number)
from gpujobs.cli.main import main
sys.addaudithook(count)
try:
    main()
finally:
    print("steps", done, file=sys.stderr)
"""
"""The command, which sends itself a signal at a step: before it changes or reads a file, or starts a program."""
COMMANDS = {
    "sbatch": """name=$(sed -n 's/^#SBATCH --job-name=//p'); echo >> ids; id=$(wc -l < ids)
        echo "$name" > "queue/$id"; echo "$id" """,
    "squeue": f"""case "$*" in *%K*) printf '%s' '{SQUEUE_HEADER}' ;; *) printf '%s' '{SQUEUE_FOUND_HEADER}' ;; esac
        for job in queue/*; do [ -e "$job" ] || continue; name=$(cat "$job"); id=${{job#queue/}}
        case "$*" in *%K*) echo "$id|N/A|PENDING||N/A|Priority|$name" ;; *) echo "$id|$name" ;; esac; done""",
    "scancel": 'for id; do rm -f "queue/$id"; done',
    "sacct": ":",
}
"""A Slurm in which no job starts."""


class Host:
    """A login node: a home and a queue."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.queue, self.root, commands = home / "queue", home / ".gpujobs", home / "bin"
        for folder in (self.queue, commands):
            folder.mkdir(parents=True)
        for name, text in COMMANDS.items():
            (commands / name).write_text(f"#!/bin/bash\ncd {home} || exit 1\n{text}\n")
            (commands / name).chmod(0o700)
        (home / "s.yaml").write_text(SLURM)
        (home / "p.yaml").write_text("gpus: 1\nsite: ./s.yaml\nrun: [echo, done]\n")
        self.env = {
            "HOME": str(home), "PATH": f"{commands}:/usr/bin:/bin", "XDG_STATE_HOME": str(home / "state"),
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip

    def __call__(
        self, *words: str, step: int = 0, number: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; ``step``: at which it gets the signal ``number``."""
        argv = [sys.executable, "-c", PROGRAM, str(self.home), str(step), str(number), *words]
        return subprocess.run(
            argv, env=self.env, cwd=self.home, text=True, capture_output=True, check=False, timeout=60
        )  # fmt: skip

    def jobs(self) -> list[str]:
        """Return the names of the jobs in the queue."""
        return sorted(path.read_text().strip() for path in self.queue.iterdir())

    def check_clean(self) -> None:
        """Nothing that gpujobs has made is left when `clean` has removed what it lists, but the user's is."""
        (self.root / "uploads" / "photos").mkdir(mode=0o700, parents=True, exist_ok=True)
        old = time.time() - 7200
        for path in (self.root, *self.root.rglob("*")):
            os.utime(path, (old, old), follow_symlinks=False)
        for path in (self.home / "state" / "gpujobs" / "clusters").glob("*.json"):
            record = json.loads(path.read_text() or "{}")
            if record.get("intent"):  # for two minutes, its job may still be accepted
                record["intent"]["time"] = old
                path.write_text(json.dumps(record))
        assert self("status").returncode == 0
        done = self("clean", "--yes")
        assert done.returncode == 0, done.stderr
        left = [path.name for path in self.root.iterdir() if any(path.iterdir())]
        assert left == ["uploads"] and (self.root / "uploads" / "photos").is_dir(), left


def after_submit(host: Host) -> None:
    """Every job is that of a record, which `cancel --all` ends; then the same command succeeds."""
    clusters = json.loads(host("status", "--all", "--json").stdout)["clusters"]
    assert set(host.jobs()) <= {cluster["id"] for cluster in clusters}
    assert host("cancel", "--all").returncode in (0, 2)  # 2: there is none
    assert host.jobs() == []
    assert host("submit", "p.yaml").returncode == 0 and len(host.jobs()) == 1
    assert host("cancel", "--all").returncode == 0 and host.jobs() == []


def after_submit_folder(host: Host) -> None:
    """The folder is submitted once, at most; a job that waits finds the end that `cancel` wrote."""
    again = host("submit", "F")
    assert again.returncode == 0 or "was submitted already" in again.stderr, again.stderr
    assert len(host.jobs()) <= 1
    assert host("cancel", "F").returncode == 0
    assert host.jobs() == [] or list((host.home / "F").glob("*/ended"))


def after_render(host: Host) -> None:
    """The same command succeeds, or names what is left."""
    again = host("render", "p.yaml", "-o", "F")
    assert again.returncode == 0 or "is not empty" in again.stderr, again.stderr
    assert host("render", "p.yaml", "-o", "G").returncode == 0 and host.jobs() == []


def after_cancel(host: Host) -> None:
    assert host("cancel", "--all").returncode in (0, 2)
    assert host.jobs() == []


CASES: dict[str, tuple[list[list[str]], list[str], Callable[[Host], None]]] = {
    "submit": ([], ["submit", "p.yaml"], after_submit),
    "submit-folder": ([["render", "p.yaml", "-o", "F"]], ["submit", "F"], after_submit_folder),
    "render": ([], ["render", "p.yaml", "-o", "F"], after_render),
    "cancel": ([["submit", "p.yaml"]], ["cancel", "--all"], after_cancel),
    "clean": ([["submit", "p.yaml"], ["cancel", "--all"], ["status"]], ["clean", "--yes"], after_cancel),
}  # fmt: skip
"""Commands before, the command, and the check after it; all end with `Host.check_clean`."""


@pytest.mark.parametrize(
    ("name", "kills"),
    [("submit", 1), *(slow_variant(name, KILLS) for name in CASES)],
    ids=["one", *CASES],
)
def test_a_command_that_a_signal_ends(tmp_path: Path, name: str, kills: int) -> None:
    before, words, check = CASES[name]
    model = Host(tmp_path / "model")
    for earlier in before:
        assert model(*earlier).returncode == 0
    whole = model(*words)
    steps = int(whole.stderr.split()[-1])
    assert steps > 3, whole.stderr
    chosen = random.Random(f"{SEED}-{name}")
    for number in (signal.SIGKILL, signal.SIGINT):
        for step in chosen.sample(range(1, steps + 1), min(kills, steps)):
            host = Host(tmp_path / "host")
            for earlier in before:
                assert host(*earlier).returncode == 0
            ended = host(*words, step=step, number=number)
            try:
                assert ended.returncode != 0 or number == signal.SIGINT
                assert "Traceback" not in ended.stderr, ended.stderr
                check(host)
                host.check_clean()
            except AssertionError as error:
                raise AssertionError(f"{name}, step {step} of {steps}, {number!r}") from error
            shutil.rmtree(host.home)
