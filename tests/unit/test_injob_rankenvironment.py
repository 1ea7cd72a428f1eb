"""The environment of MPI ranks on other nodes; tests/real/test_mpi.py has the real thing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gpujobs.injob.options import SuperviseOptions
from gpujobs.injob.rank import rank_changes, write_rank_script

BEFORE = {"HOME": "/h", "A": "1", "GONE": "x", "TMPDIR": "/tmp/job", "SLURM_JOB_ID": "5"}


def test_ranks_get_what_setup_changes() -> None:
    after = {**BEFORE, "A": "2", "NEW": "n", "TMPDIR": "/tmp/own", "SLURM_JOB_ID": "6"}
    del after["GONE"]
    assert rank_changes(BEFORE, after, ()) == {"A": "2", "NEW": "n", "GONE": None}


def test_ranks_get_all_names_of_the_profile() -> None:
    assert rank_changes(BEFORE, BEFORE, ["A", "TMPDIR"]) == {"A": "1", "TMPDIR": "/tmp/job"}


def test_ranks_always_get_import_paths_and_the_configuration_of_dask() -> None:
    needed = {"PYTHONPATH": "/p", "LD_LIBRARY_PATH": "/l", "DASK_X": "1", "UCX_TLS": "all"}
    after = {**BEFORE, **needed, "GPUJOBS_NODE": "node1", "BASH_FUNC_module%%": "() { :; }"}
    assert rank_changes(after, after, ()) == needed
    assert rank_changes(None, after, ()) == needed


def test_the_script_runs_a_command_in_that_environment(tmp_path: Path) -> None:
    odd = 'it\'s $HOME `ls`\n"two" lines'
    saved = "\0".join(f"{name}={value}" for name, value in BEFORE.items())
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "3.environment").write_text(saved)
    options = SuperviseOptions(str(tmp_path), job=3)
    write_rank_script(options, {"HOME": "/h", "A": odd, "PATH": "/usr/bin:/bin"})
    script = tmp_path / "jobs" / "3.ranks.sh"
    assert script.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "jobs" / "3.environment").exists()
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    argv = ["sh", str(script), sys.executable, "-c", code, "a b", "$A"]
    done = subprocess.run(argv, env=BEFORE, capture_output=True, text=True, check=True)
    arguments, environ = json.loads(done.stdout)
    assert arguments == ["a b", "$A"]
    assert environ["A"] == odd and "GONE" not in environ
    assert environ["TMPDIR"] == "/tmp/job" and environ["SLURM_JOB_ID"] == "5"
