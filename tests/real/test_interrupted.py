"""Commands that SIGKILL or Ctrl-C ends at any step: nothing is lost, and no job is left that nothing knows."""

from __future__ import annotations

import json
import os
import random
import re
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
    print(f"steps of {home}: {done}", file=sys.stderr)
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


SSH = """#!/bin/bash
case "$*" in *" -- login "*) ;; *) exit 0 ;; esac  # it looks for a connection, or at its options
case "$*" in *-Ocheck*|*-Oforward*|*" -M"*) exit 0 ;; esac
exec env -i SHELL=/bin/sh {env} sh -c "${{@: -1}}"
"""
"""ssh to this host, with the home of the login node."""


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

    @property
    def login(self) -> Host:
        """The host that has the queue."""
        return self

    def age_intents(self) -> None:
        """Let two minutes pass since interrupted submissions, for which a job may still be accepted."""
        for path in (self.home / "state" / "gpujobs" / "clusters").glob("*.json"):
            record = json.loads(path.read_text() or "{}")
            if record.get("intent"):
                record["intent"]["time"] = time.time() - 7200
                path.write_text(json.dumps(record))

    def jobs(self) -> list[str]:
        """Return the names of the jobs in the queue."""
        return sorted(path.read_text().strip() for path in self.queue.iterdir())

    def check_clean(self) -> None:
        """Nothing that gpujobs has made is left when `clean` has removed what it lists, but the user's is."""
        (self.root / "uploads" / "photos").mkdir(mode=0o700, parents=True, exist_ok=True)
        old = time.time() - 7200
        for path in (self.root, *self.root.rglob("*")):
            os.utime(path, (old, old), follow_symlinks=False)
        self.age_intents()
        assert self("status").returncode == 0
        done = self("clean", "--yes")
        assert done.returncode == 0, done.stderr
        left = [path.name for path in self.root.iterdir() if any(path.iterdir())]
        assert left == ["uploads"] and (self.root / "uploads" / "photos").is_dir(), left


class Laptop:
    """A computer whose commands run on a login node, through ssh."""

    def __init__(self, home: Path) -> None:
        self.login, self.home = Host(home / "login"), home / "laptop"
        own = Host(self.home)
        shutil.rmtree(own.queue)
        self.env = {**own.env, "GPUJOBS_REMOTE": str(self.login.home / "bin" / "gpujobs")}
        words = " ".join(f"{name}={value}" for name, value in self.login.env.items())
        for path, text in (
            (self.home / "bin" / "ssh", SSH.format(env=words)),
            (self.login.home / "bin" / "gpujobs", self._on_login(0, 0)),
        ):
            path.write_text(text)
            path.chmod(0o700)

    def _on_login(self, step: int, number: int) -> str:
        program = self.login.home / "program.py"
        program.write_text(PROGRAM)
        words = f"{sys.executable} {program} {self.login.home} {step} {number}"
        return f'#!/bin/sh\nPATH={self.login.env["PATH"]} exec {words} "$@"\n'  # of the login shell

    def __call__(
        self, *words: str, step: int = 0, number: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; ``step``: at which it gets a signal, on the login node if it is negative."""
        on_login = self.login.home / "bin" / "gpujobs"
        on_login.write_text(self._on_login(max(0, -step), number))
        argv = [sys.executable, "-c", PROGRAM, str(self.home), str(max(0, step)), str(number)]
        # The processes of the login node have this stderr, too: it waits for their end.
        return subprocess.run(
            [*argv, "--host", "login", *words], env=self.env, cwd=self.home, text=True, capture_output=True,
            check=False, timeout=60,
        )  # fmt: skip


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


def after_scale(host: Host) -> None:
    """The same command succeeds: there are two jobs, and not a third one."""
    (cluster,) = set(host.jobs())
    host.age_intents()
    again = host("scale", cluster, "2")
    assert again.returncode == 0, again.stderr
    assert host.jobs() == [cluster] * 2
    assert host("scale", cluster, "1").returncode == 0
    assert host.jobs() == [cluster]
    after_cancel(host)


SUBMIT, CANCEL = ["submit", "p.yaml"], ["cancel", "--all"]
CASES: dict[str, tuple[list[list[str]], list[str], Callable[[Host], None]]] = {
    "submit": ([], SUBMIT, after_submit),
    "submit-folder": ([["render", "p.yaml", "-o", "F"]], ["submit", "F"], after_submit_folder),
    "render": ([], ["render", "p.yaml", "-o", "F"], after_render),
    "cancel": ([SUBMIT], CANCEL, after_cancel),
    "clean": ([SUBMIT, CANCEL, ["status"]], ["clean", "--yes"], after_cancel),
}  # fmt: skip
"""Commands before, the command, and the check after it; all end with `Host.check_clean`."""
MORE: dict[str, tuple[list[list[str]], list[str], Callable[[Host], None]]] = {
    "scale": ([SUBMIT], ["scale", "CLUSTER", "2"], after_scale),
    "scale-down": ([SUBMIT, ["scale", "CLUSTER", "2"]], ["scale", "CLUSTER", "1"], after_scale),
    "host-submit": ([], SUBMIT, after_submit),
    "host-scale": ([SUBMIT], ["scale", "CLUSTER", "2"], after_scale),
    "host-cancel": ([SUBMIT], CANCEL, after_cancel),
    "host-clean": ([SUBMIT, CANCEL, ["status"]], ["clean", "--yes"], after_cancel),
}  # fmt: skip
"""Those of which `make slow` has half as many; with "host", a step is one of the laptop or of the login node."""


def words_of(host: Host | Laptop, words: list[str]) -> list[str]:
    """Return the words of a command, with the id of the cluster."""
    return [host.login.jobs()[0] if word == "CLUSTER" else word for word in words]


def run_all(host: Host | Laptop, commands: list[list[str]]) -> None:
    for words in commands:
        done = host(*words_of(host, words))
        assert done.returncode == 0, done.stderr


def steps_of(done: subprocess.CompletedProcess[str], host: Host | Laptop) -> list[int]:
    """Return the steps of a command; those on the login node of a laptop are negative."""
    assert done.returncode == 0, done.stderr
    counts = dict(re.findall(r"^steps of (\S+): (\d+)$", done.stderr, re.M))
    own, there = (int(counts.get(str(home), 0)) for home in (host.home, host.login.home))
    assert own + there > 3, done.stderr
    steps = list(range(1, own + 1))
    return steps if isinstance(host, Host) else [*range(-there, 0), *steps]


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("submit", 1),
        *(slow_variant(name, KILLS) for name in CASES),
        *(slow_variant(name, KILLS // 2) for name in MORE),
    ],
    ids=["one", *CASES, *MORE],
)
def test_a_command_that_a_signal_ends_leaves_what_can_be_cancelled(
    tmp_path: Path, name: str, kills: int
) -> None:
    before, words, check = {**CASES, **MORE}[name]
    make: Callable[[Path], Host | Laptop] = Laptop if name.startswith("host-") else Host
    model = make(tmp_path / "model")
    run_all(model, before)
    steps = steps_of(model(*words_of(model, words)), model)
    chosen = random.Random(f"{SEED}-{name}")
    signals = [signal.SIGKILL, signal.SIGINT]
    if name in MORE and kills == 1:
        signals = [chosen.choice(signals)]
    for number in signals:
        for step in chosen.sample(steps, min(kills, len(steps))):
            host = make(tmp_path / "host")
            run_all(host, before)
            ended = host(*words_of(host, words), step=step, number=number)
            try:
                assert ended.returncode != 0 or number == signal.SIGINT
                assert "Traceback" not in ended.stderr, ended.stderr
                check(host.login)
                host.login.check_clean()
            except AssertionError as error:
                raise AssertionError(f"{name}, step {step} of {steps[-1]}, {number!r}") from error
            shutil.rmtree(tmp_path / "host")
