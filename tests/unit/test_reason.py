"""Why a program failed: the line that its output gives for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpujobs.injob.folder import OverMemory
from gpujobs.injob.log import error_in, reason_in
from gpujobs.injob.memory import with_memory
from gpujobs.injob.reason import error_of, reason_of

from ..support.each import each

KILLED = """\
2026-11-26 11:00:00,001 - distributed.client - INFO - waiting
Traceback (most recent call last):
  File "/home/ann/fail/oom.py", line 10, in <module>
    print(client.submit(fill, 3).result())
          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/opt/env/lib/distributed/client.py", line 402, in result
    raise exception.with_traceback(traceback)
distributed.scheduler.KilledWorker: Attempted to run task 'fill-1' on 4 different workers, but all \
those workers died while running it. For more information see https://distributed.dask.org/killed.html.
"""


def program(code: str, tmp_path: Path) -> str:
    """Return what a real Python writes that ends with an error; its folder has a bad name."""
    folder = tmp_path / "fail"
    folder.mkdir()
    (folder / "error.py").write_text(code)
    return subprocess.run(
        [sys.executable, str(folder / "error.py")],
        capture_output=True,
        text=True,
        check=False,
    ).stderr


@each(
    ("code", "reason"),
    [
        ("import queue\nqueue.Queue().get_nowait()  # an error", "_queue.Empty"),
        (
            "import subprocess\nsubprocess.run(['sleep', '9'], timeout=0.01)  # cannot",
            "subprocess.TimeoutExpired: Command '['sleep', '9']' timed out after 0.0",
        ),
        ("class Boom(Exception): pass\nraise Boom('lost')  # fail", "Boom: lost"),
        ("def f():\n    class Boom(Exception): pass\n    raise Boom\nf()", "f.<locals>.Boom"),
        ("raise RuntimeError('one\\ntwo')", "RuntimeError: one two"),
        ("x = = 1  # error", "SyntaxError: invalid syntax"),
        ("try:\n    {}['table']\nexcept KeyError:\n    raise LookupError('no table')",
         "KeyError: 'table'; then LookupError: no table"),
        ("try:\n    import numpie\nexcept ImportError as error:\n    raise ImportError(f'{error}: install it') from error",
         "ImportError: No module named 'numpie': install it"),
        ("import sys\nsys.exit('no such dataset: data/error')", "no such dataset: data/error"),
        ("def f(n): f(n + 1)\nf(0)  # error", "RecursionError: maximum recursion depth exceeded"),
        ("class E:\n    def __del__(self): raise ValueError('cannot be deleted')\ne = E()\nraise OSError('disk')\n",
         "OSError: disk"),
    ],
    ids=lambda text: None,
)  # fmt: skip
def test_the_reason_of_a_traceback_is_its_exception(code: str, reason: str, tmp_path: Path) -> None:
    text = program(code, tmp_path)
    assert reason_of(text) == error_of(text) == reason or reason in reason_of(text), text


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/home/ann/error/a.py", line 1, in <module>
  |     raise ExceptionGroup("both", [ValueError("a"), Boom("b")])
  | ExceptionGroup: both (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/ann/error/a.py", line 7, in fail
    |     raise ValueError("a")
    | ValueError: a
    +---------------- 2 ----------------
    | __main__.Boom: b
    +------------------------------------
"""
LABELLED = """\
0: Traceback (most recent call last):
0:   File "/error/a.py", line 1, in <module>
0:     fail()
0: queue.Empty
srun: error: node1: task 0: Exited with exit code 1
srun: Terminating StepId=3.0
slurmstepd: error: *** STEP 3.0 ON node1 CANCELLED AT 2026-11-26T11:00:00 ***
"""
REMOTE = '''\
multiprocessing.pool.RemoteTraceback:
"""
Traceback (most recent call last):
  File "/lib/pool.py", line 125, in worker
    result = (True, func(*args, **kwds))
__main__.Boom: lost
"""

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/a.py", line 3, in <module>
    pool.map(fail, [1])
__main__.Boom: lost
'''
COMPUTE_FAILED = """\
2026-11-26 11:00:00,123 - distributed.worker - ERROR - Compute Failed
Key:       f-12
Task:  <Task 'f-12' f(...)>
Exception: "Empty()"
Traceback: '  File "/home/ann/fail/a.py", line 3, in f\\n    raise Empty\\n'
"""


@each(
    ("text", "reason"),
    [
        (GROUP, "ExceptionGroup: both (2 sub-exceptions): ValueError: a; __main__.Boom: b"),
        (f"{GROUP}12:00:01 gpujobs: going on\n", "ExceptionGroup: both (2 sub-exceptions): ValueError: a; __main__.Boom: b"),
        (LABELLED, "queue.Empty"),
        (REMOTE, "__main__.Boom: lost"),
        ('  File "a.py", line 1\nOSError: disk\n2026-11-26 11:00:00,1 - distributed.nanny - WARNING - closing\n', "OSError: disk"),
        (COMPUTE_FAILED, 'Exception: "Empty()"'),
        ("[rank0]: Traceback (most recent call last):\n[rank0]:   File \"/error.py\", line 1\n[rank0]: a.Boom: b\n", "a.Boom: b"),
        ('    raise Error\n  File "/fail/a.py", line 3, in f\n    fail()\nBoom: of a log that is cut\n', "Boom: of a log that is cut"),
        ('Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "/fail/x.py", line 3 in f\n', "Fatal Python error: Aborted"),
        ("reading /scratch/error/failed.h5\nat step 3\n", "at step 3"),
        ("srun: error: Unable to create step for job 3: Invalid generic resource\n", "srun: error: Unable to create step for job 3: Invalid generic resource"),
        ("/opt/bin/python: No module named mpi4py\nsrun: error: node1: tasks 0-3: Exited with exit code 1\n", "/opt/bin/python: No module named mpi4py: pip install 'gpujobs[mpi]' into the jobs' Python"),
        ("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc: out_of_memory: CUDA error\nAborted\n", "what():  std::bad_alloc: out_of_memory: CUDA error"),
    ],
)  # fmt: skip
def test_other_outputs_have_the_reason_that_a_person_would_choose(text: str, reason: str) -> None:
    assert reason_of(text) == reason


def test_an_output_without_an_error_has_none() -> None:
    assert error_of('reading /fail/error.h5\n  File "/fail/x.py", line 3\n') == ""
    assert error_of("a.Boom: no traceback\n") == ""
    assert error_of("") == ""


def test_a_task_that_needs_more_memory_has_the_limit_of_its_workers_as_reason() -> None:
    workers: dict[str, OverMemory] = {"svd-0000-1": {"restarts": 4, "limit": 2**30}}
    message = "worker svd-0000-1 restarted 4 times: over its memory limit of 1 GiB: memory_per_job"
    reason = reason_of(KILLED)
    assert reason.startswith("distributed.scheduler.KilledWorker: Attempted to run task 'fill-1'")
    assert with_memory(reason, workers) == f"KilledWorker: {message}"
    assert with_memory(reason, {}) == reason
    assert with_memory("ValueError: x", workers) == f"ValueError: x ({message})"


def test_reasons_are_short(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"ValueError: {'x' * 1000}\n")
    assert len(reason_in(tmp_path / "log")) == len(error_in(tmp_path / "log")) == 300
