"""Signals of the batch scheduler reach the supervisor, whenever they come: run in a real bash."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from gpujobs.injob import archive
from gpujobs.injob.children import visible_process
from gpujobs.injob.job import Job, JobExit
from gpujobs.planning.render import render

from ..support.jobevents import facts_of
from ..support.processes import patience
from .support import plan
from .test_injob import options
from .test_quoting import local_profile

SLEEP = "import time\ntime.sleep(60)\n"
"""A stand-in for the supervisor."""


def script_with(home: Path, supervisor: bytes) -> str:
    """Return a job's script; the folder of its cluster has ``supervisor`` in the place of the real one."""
    folder = home / ".gpujobs" / "svd-0000"
    for name in ("jobs", "logs"):
        (folder / name).mkdir(parents=True)
    (folder / "injob.pyz").write_bytes(supervisor)
    return render(plan(home, local_profile(home), "local"), "svd-0000")[0].text


def environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "GPUJOBS_INDEX": "0"}


@pytest.mark.parametrize("number", ["TERM", "HUP"])  # by which Flux ends a script
@pytest.mark.parametrize(
    "moment", ["\nstopped='' supervisor", "\nsupervisor=$!", "\nwhile kill -0"]
)
def test_a_signal_never_leaves_the_supervisor_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, number: str
) -> None:
    home = tmp_path
    monkeypatch.setenv("HOME", str(home))
    text = script_with(home, SLEEP.encode())
    assert text.count(moment) == 1
    folder = home / ".gpujobs" / "svd-0000"
    env = environment(home)
    reader, writer = os.pipe()  # which all processes of the job hold open
    script = text.replace(moment, f"\nkill -{number} $${moment}")
    done = subprocess.run(["bash", "-c", script], env=env, pass_fds=[writer], check=False)
    os.close(writer)
    assert done.returncode == 143
    left = facts_of(folder, 0).left
    assert left and left.exit_code == 143
    assert select.select([reader], [], [], 10)[0], "a process of the job is left"
    os.close(reader)


@pytest.mark.parametrize(
    ("supervisor", "stops", "latest", "whole_job"),
    [
        (SLEEP.encode(), 40, 0.1, True),
        (SLEEP.encode(), 40, 0.1, False),
        (archive.build(), 8, 0.8, True),  # a job of workers that waits for the dask scheduler
    ],
    ids=["all processes", "batch script", "real supervisor"],
)
def test_a_job_that_is_stopped_at_any_moment_ends_only_itself(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    supervisor: bytes,
    stops: int,
    latest: float,
    whole_job: bool,
) -> None:
    """Also while bash waits: it then loses the exit code of a supervisor that dies at the same time."""
    monkeypatch.setenv("HOME", str(tmp_path))
    script = script_with(tmp_path, supervisor)
    folder = tmp_path / ".gpujobs" / "svd-0000"
    (folder / "head-1").mkdir()
    (folder / "head-1" / "owner").write_text('{"job": 7}')
    events, moments = folder / "jobs" / "0.jsonl", random.Random(0)
    for _ in range(stops):
        job = subprocess.Popen(
            ["bash", "-c", script], env=environment(tmp_path), start_new_session=True
        )
        time.sleep(moments.uniform(0, latest))
        (os.killpg if whole_job else os.kill)(job.pid, signal.SIGTERM)
        code = job.wait(patience(30))
        log = "".join(path.read_text() for path in folder.glob("logs/*"))
        facts = facts_of(folder, 0)
        assert not (folder / "ended").exists() and not facts.reason, log
        # Before the script has set its traps, it says nothing.
        assert code == -signal.SIGTERM or (facts.left and facts.left.exit_code == code), log
        assert code in (143, -signal.SIGTERM) or supervisor != SLEEP.encode(), log
        events.unlink(missing_ok=True)


def test_a_supervisor_notices_that_its_batch_script_was_killed_before_it_was_ready(
    tmp_path: Path,
) -> None:
    script = subprocess.Popen(["true"])
    namespace = Path("/proc/self/ns/pid").readlink()
    alive = Job(options(tmp_path, batch_script=f"{os.getpid()}@{namespace}"))
    alive._check_batch_script()
    script.wait()
    dead = Job(options(tmp_path, batch_script=f"{script.pid}@{namespace}"))
    with pytest.raises(JobExit, match="its batch script was killed"):
        dead._check_batch_script()
    assert dead.run() == 143  # before it does anything else


@pytest.mark.parametrize("text", ["", "12@", "12@pid:[1]"])
def test_a_batch_script_outside_of_the_container_is_not_looked_for(text: str) -> None:
    assert visible_process(text) == 0
