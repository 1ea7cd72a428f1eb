"""Terminals: the line of progress, Ctrl-C, a closed window, completion. On the local site, but for jobs that wait."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest

from ..conftest import local_cli, make_cli, nothing_left
from ..support.backend import SlurmBackend
from ..support.cli import Cli
from ..support.processes import patience, processes_with, stop, until
from .programs import SLEEP


@pytest.fixture
def local(home: Path, request: pytest.FixtureRequest) -> Iterator[Cli]:
    made = local_cli(home, request)
    yield made
    assert made("cancel", "--all").returncode == 0
    until(lambda: not processes_with(f"GPUJOBS_FOLDER={home}"), 20)


class Terminal:
    """A terminal that runs gpujobs; ``screen`` is all that was written to it."""

    def __init__(self, cli: Cli, *arguments: str, columns: int = 40) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            [cli.command, *arguments], env={**cli.env, "TERM": "xterm"}, cwd=cli.work, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.screen = ""
        self._emulator = pyte.Screen(columns, 24)
        self._stream = pyte.Stream(self._emulator)

    def read(self) -> str:
        while select.select([self.master], [], [], 0)[0]:
            try:
                new = os.read(self.master, 65536)
            except OSError:  # the program has ended
                break
            if not new:
                break
            self.screen += new.decode()
            self._stream.feed(new.decode())
        return self.screen

    @property
    def shown(self) -> str:
        """What one sees now."""
        self.read()
        return "\n".join(line.rstrip() for line in self._emulator.display).rstrip()

    def until(self, pattern: str, seconds: float = 60) -> str:
        until(lambda: re.search(pattern, self.read()), seconds, f"{pattern} in {self.screen!r}")
        found = re.search(pattern, self.screen)
        assert found
        return found[0]

    def end(self, seconds: float = 60) -> int:
        until(
            lambda: (self.read(), self.process.poll() is not None)[1],
            seconds,
            f"the end after {self.screen!r}",
        )
        self.read()
        return int(self.process.returncode)

    def close(self) -> None:
        """Close the window."""
        os.close(self.master)


@contextlib.contextmanager
def terminal(cli: Cli, *arguments: str, columns: int = 40) -> Iterator[Terminal]:
    made = Terminal(cli, *arguments, columns=columns)
    try:
        yield made
    finally:
        stop(made.process)  # type: ignore[arg-type]
        with contextlib.suppress(OSError):
            made.close()


def sleeping(local: Cli, seconds: str) -> str:
    local.write("sleep.py", SLEEP)
    return str(
        local.write(
            "p.yaml",
            {"gpus": 0, "workers": {"memory": "1GiB"}, "run": ["python", "sleep.py", seconds]},
        )
    )


@pytest.mark.stub
def test_one_line_of_progress_is_rewritten_and_gone_at_the_end(local: Cli) -> None:
    with terminal(local, "submit", sleeping(local, "4"), "--wait", columns=20) as window:
        frames = {window.shown}
        while window.process.poll() is None:
            frames.add(window.shown)
            time.sleep(0.05)
        assert window.end() == 0
        last = window.shown
    live = [re.findall(r"^\W* ([01]/1 w.*)$", frame, re.M) for frame in frames]
    assert max(map(len, live)) == 1  # in one row
    assert len({line for lines in live for line in lines}) > 1  # it moves
    assert any("here\n" in frame for frame, lines in zip(frames, live, strict=True) if lines)
    assert not re.search("[01]/1 w", last)
    assert re.search(r"is done after\s+\d\d:\d\d", last)


@pytest.mark.slow
@pytest.mark.stub
def test_without_a_terminal_progress_has_plain_lines(local: Cli) -> None:
    done = local("submit", sleeping(local, "4"), "--wait")
    assert done.returncode == 0
    assert "\x1b" not in done.stderr and "\r" not in done.stderr
    lines = re.findall(r"^\d/1 workers.*$", done.stderr, re.M)
    assert 1 <= len(lines) <= 4  # one a change, not two a second
    assert re.fullmatch(r"p-[0-9a-f]{4}\n", done.stdout)


@pytest.mark.stub
def test_ctrl_c_while_waiting_leaves_the_cluster(local: Cli) -> None:
    with terminal(local, "submit", sleeping(local, "600"), "--wait") as window:
        cluster = window.until(r"p-[0-9a-f]{4}")
        window.until(r"here\r\n")
        os.write(window.master, b"\x03")
        assert window.end(20) == 130
        assert f"to end it: gpujobs cancel {cluster}" in window.screen
        assert "Traceback" not in window.screen
    assert local.status(cluster)["state"] == "RUNNING"


@pytest.mark.slow
@pytest.mark.stub
def test_a_closed_window_changes_nothing(local: Cli) -> None:
    with terminal(local, "submit", sleeping(local, "5"), "--wait") as window:
        cluster = window.until(r"p-[0-9a-f]{4}")
        window.until("0/1 workers")
        window.close()  # SIGHUP for all its processes
        window.process.wait(patience(20))
    until(lambda: local.status(cluster)["state"] == "DONE", 60)
    assert local("logs", cluster).stdout == "here\n"


@pytest.mark.stub
def test_status_watch_shows_changes_until_the_end(local: Cli) -> None:
    cluster = local.submit({"gpus": 0, "workers": {"memory": "1GiB"}, "run": ["sleep", "600"]})
    with terminal(local, "status", "--watch", columns=200) as window:
        until(lambda: re.search(rf"^{cluster} +local .*RUNNING", window.shown, re.M), 40)
        os.write(window.master, b"\x03")
        assert window.end(20) == 130
        assert "Traceback" not in window.screen
    with terminal(local, "status", cluster, "--watch", columns=200) as window:
        window.until(r"WORKERS")
        assert local("cancel", cluster).returncode == 0
        assert window.end(40) == 0  # its state is final
        assert "CANCELLED" in window.shown and window.shown.count("WORKERS") == 1
    listed = local.start("status", cluster, "--watch", "--json")
    out, _ = listed.communicate(timeout=patience(30))
    assert json.loads(out)["version"] == 2


COUNT = """
import time
from pathlib import Path

while not Path("go").exists():
    time.sleep(0.1)
for n in range(600):
    print(n, flush=True)
    time.sleep(0.3)
"""


@pytest.mark.stub
def test_logs_follow_until_the_cluster_ends(local: Cli) -> None:
    local.write("count.py", COUNT)
    profile = {"gpus": 0, "workers": {"memory": "1GiB"}, "run": ["python", "count.py"]}
    cluster = local.submit(profile)
    assert "there is no output yet" in local("logs", cluster).stderr
    (local.work / "go").touch()
    with terminal(local, "logs", cluster, "-f") as window:
        window.until(r"\b3\r\n")
        os.write(window.master, b"\x03")
        assert window.end(20) == 130
        assert "Traceback" not in window.screen
    everything = local.start("logs", cluster, "-f", "--all")
    time.sleep(2)
    # No process is left to write `ended`: only the batch scheduler knows that the jobs are gone.
    for pid in processes_with(f"GPUJOBS_JOB_NAME={cluster}\0"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    out, err = everything.communicate(timeout=patience(90))
    assert everything.returncode == 0, err
    assert (
        "==> run.log <==" in out and "==> scheduler.log <==" in out and "==> job-0.log <==" in out
    )
    assert local.status(cluster)["state"] == "FAILED"


@pytest.mark.stub
def test_completion_in_bash_knows_commands_clusters_options_and_sites(local: Cli) -> None:
    cluster = local.submit({"gpus": 0, "workers": {"memory": "1GiB"}, "run": ["sleep", "600"]})

    def completed(*words: str) -> list[str]:
        quoted = " ".join(f"'{word}'" for word in words)
        script = (
            f'PATH={Path(local.command).parent}:$PATH; eval "$(gpujobs completion bash)"; '
            f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _gpujobs_completion gpujobs; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        done = subprocess.run(
            ["bash", "-c", script],
            env=local.env,
            cwd=local.work,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    assert completed("gpujobs", "can") == ["cancel"]
    assert completed("gpujobs", "cancel", "p-") == [cluster]
    assert "--soonest" in completed("gpujobs", "submit", "--so")
    assert completed("gpujobs", "sites", "show", "example-sl") == ["example-slurm"]
    assert completed("gpujobs", "submit", "--site", "loc") == ["local"]


WORK = """
import time
from distributed import Client

with Client() as client:
    client.wait_for_workers(1)
    print("it works", flush=True)
    client.gather(client.map(time.sleep, [600] * 3, pure=False))
"""


@pytest.mark.slow
def test_status_watch_has_a_row_for_each_worker(local: Cli) -> None:
    local.write("work.py", WORK)
    workers = {"memory": "1GiB", "threads": 1}
    cluster = local.submit({"gpus": 0, "workers": workers, "run": ["python", "work.py"]})
    row = rf"^{cluster}-0 +\S+ +1 +1 +\d+ % +\d[\d.]*MiB of 1GiB +- +- +-$"
    with terminal(local, "status", cluster, "--watch", columns=120) as window:
        until(lambda: re.search(row, window.shown, re.M), 60, "a worker with three tasks")
        assert window.shown.count("WORKER ") == 1  # the table is rewritten
        until(lambda: re.search(r"^  \| it works$", window.shown, re.M), 60, "the output of run")
        assert local("cancel", cluster).returncode == 0
        assert window.end(40) == 0
        assert f"{cluster} on local: CANCELLED" in window.shown
    assert local("status", cluster, "--watch").stdout.startswith(f"{cluster} on local: CANCELLED")


@pytest.mark.slow
@pytest.mark.stub
def test_no_color_switches_colours_off(local: Cli) -> None:
    cluster = local.submit({"gpus": 0, "workers": {"memory": "1GiB"}, "run": ["sleep", "600"]})
    for value, coloured in (("", True), ("1", False)):
        plain = Cli(local.home, {**local.env, "NO_COLOR": value}, None)
        with terminal(plain, "status", cluster, "--watch", columns=100) as window:
            until(lambda: "RUNNING" in window.shown, 60)
            assert ("\x1b[32m" in window.screen) is coloured


@pytest.mark.slow
@pytest.mark.slurm
def test_the_reason_of_a_waiting_job_is_shown_until_it_starts(
    slurm_backend: SlurmBackend, home: Path
) -> None:
    """On a real Slurm, whose reason is in both views until the job starts."""
    cli = make_cli(slurm_backend, home, "root", stub=True)
    profile = {"gpus": 2, "directives": ["--begin=now+1hour"], "run": ["sleep", "3"]}
    path = str(cli.write("late.yaml", profile))
    with terminal(cli, "submit", path, "--wait", columns=120) as waiting:
        cluster = waiting.until(r"late-[0-9a-f]{4}")
        until(lambda: re.search(r"0/2 workers.*BeginTime", waiting.shown), 60, "the reason")
        with terminal(cli, "status", cluster, "--watch", columns=120) as watching:
            row = rf"^{cluster} .*PENDING.*$"
            until(lambda: re.search(row, watching.shown, re.M), 60, "the cluster")
            until(lambda: "BeginTime" in watching.shown, 60, "the reason")
            (job,) = cli.status(cluster)["jobs"]
            update = ["scontrol", "update", f"JobId={job['id']}", "StartTime=now"]
            assert slurm_backend.slurm.attempt(*update).returncode == 0
            assert waiting.end(90) == 0
            assert "is done after" in waiting.shown and "BeginTime" not in waiting.shown
            assert watching.end(60) == 0
            assert "DONE" in watching.shown and "BeginTime" not in watching.shown
    nothing_left(slurm_backend)
