"""Signals of the batch scheduler reach the supervisor, whenever they come: run in a real bash."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path

import pytest

from gpujobs.injob.job import Job, JobExit
from gpujobs.injob.process import visible_process
from gpujobs.planning.render import render

from .support import plan
from .test_injob import options
from .test_quoting import local_profile

SLEEP = "import time\ntime.sleep(60)\n"
"""A stand-in for the supervisor."""


@pytest.mark.parametrize("moment", ["\nsupervisor=$!", "\nwhile kill -0"])
def test_a_signal_never_leaves_the_supervisor_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    home = tmp_path
    monkeypatch.setenv("HOME", str(home))
    text = render(plan(home, local_profile(home), "local"), "svd-0000")[0].text
    assert text.count(moment) == 1
    folder = home / ".gpujobs" / "svd-0000"
    for name in ("jobs", "logs"):
        (folder / name).mkdir(parents=True)
    (folder / "injob.pyz").write_text(SLEEP)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "GPUJOBS_INDEX": "0"}
    reader, writer = os.pipe()  # which all processes of the job hold open
    script = text.replace(moment, f"\nkill -TERM $${moment}")
    done = subprocess.run(["bash", "-c", script], env=env, pass_fds=[writer], check=False)
    os.close(writer)
    assert done.returncode == 143
    assert '"exit_code": 143' in (folder / "jobs" / "0.json").read_text()
    assert select.select([reader], [], [], 10)[0], "a process of the job is left"
    os.close(reader)


def test_a_supervisor_whose_batch_script_was_killed_before_it_was_ready(tmp_path: Path) -> None:
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
