"""Processes that a task starts, in workers that are forks of the process of their nannies.

A worker has only what a server of Python's own would have given it. tests/real/test_worker_processes.py does this with dask.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.processes import patience

PROGRAM = """
import concurrent.futures, multiprocessing, os, signal, sys, time
from gpujobs.injob import workerhost

def work(method, results):
    context = multiprocessing.get_context(method)
    process = context.Process(target=sys.exit, args=(3,))
    process.start()
    process.join()
    waiting = context.Process(target=time.sleep, args=(60,))
    waiting.start()
    waiting.terminate()
    waiting.join()
    with context.Pool(2) as pool:
        found = pool.map(abs, [-1, -2, -3])
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        found += executor.map(pow, [2, 3], [5, 2])
    results.put([process.exitcode, waiting.exitcode, *found])

if __name__ == "__main__":
    assert not workerhost.start()
    context = multiprocessing.get_context("forkserver")
    results = context.SimpleQueue()
    worker = context.Process(target=work, args=(sys.argv[1], results))
    worker.start()
    print(results.get(), flush=True)
    worker.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_worker_that_was_forked_starts_processes_in_each_way(tmp_path: Path, method: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    argv = [sys.executable, str(program), method]
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=patience(30))
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert output == "[3, -15, 1, 2, 3, 32, 9]\n", errors
    assert not errors


FORKS = """
import os, signal
from gpujobs.injob.children import defer_signals
defer_signals()
if pid := os.fork():  # a worker, which is a fork, defers signals itself
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
signal.signal(signal.SIGTERM, lambda number, frame: None)
defer_signals()
ended = []
for _ in range(200):
    pid = os.fork()
    if not pid:
        signal.pause()
    os.kill(pid, signal.SIGTERM)
    ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(set(ended), signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
"""


def test_a_signal_that_comes_with_the_fork_ends_the_new_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    try:
        output, _ = process.communicate(timeout=patience(30))
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert output == "{-15} set()\n"


PREPARED = """
import asyncio, json, socket, ssl, sys
import dask
from gpujobs.injob import workerhost

dask.config.set({"distributed.worker.http.routes": json.loads(sys.argv[1])})
workerhost._import_for_workers(cuda=False)
from tornado.iostream import SSLIOStream

reads = []
ssl.SSLContext.load_default_certs = lambda *_: reads.append(1)

async def accept():
    SSLIOStream(socket.socket()).close()

asyncio.run(accept())
print(*(name in sys.modules for name in ("distributed.http.health", "mine")), len(reads), workerhost.unsafe_to_fork())
"""
HEALTH = "distributed.http.health"


@pytest.mark.parametrize(
    ("routes", "health"),
    [([HEALTH, "mine", "distributed.nosuch"], True), (None, False), (HEALTH, False)],
    ids=["a-module-of-the-user", "null", "text"],
)
def test_workers_share_the_pages_of_dask_and_the_certificates_of_the_system(
    tmp_path: Path, routes: object, health: bool
) -> None:
    """Dask itself reports routes that are no list, or that cannot be imported."""
    (tmp_path / "mine.py").write_text("routes = []\n")
    argv = [sys.executable, "-c", PREPARED, json.dumps(routes)]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "GPUJOBS_PROTOCOL": "tls"}
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=patience(60), check=False, env=env
    )
    assert done.stdout.split() == [str(health), "False", "0"], done.stderr
