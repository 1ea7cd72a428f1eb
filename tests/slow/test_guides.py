"""What the guides tell users to run: the first job, and the line of dask-mpi that does not work."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ..conftest import unavailable
from ..support import mpi
from ..support.cli import NVML, ROOT, Cli
from ..support.processes import patience

pytestmark = pytest.mark.slow


def block(page: str, start: str) -> str:
    """Return the content of the first code block of a page whose line above is ``start``."""
    text = (ROOT / "docs" / page).read_text()
    found = re.search(rf"^{re.escape(start)}\n(.*?)^```$", text, re.M | re.S)
    assert found
    return found[1]


def test_the_first_job(home: Path) -> None:
    """Each command of the page succeeds, and prints the lines that follow it."""
    cli = Cli(home, {"GPUJOBS_SITE": "local"}, None)
    (cli.work / "hello.py").write_text(block("first-job.md", "```python"))
    (cli.work / "hello.yaml").write_text(block("first-job.md", "```yaml"))
    session = block("first-job.md", "<!-- executed -->\n```console")
    steps = re.findall(r"^\$ gpujobs (.*)\n((?:[^$].*\n)*)", session, re.M)
    assert len(steps) == 3
    for words, expected in steps:
        done = cli(*shlex.split(words))
        assert done.returncode == 0, done.stderr
        lines = (done.stdout + done.stderr).splitlines()
        assert set(expected.splitlines()) <= set(lines)


def test_the_bare_line_of_dask_mpi_gets_no_workers(tmp_path: Path) -> None:
    if why := mpi.missing():
        unavailable("mpi", why)
    line = re.search(r"`(mpirun [^`]*CUDAWorker)`", (ROOT / "docs" / "migrating.md").read_text())
    assert line
    folder = Path(sys.executable).parent
    env = {**os.environ, **mpi.AS_ROOT, "PATH": f"{folder}:{os.environ['PATH']}"}
    env |= {"PYTHONPATH": str(NVML), "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    process = subprocess.Popen(
        shlex.split(line[1]), cwd=tmp_path, env=env, text=True, stderr=subprocess.PIPE
    )
    stop = threading.Timer(patience(120), process.terminate)
    stop.start()
    try:  # the launcher may wait for the other rank
        assert process.stderr
        expected = block("migrating.md", "```text")
        assert expected in iter(process.stderr.readline, "")
    finally:
        stop.cancel()
        process.terminate()
        process.communicate(timeout=patience(30))
