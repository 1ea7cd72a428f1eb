"""The code that runs in jobs, function by function; as a whole it runs in tests/real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gpujobs import injob
from gpujobs.clusters import folder

from ..support.cli import NVML


@pytest.mark.parametrize(
    ("source", "environ", "devices"),
    [
        ("scheduler", {"CUDA_VISIBLE_DEVICES": "0,1"}, ["0", "1"]),
        ("scheduler", {"CUDA_VISIBLE_DEVICES": "1,0"}, ["1", "0"]),  # any order, and kept
        ("scheduler", {"CUDA_VISIBLE_DEVICES": "GPU-aa, GPU-bb"}, ["GPU-aa", "GPU-bb"]),
        ("scheduler", {"CUDA_VISIBLE_DEVICES": "MIG-1"}, ["MIG-1"]),
        ("scheduler", {"CUDA_VISIBLE_DEVICES": ""}, []),
        ("exclusive", {}, None),
        ("exclusive", {"CUDA_VISIBLE_DEVICES": "2"}, ["2"]),
        ("variable:SGE_HGR_gpu", {"SGE_HGR_gpu": "0 3"}, ["0", "3"]),
        ("variable:SGE_HGR_gpu", {"SGE_HGR_gpu": "gpu0 gpu3"}, ["0", "3"]),
        ("variable:X", {"X": "cuda:2,cuda:1"}, ["2", "1"]),
        ("variable:X", {"X": "GPU-aa GPU-bb", "CUDA_VISIBLE_DEVICES": "7"}, ["GPU-aa", "GPU-bb"]),
    ],
)
def test_visible_devices(source: str, environ: dict[str, str], devices: list[str] | None) -> None:
    assert injob.visible_devices(source, environ) == devices


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("scheduler", "CUDA_VISIBLE_DEVICES is not set"),
        ("variable:X", r"\$X is empty"),
        ("file:X", r"\$X names no file"),
    ],
)
def test_no_gpu_is_no_gamble(source: str, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        injob.visible_devices(source, {})


def test_fenced_gpus_without_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(NVML))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("FAKE_NVML_GPUS", "2")
    assert injob.own_devices("scheduler", 2, {}, False) == ["0", "1"]
    with pytest.raises(LookupError, match="CUDA_VISIBLE_DEVICES is not set"):
        injob.own_devices("scheduler", 1, {}, False)  # of a node with more, nobody knows which


def test_file_of_torque(tmp_path: Path) -> None:
    here = os.uname().nodename.split(".")[0]
    path = tmp_path / "gpufile"
    path.write_text(f"other-gpu0\n{here}-gpu2\n{here}-gpu1\n")
    assert injob.visible_devices("file:PBS_GPUFILE", {"PBS_GPUFILE": str(path)}) == ["2", "1"]


def test_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(NVML))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    found = injob.identity()
    assert found.pop("fast") == injob.fast_network()
    assert found == {
        "node": "node7",
        "uuid": "GPU-node7-0000-0000-0000-000000000002",
        "model": "Fake GPU",
        "memory": 16 * 2**30,
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-node7-0000-0000-0000-000000000001,0")
    assert injob.identity()["uuid"].endswith("1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-nosuch")
    assert injob.identity()["uuid"] == "MIG-nosuch" and "NotFound" in injob.identity()["error"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert injob.identity()["uuid"] is None


def test_two_workers_on_one_gpu() -> None:
    def worker(node: str, uuid: str | None) -> dict[str, Any]:
        return {"gpu": {"node": node, "uuid": uuid}}

    fine = {
        "a-0": worker("n1", "GPU-1"),
        "a-1": worker("n1", "GPU-2"),
        "a-2": worker("n2", "GPU-1"),
        "c": worker("n1", None),
        "d": worker("n1", None),
    }
    assert injob.duplicate(fine) == ""
    assert (
        injob.duplicate(fine | {"b-0": worker("n1", "GPU-1")})
        == "workers a-0 and b-0 share GPU GPU-1 on n1"
    )


def test_commands_are_taken_apart() -> None:
    argv = [
        "supervise",
        "--job=3",
        "--folder=/f",
        "--scheduler",
        "python",
        "-m",
        "s",
        "--port=0",
        "--workers",
        "dask",
        "--x",
        "--run",
        "p",
        "--workers",
        "--run",
        "--scheduler",
    ]
    options = injob.parse(argv)
    assert (options.job, options.folder) == (3, "/f")
    assert options.scheduler == ["python", "-m", "s", "--port=0"]
    assert options.workers == ["dask", "--x"]
    assert options.run == ["p", "--workers", "--run", "--scheduler"]


def test_the_first_one_ends_the_cluster(tmp_path: Path) -> None:
    won = []

    def end(number: int) -> None:
        if injob.Folder(str(tmp_path)).end(number, f"reason {number}", number):
            won.append(number)

    threads = [threading.Thread(target=end, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert json.loads((tmp_path / "ended").read_text())["exit_code"] == won[0]
    assert [path.name for path in tmp_path.iterdir()] == ["ended"]


@pytest.mark.parametrize("text", ["", "{", '{"workers": 3', "null", "[1]"])
def test_half_written_files_are_no_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "workers.json").write_text(text)
    assert injob.Folder(str(tmp_path)).registered() == {}


def test_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert injob.last_line(log) == ""
    log.write_bytes(b"x" * 100_000 + b"\nlast\0 one \xff\n\n  \n")
    assert injob.last_line(log) == "last one \ufffd"


def test_it_compiles_for_older_pythons() -> None:
    import ast

    ast.parse(Path(injob.__file__).read_text(), feature_version=(3, 9))


def test_it_starts_without_gpujobs(tmp_path: Path) -> None:
    copy = tmp_path / "injob.py"
    copy.write_text(Path(injob.__file__).read_text())
    done = subprocess.run(
        [sys.executable, "-S", str(copy), "--help"],
        capture_output=True,
        text=True,
        env={},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_lease_is_judged_by_the_file_servers_clock(tmp_path: Path) -> None:
    head = injob.Head(
        injob.parse(
            ["supervise", f"--folder={tmp_path}", "--job=0", "--lease=60", "--scheduler", "x"]
        )
    )
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "beat").write_text("1.0")  # by clocks that are years apart
    lease = tmp_path / "lease"
    lease.write_text("9999999999.0")
    head._look_at_lease()
    head.lease_time = 0
    lease.write_text("0.0")
    head._look_at_lease()
    assert folder.silence(tmp_path) < 5
    os.utime(lease, (lease.stat().st_mtime - 100, lease.stat().st_mtime - 100))
    assert 95 < folder.silence(tmp_path) < 105
    head.lease_time = 0
    with pytest.raises(injob.End, match="silent for 100 s"):
        head._look_at_lease()
    lease.unlink()
    assert folder.silence(tmp_path) == float("inf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]


def test_the_walltime_does_not_follow_a_clock_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    options = injob.parse(
        ["supervise", f"--folder={tmp_path}", "--job=0", f"--started={now - 10}", "--walltime=100"]
    )
    job = injob.Job(options)
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert 80 < job.time_left() <= 90


def test_warnings_of_the_batch_scheduler_do_not_kill_children(tmp_path: Path) -> None:
    code = "import os, signal; [os.kill(os.getpid(), n) for n in (signal.SIGUSR1, signal.SIGUSR2)]; print('alive')"
    child = injob.Child("it", [sys.executable, "-c", code], tmp_path / "log", dict(os.environ))
    assert child.wait(20) and child.code == 0
    assert (tmp_path / "log").read_text() == "alive\n"


def test_a_job_whose_folder_was_removed_ends(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "injob.py").touch()
    job = injob.Workers(
        injob.parse(["supervise", f"--folder={folder}", "--job=1", "--workers", "x"])
    )
    (folder / "injob.py").unlink()
    folder.rmdir()
    job.look_for_end()  # a file server may be away for a moment
    job.folder_seen -= injob.SILENCE + 1
    with pytest.raises(injob.End, match="has not been there for 120 s"):
        job.look_for_end()
