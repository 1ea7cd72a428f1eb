"""CUDA's MPS for the workers of a job, with a fake daemon; tests/real runs it in jobs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpujobs.cli.plan_text import plan_text
from gpujobs.deploy.keywords import spec_of
from gpujobs.injob import mps
from gpujobs.injob.archive import build
from gpujobs.injob.folder import EndKind
from gpujobs.injob.job import JobExit
from gpujobs.injob.mps import MpsError, MpsService, is_provided, named_gpus, private_folder, shared
from gpujobs.injob.names import ARCHIVE
from gpujobs.injob.options import SuperviseOptions
from gpujobs.injob.workers import Workers
from gpujobs.planning.plan import make_plan
from gpujobs.planning.render import render

from ..support.cli import NVML, ROOT
from ..support.each import each
from ..support.processes import ids_of, until
from .support import error_of, made_plan

FAKE = ROOT / "tests" / "fakes" / "mps"
SHARED = {"workers_per_gpu": 4, "mps": True}


# -- plan --------------------------------------------------------------------------------------------
def options(home: Path, **workers: Any) -> list[str]:
    text = render(made_plan(home, {"gpus": 4, "workers": workers}), "svd-1")[0].text
    return [word for word in text.split() if word.startswith("--mps")]


def test_jobs_start_mps_if_the_profile_has_it(home: Path) -> None:
    assert options(home, workers_per_gpu=4) == []
    assert options(home, **SHARED) == ["--mps"]
    found = options(home, **SHARED, mps_thread_percentage=30)
    assert found == ["--mps", "--mps-thread-percentage=30"]
    assert "1/4 of a GPU through MPS" in plan_text(
        made_plan(home, {"gpus": 4, "workers": SHARED}), "svd"
    )


def test_python_has_the_keyword_and_the_option(home: Path) -> None:
    site = str(home / "s.yaml")
    for keywords in (SHARED, {"worker_options": SHARED}):
        plan = make_plan(spec_of(keywords, site, 4), python="python", replaces="owner")
        assert plan.profile.workers.mps and plan.profile.workers.workers_per_gpu == 4


@each(
    ("profile", "words"),
    [
        ({"gpus": 4, "workers": {"mps": True}}, "`workers_per_gpu` must be 2 or more"),
        ({"gpus": 4, "gpu_type": "a100_3g.20gb", "workers": {"mps": True}}, "one worker has its GPU, or its MIG slice, for itself"),
        ({"gpus": 4, "workers": {"mps": True, "gpus_per_worker": 2}}, "`workers_per_gpu` must be 2 or more"),
        ({"gpus": 4, "workers": {"workers_per_gpu": 4, "mps_thread_percentage": 30}}, "needs `mps: true`"),
        ({"gpus": 4, "workers": {**SHARED, "mps_thread_percentage": 101}}, "must be at most 100"),
        ({"gpus": 0, "workers": {**SHARED, "count": 2}}, "is for GPU workers"),
        ({"gpus": 4, "layout": "mpi", "run_on": "ranks", "run": ["a.py"], "workers": SHARED}, "run_on: head"),
    ],
)  # fmt: skip
def test_mps_without_several_workers_on_a_gpu_is_refused(
    home: Path, profile: dict[str, Any], words: str
) -> None:
    assert words in error_of(home, profile)


# -- in a job ----------------------------------------------------------------------------------------
@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / ARCHIVE).write_bytes(build())
    path = f"{FAKE}:{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(NVML), "FAKE_MPS_FOLDER": str(tmp_path)}
    return {**os.environ, **own}


def service(tmp_path: Path, environ: dict[str, str], *devices: str) -> MpsService:
    return MpsService(tmp_path / ARCHIVE, devices or ("0",), tmp_path / "log", environ)


def daemon(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("daemon-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_daemon_has_the_gpus_of_its_job_and_a_private_folder(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    found = service(tmp_path, environ, "2", "1")
    try:
        facts = daemon(tmp_path)
        assert [device[-1] for device in found.devices] == ["2", "1"]
        assert all(device.startswith("GPU-") for device in found.devices)
        assert facts["CUDA_VISIBLE_DEVICES"] == ",".join(found.devices)
        folder = Path(facts["CUDA_MPS_PIPE_DIRECTORY"])
        assert found.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder / "nvidia-cuda-mps-control.pid")) < 107
        assert not found.problem()
    finally:
        found.stop()
    assert not alive(facts["pid"]) and not alive(facts["server"]) and not folder.exists()


@pytest.mark.parametrize("stays", [False, True])
def test_the_daemon_and_its_server_end_with_a_supervisor_that_is_killed(
    tmp_path: Path, environ: dict[str, str], stays: bool
) -> None:
    """Also if it does not obey, and although its server has a session of its own."""
    code = """
import sys, time
from pathlib import Path
from gpujobs.injob.mps import MpsService
import os
MpsService(Path(sys.argv[1]) / "injob.pyz", ["0"], Path(sys.argv[1]) / "log", os.environ)
print("ready", flush=True)
time.sleep(600)
"""
    own = {**environ, "PYTHONPATH": f"{ROOT}:{NVML}", **({"FAKE_MPS_STAYS": "1"} if stays else {})}
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=own, stdout=subprocess.PIPE
    )
    assert supervisor.stdout and supervisor.stdout.readline() == b"ready\n"
    facts = daemon(tmp_path)
    assert alive(facts["pid"]) and alive(facts["server"])
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    until(lambda: not alive(facts["pid"]) and not alive(facts["server"]), 20)
    until(lambda: not Path(facts["CUDA_MPS_PIPE_DIRECTORY"]).exists(), 20)


def test_a_signal_to_all_processes_of_the_job_leaves_the_daemon_to_its_workers(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    found = service(tmp_path, environ)
    facts = daemon(tmp_path)
    try:
        os.killpg(os.getpgid(facts["pid"]), signal.SIGTERM)
        os.kill(facts["pid"], signal.SIGUSR1)
        assert mps._is_live(Path(facts["CUDA_MPS_PIPE_DIRECTORY"]) / "control")
        assert not found.problem()
    finally:
        found.stop()
    assert not alive(facts["pid"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"FAKE_MPS_FAILS": "Failed to start : operation not permitted"}, "exit code 1: Failed to start : operation not permitted"),
        ({"PATH": "/nowhere"}, "No such file or directory: 'nvidia-cuda-mps-control'"),
        ({"FAKE_NVML_MIG": "2"}, "set `gpus_per_job: 1`"),
    ],
)  # fmt: skip
def test_a_daemon_that_does_not_start_says_why(
    tmp_path: Path,
    short: Path,
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    words: str,
) -> None:
    roots = short / "roots"
    roots.mkdir()
    monkeypatch.setattr(mps, "_ROOTS", (str(roots),))
    with pytest.raises(MpsError) as error:
        service(tmp_path, {**environ, **changes}, "0", "1")
    assert words in str(error.value) and "cannot run nvidia-cuda-mps-control" in str(error.value)
    assert not list(roots.iterdir())


def test_a_daemon_that_dies_says_why(tmp_path: Path, environ: dict[str, str]) -> None:
    found = service(tmp_path, {**environ, "FAKE_MPS_DIES": "0.5"})
    until(lambda: found.problem(), 20)
    assert "exit code 3: it has written no reason" in found.problem()
    facts = daemon(tmp_path)
    until(lambda: not alive(facts["server"]), 20)
    found.stop()


def test_gpus_keep_their_indices_beneath_a_daemon_only_if_these_are_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert named_gpus(["0", "1"]) == ["0", "1"]
    with pytest.raises(LookupError, match="the UUIDs of GPUs 1,2 are not known"):
        named_gpus(["1", "2"])


def test_a_folder_that_cannot_be_made_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (str(tmp_path / "file"), str(tmp_path / ("x" * 100))):
        with pytest.raises(MpsError, match="MPS has no folder: "):
            private_folder([root])


# -- who else may have started it ----------------------------------------------------------------------
def listener(folder: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "control"))
    server.listen()
    return server


def test_a_live_daemon_of_the_job_is_used(short: Path) -> None:
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(short)}
    assert not is_provided(own)  # there is none
    with listener(short):
        assert is_provided(own)
        assert not is_provided({})  # the job does not name it
    assert not is_provided(own)  # a socket that nothing listens at
    (short / "control").unlink()
    os.mkfifo(short / "control")
    assert not is_provided(own)
    reader = os.open(short / "control", os.O_RDONLY | os.O_NONBLOCK)
    assert is_provided(own)
    os.close(reader)


def test_a_job_starts_no_daemon_beside_one_that_it_has(short: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    job = Workers(SuperviseOptions(folder=str(tmp_path), job=0, mps=True))
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(short), "PATH": "/nowhere"}
    with listener(short):
        assert job._start_mps(["1"], environ) == ["1"]  # as its daemon names it
    assert environ["CUDA_MPS_PIPE_DIRECTORY"] == str(short)
    (tmp_path / "logs").mkdir()
    with pytest.raises(JobExit) as ended:  # that daemon is gone, and there is no program
        job._start_mps(["0"], environ)
    assert ended.value.kind is EndKind.FAILED


def test_the_usual_folder_counts_if_the_batch_scheduler_has_set_a_share(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm does for `--gres=mps`."""
    monkeypatch.setattr(mps, "_USUAL_PIPES", str(short))
    with listener(short):
        assert is_provided({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"})


def test_a_daemon_of_another_user_is_not_used(short: Path) -> None:
    ids = ids_of("nobody")
    if ids is None:
        pytest.skip("only root can make a file of another user")
    with listener(short):
        os.chown(short / "control", *ids)
        assert not is_provided({"CUDA_MPS_PIPE_DIRECTORY": str(short)})
        (short / "control").rename(short / "theirs")
        (short / "control").symlink_to("theirs")
        assert not is_provided({"CUDA_MPS_PIPE_DIRECTORY": str(short)})


def test_a_daemon_in_a_folder_of_another_user_is_not_used(short: Path) -> None:
    """Who may lead it to another socket after this look."""
    ids = ids_of("nobody")
    if ids is None:
        pytest.skip("only root can make a folder of another user")
    theirs, link = short / "theirs", short / "link"
    theirs.mkdir()
    link.symlink_to("theirs")
    with listener(short), listener(theirs):
        assert is_provided({"CUDA_MPS_PIPE_DIRECTORY": str(link)})
        os.chown(link, *ids, follow_symlinks=False)
        assert not is_provided({"CUDA_MPS_PIPE_DIRECTORY": str(link)})
        os.chown(theirs, *ids)
        (theirs / "control").unlink()
        (theirs / "control").symlink_to(short / "control")
        assert not is_provided({"CUDA_MPS_PIPE_DIRECTORY": str(theirs)})


def test_workers_have_a_limit_of_threads_only_if_the_profile_has_it() -> None:
    given = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    assert shared({}, 0) == {"GPUJOBS_MPS": "1"}
    assert shared(given, 0)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert shared(given, 30)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
