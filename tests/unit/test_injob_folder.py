"""The cluster's folder, as its jobs see it, and the names that they compute."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from gpujobs.injob.folder import DamagedError, Ended, EndKind, Folder, read_file
from gpujobs.injob.log import error_in, launcher_reason, nodes_seen, reason_in
from gpujobs.injob.names import job_worker_names


def test_the_first_one_ends_the_cluster(tmp_path: Path) -> None:
    won = []

    def end(number: int) -> None:
        if Folder(str(tmp_path)).end(Ended(EndKind.FAILED, number, f"reason {number}", number)):
            won.append(number)

    threads = [threading.Thread(target=end, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    text = (tmp_path / "ended").read_text()
    assert text.count("\n") == 1
    value = json.loads(text)
    assert value.pop("time") > 1e9
    assert value == {
        "kind": "failed",
        "exit_code": won[0],
        "reason": f"reason {won[0]}",
        "job": won[0],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["ended"]


@pytest.mark.parametrize("kind", EndKind)
def test_ended_is_read_as_it_was_written(kind: EndKind) -> None:
    ended = Ended(kind, 3, "a reason", None)
    assert Ended.parse(json.loads(ended.json())) == ended


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"exit_code": 0, "reason": "", "job": 0, "time": 1.0}, EndKind.DONE),
        ({"exit_code": 9, "reason": "run: ended", "job": 0, "time": 1.0}, EndKind.FAILED),
        ({"exit_code": 70, "reason": "it could not start", "job": 2}, EndKind.FAILED),
        ({"kind": "of a later version", "exit_code": 0}, EndKind.DONE),
        ({}, EndKind.FAILED),  # half written
    ],
)
def test_an_end_with_missing_keys_is_read(value: dict[str, Any], kind: EndKind) -> None:
    ended = Ended.parse(value)
    assert ended.kind is kind
    assert ended.exit_code == value.get("exit_code", 70)
    assert ended.reason == value.get("reason", "")


@pytest.mark.parametrize("text", ["", "{", '{"job": "x"}', "null", "[1]"])
def test_half_written_files_are_no_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "head-1").mkdir()
    (tmp_path / "head-1" / "owner").write_text(text)
    assert Folder(str(tmp_path)).read("head-1/owner") == {}


def test_a_pipe_in_place_of_a_file_is_refused_and_closed_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(DamagedError, match="is not a regular file"):
        read_file(tmp_path / "pipe")
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_the_error_in_a_log_is_read_from_its_first_byte_and_other_lines_are_none(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    log.write_text("cannot open /data\n")
    assert error_in(log) == "cannot open /data"
    log.write_text("all is well\n")
    assert error_in(log) == ""


def test_the_reason_in_a_log_is_its_last_line_and_short(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert reason_in(log) == ""
    log.write_bytes(b"x" * 100_000 + b"\nlast\0 one \xff\n\n  \n")
    assert reason_in(log) == "last one \ufffd"
    log.write_text("y" * 1000)
    assert reason_in(log) == "y" * 300
    log.write_text("pynvml.NVMLError_LibraryNotFound: NVML Shared Library Not Found\n")
    assert reason_in(log).startswith("the node has no NVIDIA driver, or the job has no GPU (pynvml")


NOISE = """\
ModuleNotFoundError: No module named 'cudf'
  warnings.warn('resource_tracker: There appear to be 30 leaked semaphore objects to clean up')
2026-11-21 09:12:01,120 - distributed.nanny - INFO - reaping stray process <SpawnProcess name='x'>
/var/spool/slurmd/job00012/slurm_script: line 77: 30692 Killed   $python "$GPUJOBS_FOLDER/injob.pyz"
[1795251] UCX  WARN  unused environment variable: UCX_MEMTYPE_CACHE
09:12:03 gpujobs: stopping (SIGTERM): no worker is registered
Done.
"""


def test_the_reason_is_the_last_line_with_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(NOISE)
    assert reason_in(log) == "ModuleNotFoundError: No module named 'cudf'"
    assert reason_in(log, 1) == "ModuleNotFoundError: No module named 'cudf'"
    assert reason_in(log, 137) == ""  # what is killed writes no reason
    assert reason_in(log, offset=NOISE.index("  warnings")) == "Done."
    log.write_text(NOISE.replace("Done.\n", "").partition("\n")[2])
    assert reason_in(log) == ""


CHAIN = """\
Traceback (most recent call last):
  File "/opt/lib/distributed/scheduler.py", line 5020, in update_graph
    expr = deserialize(expr_ser.header, expr_ser.frames)
^^^^^^^^^^^
ModuleNotFoundError: No module named 'helper'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "main.py", line 5, in <module>
    print(client.gather(client.map(cube, range(5))))
RuntimeError: Error during deserialization of the task graph. This frequently
occurs if the Scheduler and Client have different environments.
For more information, see
https://docs.dask.org/en/stable/deployment-considerations.html
"""
"""What distributed raises in `run` if the dask scheduler cannot import a module."""
HANDLING = """\
Traceback (most recent call last):
  File "main.py", line 1, in <module>
    raise ValueError("of an earlier traceback")
ValueError: of an earlier traceback
12:00:01 going on
Traceback (most recent call last):
  File "main.py", line 3, in <module>
    {}["table"]
KeyError: 'table'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "main.py", line 5, in <module>
    raise InputError("no such table,\\nin any file")
InputError: no such table,
in any file
"""
FIRST_AND_LAST = "KeyError: 'table'; then InputError: no such table, in any file"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            CHAIN,
            "ModuleNotFoundError: No module named 'helper' (workers import from `workdir`, the "
            "folder of the program, and PYTHONPATH)",
        ),
        (HANDLING, FIRST_AND_LAST),
        (f"{HANDLING}2026-11-21 09:12:01 - distributed.nanny - INFO - closed\n", FIRST_AND_LAST),
        (f"{HANDLING}Traceback (most recent call last):\n  f()\nOSError: disk\n", "OSError: disk"),
        (f"{HANDLING}error: later\n\nerror: last\n", "error: last"),
    ],
)
def test_the_reason_of_a_chain_of_exceptions_is_its_first(
    tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "log").write_text(text)
    assert reason_in(tmp_path / "log") == reason


PRRTE = """\
it starts
--------------------------------------------------------------------------
Your job has requested more processes than the ppr for
this topology can support:

  App: python
  Number of procs:  8
  Procs mapped:  4
  Total number of procs:  4
  PPR: 4:node

Please revise the conflict and try again.
--------------------------------------------------------------------------
"""


AS_ROOT = """\
prterun has detected an attempt to run as root.

Running as root is *strongly* discouraged as any mistake (e.g., in
defining TMPDIR) or bug can result in catastrophic damage to the OS
file system, leaving your system in an unusable state.

We strongly suggest that you run prterun as a non-root user.

You can override this protection by adding the --allow-run-as-root
option to your command line.  However, we reiterate our strong advice
against doing so - please do so at your own risk.
--------------------------------------------------------------------------
"""


def test_the_reason_of_a_launcher_is_its_first_paragraph(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(PRRTE)
    reason = "Your job has requested more processes than the ppr for this topology can support:"
    assert launcher_reason(log, 0) == reason
    assert nodes_seen(log, 0, ranks_per_node=4) == 1
    log.write_text(AS_ROOT)
    assert launcher_reason(log, 0) == "prterun has detected an attempt to run as root."
    log.write_text(f"a table\n{'-' * 20}\n1 2\nValueError: no\n")
    assert launcher_reason(log, 0) == "ValueError: no"
    log.write_text("srun: error: node2: task 1: Killed\nsrun: done\n")
    assert launcher_reason(log, 0) == "srun: error: node2: task 1: Killed"
    assert nodes_seen(log, 0, ranks_per_node=4) is None


@pytest.mark.parametrize(
    ("workers", "ranks", "names"),
    [
        (0, 0, ["svd-3"]),
        (1, 0, ["svd-3"]),
        (2, 0, ["svd-3-0", "svd-3-1"]),
        (2, 2, ["svd-6", "svd-7"]),
        (4, 2, ["svd-6-0", "svd-6-1", "svd-7-0", "svd-7-1"]),
    ],
)
def test_workers_are_named_by_their_job_and_rank(
    workers: int, ranks: int, names: list[str]
) -> None:
    assert job_worker_names("svd", 3, workers, ranks) == names


def test_a_folder_that_cannot_be_written_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not Folder(os.fspath(tmp_path / "missing")).end(Ended(EndKind.DONE, 0))
    assert "cannot write" in capsys.readouterr().err
