"""How long clusters live: their end without work."""

from __future__ import annotations

import math

import pytest

from ..support.backend import Backend
from ..support.cli import Cli
from ..support.processes import patience, until
from .test_clusters import state

WAITING_TASK = """
import sys, time
from pathlib import Path
import gpujobs

cluster, folder, hold = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
client = gpujobs.connect(cluster)
task = client.submit(abs, -1, resources={"NONE": 1})
time.sleep(hold)
assert not (folder / "ended").exists()
task.release()
while not (folder / "ended").exists():
    time.sleep(0.5)
print("ended")
"""


@pytest.mark.filterwarnings("default")
def test_end_without_tasks(cli: Cli, backend: Backend) -> None:
    """A task that waits for a worker keeps the cluster; a client that only looks on does not."""
    seconds = math.ceil(patience(6))
    cluster = cli.submit({"gpus": 1, "idle_timeout": f"{seconds}s", "client_timeout": "1h"})
    until(lambda: state(cli, cluster) == "RUNNING", 60, "the cluster", every=0.5)
    folder = cli.status(cluster)["folder"]
    done = cli.python_run(WAITING_TASK, cluster, folder, str(1.3 * seconds))
    assert done.stdout.strip().endswith("ended"), done.stderr
    found = cli.status(cluster)
    assert (found["kind"], found["state"], found["exit_code"]) == ("idle", "DONE", 0)
    assert found["reason"] == f"the cluster was without tasks for {seconds} s"
    assert found["ends_at"] is None
    backend.wait_empty(20, cluster)
