"""What the guides tell users to run: the first job, and the line of dask-mpi that does not work."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client

from ..conftest import make_cli, nothing_left, unavailable
from ..real.test_clusters import connected
from ..support import mpi
from ..support.backend import SlurmBackend
from ..support.cli import NVML, ROOT, Cli, text_of
from ..support.processes import patience, run, until

pytestmark = pytest.mark.slow

FIRST_JOB = ROOT / "docs" / "first-job.md"
ID = r"[a-z]+-7f3a"
"""The id of a cluster in the documentation."""
WAITING = """
import pathlib, time

print("here", flush=True)
while not pathlib.Path("stop").exists():
    time.sleep(0.5)
"""
"""A program that ends when `stop_later` writes a file."""
RUN = {"run": ["python", "svd.py"]}
GROUPS = {"gpu": {"gpus": 4}, "prep": {"gpus": 0, "workers": {"count": 1, "memory": "1GiB"}}}
PROFILES: dict[str, dict[str, object]] = {
    "svd": {"gpus": 4, **RUN},
    "pipe": {"groups": GROUPS, **RUN},
    "prepare": {"gpus": 1, "run": ["true"]},
    "train": {"gpus": 1, "run": ["true"]},
}
"""What the pages submit."""
_JOB = re.compile(r"(?<=job array )\d+")
"""The batch scheduler's id of a job, which is 4711 in the documentation."""
FOLLOWS = re.compile(r"--watch|--wait|logs -f")
"""Commands that end when the cluster does."""


def block(page: str, start: str) -> str:
    """Return the content of the first code block of a page whose line above is ``start``."""
    text = (ROOT / "docs" / page).read_text()
    found = re.search(rf"^{re.escape(start)}\n(.*?)^```$", text, re.M | re.S)
    assert found
    return found[1]


def write_files(cli: Cli, page: Path) -> None:
    """Write the files that the page names, each at the end of a clause before its block."""
    files = r"`(\w+\.(?:py|yaml))`[.:](?:(?!\n```).)*\n```\w+\n(.*?)^```$"
    for name, text in re.findall(files, page.read_text(), re.M | re.S):
        (cli.work / name).write_text(text)


def session_of(page: Path, mark: str) -> str:
    """Return the console blocks of a page that are marked ``executed MARK``, one after the other."""
    blocks = rf"^<!-- executed {mark} -->\n```console\n(.*?)^```$"
    return "".join(re.findall(blocks, page.read_text(), re.M | re.S))


def execute(cli: Cli, session: str, ids: dict[str, str]) -> dict[str, str]:
    """Execute the commands of a session in a shell, in order; return the output of each.

    Each succeeds and prints the lines that follow it. ``ids``: the clusters that stand for an id of
    the documentation; those that are submitted are added.
    """
    printed = {}
    env = {**cli.env, "PATH": f"{Path(cli.command).parent}:{cli.env['PATH']}"}
    for command, expected in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", session, re.M):
        own = re.sub(ID, lambda found: ids.get(found[0], found[0]), command)
        if variable := re.match(r"(\w+)=\$\(", own):  # it is used in the next command
            own += f" && printf %s ${variable[1]}"
        with stop_later(cli, own):
            done = run(["bash", "-c", own], env=env, user=cli.user, cwd=cli.work, timeout=180)
        assert done.returncode == 0, (own, done.stdout, done.stderr)
        lines = (done.stdout + done.stderr).splitlines()
        for line in expected.splitlines():
            if re.fullmatch(ID, line):
                name = line.rpartition("-")[0]
                (ids[line],) = (one for one in lines if re.fullmatch(rf"{name}-[0-9a-f]{{4}}", one))
            else:
                line = re.sub(ID, lambda found: ids.get(found[0], found[0]), line)
                assert _JOB.sub("4711", line) in [_JOB.sub("4711", one) for one in lines], (
                    own,
                    done.stdout,
                    done.stderr,
                )
        if variable:
            env[variable[1]] = done.stdout
        printed[command] = done.stdout
    return printed


@contextlib.contextmanager
def stop_later(cli: Cli, command: str) -> Iterator[None]:
    """Let the program of the cluster end while a command runs that waits for it (see `WAITING`)."""
    timer = threading.Timer(patience(5), (cli.work / "stop").touch)
    if FOLLOWS.search(command):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def test_the_first_job_runs_as_written_on_this_machine(home: Path) -> None:
    cli = Cli(home, {}, None)
    write_files(cli, FIRST_JOB)
    assert len(execute(cli, session_of(FIRST_JOB, "local"), {})) == 6


@pytest.fixture
def delta(slurm_backend: SlurmBackend, home: Path, request: pytest.FixtureRequest) -> Iterator[Cli]:
    """A login node of the private Slurm, with the name of a site of the documentation."""
    stub = request.node.get_closest_marker("stub") is not None
    cli = make_cli(slurm_backend, home, "ordinary", stub=stub)
    path = home / "sites" / "here.yaml"
    site = json.loads(path.read_text()) | {"hostnames": [re.escape(socket.gethostname())]}
    site["defaults"] = slurm_backend.site()["defaults"]  # with the dashboard
    path.rename(home / "sites" / "mahti.yaml")
    (home / "sites" / "delta.yaml").write_text(text_of(site))
    del cli.env["GPUJOBS_SITE"]
    yield cli
    nothing_left(slurm_backend)


@pytest.mark.slurm
@pytest.mark.timeout(600)  # what the guide promises
def test_the_first_job_runs_as_written_on_a_batch_cluster(delta: Cli) -> None:
    write_files(delta, FIRST_JOB)
    printed = execute(delta, session_of(FIRST_JOB, "delta"), {})
    assert len(printed) == 9
    report, _ = (text for words, text in printed.items() if " report " in words)
    assert "DONE" in report and (delta.work / "report.html").is_file()


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_the_first_minute_of_the_readme_runs_as_written(delta: Cli) -> None:
    write_files(delta, ROOT / "README.md")
    path = delta.home / "sites" / "delta.yaml"
    site = json.loads(path.read_text())
    network = {**site.get("network", {}), "protocols": ["ucxx", "tcp"]}
    path.write_text(text_of(site | {"network": network}))
    (delta.work / "svd.py").write_text("from distributed import Client\nprint(Client().status)\n")
    ids: dict[str, str] = {}
    assert len(execute(delta, session_of(ROOT / "README.md", "delta"), ids)) == 1
    assert "running" in delta("logs", "-f", *ids.values()).stdout


SESSIONS = [
    pytest.param(
        found,
        id=f"{page.stem}-{found.split()[2]}",
        marks=[] if "--run" in found else pytest.mark.stub,  # jobs with --run look at dask itself
    )
    for page in sorted((ROOT / "docs").glob("*.md"))
    for found in re.findall(
        r"^<!-- executed svd -->\n```console\n(.*?)^```$", page.read_text(), re.M | re.S
    )
]


@pytest.mark.slurm
@pytest.mark.parametrize("session", SESSIONS)
def test_commands_beside_a_running_cluster_print_what_their_page_says(
    session: str, delta: Cli
) -> None:
    """The clusters `svd-7f3a`, of one job with four workers, and `pipe-7f3a`, with groups."""
    (delta.work / "svd.py").write_text(WAITING)
    (delta.work / "delta.yaml").write_text((delta.home / "sites" / "delta.yaml").read_text())
    ids = {}
    for name, own in PROFILES.items():
        path = delta.write(f"{name}.yaml", {"walltime": "10m", "account": "p1", **own})
        if f"{name}-7f3a" in session:
            submitted = delta.submit(path.read_text(), "--site", "delta", name=path.name)
            until(lambda one=submitted: delta("logs", one).stdout == "here\n", 60, "output")
            connected(delta, submitted, 4)
            ids[f"{name}-7f3a"] = submitted
    assert execute(delta, session, ids)
    assert delta("cancel", "--all").returncode == 0


@contextlib.contextmanager
def dask_mpi(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The line of the guides in docs/migrating.md, with further options, on four fake GPUs."""
    if why := mpi.missing():
        unavailable("mpi", why)
    line = re.search(r"`(mpirun [^`]*CUDAWorker)`", (ROOT / "docs" / "migrating.md").read_text())
    assert line
    path = Path(sys.executable).parent
    env = {**os.environ, **mpi.AS_ROOT, "PATH": f"{path}:{os.environ['PATH']}"}
    env |= {"PYTHONPATH": str(NVML), "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    env |= {"DASK_CUDA_TEST_SINGLE_GPU": "1"}
    process = subprocess.Popen(
        [*shlex.split(line[1]), *options], cwd=folder, env=env, text=True, stderr=subprocess.PIPE
    )
    stop = threading.Timer(patience(120), process.terminate)
    stop.start()
    try:  # the launcher may wait for a rank
        yield process
    finally:
        stop.cancel()
        process.terminate()
        process.communicate(timeout=patience(30))


def test_the_bare_line_of_dask_mpi_gets_no_workers(tmp_path: Path) -> None:
    with dask_mpi(tmp_path) as process:
        assert process.stderr
        expected = block("migrating.md", "```text")
        assert expected in iter(process.stderr.readline, "")


def test_with_nthreads_each_rank_but_the_first_has_a_worker_for_every_gpu(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "migrating.md").read_text()
    options = re.search(r"With `(--nthreads 1)`\s+it\s+starts", text)
    assert options
    found = tmp_path / "s.json"
    with dask_mpi(tmp_path, *options[1].split()):
        until(lambda: found.exists() and found.read_text(), 60, "the dask scheduler")
        with Client(scheduler_file=str(found), timeout=patience(30)) as client:
            assert client.scheduler.address.startswith("tcp://")  # without encryption
            client.wait_for_workers(4, timeout=patience(60))
            names = sorted(client.run(lambda dask_worker: str(dask_worker.name)).values())
            assert names == [f"dask_mpi-1-{gpu}" for gpu in range(4)]
            client.shutdown()
