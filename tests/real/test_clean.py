"""`gpujobs clean` on the real Slurm: one cluster has ended, and one runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ..support.cli import Cli
from ..support.processes import as_user, patience, until
from .test_clusters import connected


@pytest.mark.slurm
@pytest.mark.stub
def test_clean_removes_only_the_cluster_that_has_ended(cli: Cli) -> None:
    running = cli.submit({"gpus": 1})
    ended = cli.submit({"gpus": 1, "run": ["true"]}, name="q.yaml")
    until(lambda: cli.status(ended)["state"] == "DONE", 90)
    connected(cli, running, 1)
    folders = {name: Path(cli.status(name)["folder"]) for name in (running, ended)}

    def listed() -> str:
        return cli("clean").stdout

    until(lambda: ended in listed(), 60, "the end of the job in the queue")
    assert running not in listed() and folders[ended].is_dir()
    ours, theirs = os.openpty()
    with subprocess.Popen(  # type: ignore[call-overload]
        [cli.command, "clean"], env=cli.env, cwd=cli.work, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, **as_user(cli.user),
    ) as asks:  # fmt: skip
        os.write(ours, b"n\n")
        out, err = asks.communicate(timeout=patience(60))
    assert ended in out and "Remove 1 folder" in err and folders[ended].is_dir()
    done = cli("clean", "--yes")
    assert done.returncode == 0 and "1 folder removed" in done.stderr
    assert not folders[ended].exists() and folders[running].is_dir()
    known = json.loads(cli("status", "--all", "--json").stdout)["clusters"]
    assert [cluster["id"] for cluster in known] == [running]
    assert cli("cancel", running).returncode == 0
