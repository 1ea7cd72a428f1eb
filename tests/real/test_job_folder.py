"""Job folders: `gpujobs render -o`, and a submission by the commands of the batch scheduler alone."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpujobs.schedulers import get_scheduler

from ..conftest import make_cli, nothing_left
from ..support.backend import Backend, SlurmBackend
from ..support.cli import Cli
from ..support.processes import as_user, patience, until

HERE = ["python", "-c", "print('it is here')"]


def render(cli: Cli, profile: dict[str, object], name: str = "folder") -> Path:
    done = cli("render", str(cli.write("p.yaml", profile)), "-o", name)
    assert done.returncode == 0, done.stderr
    return cli.work / name


def bare(cli: Cli, command: str, cwd: Path) -> str:
    """Run a command without gpujobs on the PATH; return its output."""
    folder = str(Path(cli.command).parent)
    path = ":".join(part for part in cli.env["PATH"].split(":") if part != folder)
    env = {name: value for name, value in cli.env.items() if not name.startswith("GPUJOBS")}
    done = subprocess.run(
        ["bash", "-c", command], env={**env, "PATH": path}, cwd=cwd, text=True, check=False,
        capture_output=True, timeout=patience(60), **as_user(cli.user),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(folder: Path) -> str:
    """Return the lines of the README that submit the jobs."""
    lines = (folder / "README.md").read_text().splitlines()
    assert len(lines) <= 12
    return "\n".join(line.strip() for line in lines if line.startswith("    "))


def cluster_folder(folder: Path) -> Path:
    return next(folder.glob("*/record.json")).parent


def wait_for_end(folder: Path) -> None:
    ended = cluster_folder(folder) / "ended"
    logs = cluster_folder(folder) / "logs"
    until(ended.exists, 120, lambda: "\n".join(path.read_text() for path in logs.glob("*.log")))


@pytest.mark.conformance(slow=("pbs", "lsf"))
@pytest.mark.stub
def test_a_copy_submitted_by_hand_has_the_same_result(cli: Cli, backend: Backend) -> None:
    """The same profile, submitted by gpujobs, has the same result."""
    if not get_scheduler(backend.name).submit_folder:
        pytest.skip(f"{backend.name} has no job folders")
    profile = {"gpus": 2, "gpus_per_job": 1, "start_workers": 2, "run": HERE}
    rendered = render(cli, profile)
    copy = cli.work / "it's another place" / "copy"
    there = shlex.quote(str(copy))
    bare(
        cli,
        f"mkdir -m 700 {shlex.quote(str(copy.parent))}; cp -r folder {there}; rm -r folder",
        cli.work,
    )
    assert not rendered.exists()
    private = cluster_folder(copy)
    assert not any("PRIVATE KEY" in path.read_text(errors="replace") for path in files(copy))
    assert "no job has started" in cli("status", str(copy)).stdout

    bare(cli, commands(copy), copy)
    wait_for_end(copy)
    backend.wait_empty(30, private.name)
    for name in ("tls-key.pem", "tls-cert.pem"):
        assert (private / name).stat().st_mode & 0o777 == 0o600
    assert private.stat().st_mode & 0o777 == 0o700
    assert cli("logs", str(copy)).stdout == "it is here\n"

    def found(cluster: str) -> dict[str, object]:
        status = cli.status(cluster)
        jobs = [(job["number"], job["state"], job["exit_code"]) for job in status["jobs"]]
        return {"jobs": jobs} | {key: status[key] for key in ("state", "exit_code", "run")}

    cluster = cli.submit(profile, "--wait")
    assert found(str(copy)) == found(cluster)
    assert private.name in cli("report", str(copy)).stdout
    assert cli("status", copy.name).returncode != 0  # not below the working directory

    before = (private / "ended").read_text()
    bare(cli, commands(copy), copy)
    backend.wait_empty(60, private.name)

    def logs() -> str:
        found = (path for path in copy.iterdir() if path.is_file())
        return "".join(path.read_text(errors="replace") for path in found)

    until(lambda: re.search(r"was submitted already, as job \S", logs()), 30, logs)
    assert (private / "ended").read_text() == before
    assert cli("submit", str(copy)).returncode == 2


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def slurm_cli(slurm_backend: SlurmBackend, home: Path) -> Iterator[Cli]:
    yield make_cli(slurm_backend, home, "ordinary", stub=True)
    nothing_left(slurm_backend)


def sbatch(cli: Cli, *arguments: str) -> str:
    """Submit as in a shell, in the working folder; return the job's id."""
    return bare(cli, shlex.join(["sbatch", "--parsable", *arguments]), cli.work).strip()


@pytest.mark.slurm
def test_a_job_that_cannot_use_its_folder_ends_with_the_reason(
    slurm_cli: Cli, slurm_backend: SlurmBackend
) -> None:
    """It was moved after the submission, or is read-only; then a submission from elsewhere by its path."""
    cli = slurm_cli
    folder = render(cli, {"gpus": 1, "run": HERE})
    job = sbatch(cli, "--hold", str(folder / "p.sh"))
    moved = folder.rename(cli.work / "moved to")
    bare(cli, f"scontrol release {job}", cli.work)
    log = cli.work / f"slurm-{job}.log"
    until(lambda: log.exists() and "submit in the job folder" in log.read_text(), 60)
    private = cluster_folder(moved)
    private.chmod(0o500)
    job = sbatch(cli, str(moved / "p.sh"))
    log = cli.work / f"slurm-{job}.log"
    until(lambda: log.exists() and "cannot be written on node" in log.read_text(), 60)
    slurm_backend.wait_empty(30)
    private.chmod(0o700)
    job = sbatch(cli, str(moved / "p.sh"))
    wait_for_end(moved)
    found = cli.status(str(moved))
    assert (found["state"], [one["id"] for one in found["jobs"]]) == ("DONE", [job])


@pytest.mark.slurm
def test_jobs_of_groups_join_one_cluster_by_hand_and_by_submit(
    slurm_cli: Cli, slurm_backend: SlurmBackend
) -> None:
    """One script by hand, then both by `gpujobs submit` of a copy, of which the user has changed one."""
    cli = slurm_cli
    gpu = {"gpus": 1, "gpus_per_job": 1}
    folder = render(cli, {"groups": {"a": gpu, "b": gpu}, "run": HERE, "start_workers": 2})
    bare(cli, "cp -r folder copy", cli.work)
    first, second = sorted(folder.glob("p-*.sh"))
    sbatch(cli, str(second))
    until(lambda: cli.status(str(folder))["state"] == "RUNNING", 60)
    assert cli("logs", str(folder)).stdout == ""  # `run` starts with the workers of both
    sbatch(cli, str(first))
    wait_for_end(folder)
    assert len(cli.status(str(folder))["jobs"]) == 2
    slurm_backend.wait_empty(30)

    script, text = cli.work / "copy" / first.name, first.read_text()
    script.write_text(text.replace("\n\n", "\n#SBATCH --partition=nosuch\n\n", 1))
    done = cli("submit", "copy")
    assert done.returncode == 1 and "invalid partition specified: nosuch" in done.stderr
    private = cluster_folder(cli.work / "copy")
    assert not {path.name for path in private.iterdir()} & {"ended", "tls-key.pem"}
    script.write_text(text.replace("\n\n", "\n#SBATCH --comment=mine\n\n", 1))
    done = cli("submit", "copy", "--wait", "--json")
    assert done.returncode == 0, done.stderr
    submitted = json.loads(done.stdout)
    assert submitted["folder"] == str(cluster_folder(cli.work / "copy"))
    assert [one["count"] for one in submitted["submissions"]] == [1, 1]
    assert cli("logs", "copy").stdout == "it is here\n"
    comment = bare(cli, f"scontrol show job {submitted['submissions'][0]['id']}", cli.work)
    assert "Comment=mine" in comment
    assert cli("status", "--all").stdout == ""


@pytest.mark.slurm
def test_cancel_ends_jobs_of_a_folder_that_run_or_wait(
    slurm_cli: Cli, slurm_backend: SlurmBackend
) -> None:
    """Jobs that wait are cancelled, too, if one of their array has started."""
    cli = slurm_cli
    folder = render(cli, {"gpus": 8, "gpus_per_job": 4, "directives": ["--nodelist=node1"]})
    job = sbatch(cli, str(folder / "p.sh"))
    until(lambda: cli.status(str(folder))["jobs"], 60)
    until(lambda: cli("connect", "folder").returncode == 0, 60)
    assert f'gpujobs.connect("{folder}")' in cli("connect", "folder").stdout
    assert f"{folder}/" in cli("connect", "folder", "--env").stdout
    done = cli("cancel", "folder")
    assert done.returncode == 0, done.stderr
    slurm_backend.wait_empty(30)
    found = cli.status("folder")
    assert (found["state"], found["reason"]) == ("CANCELLED", "cancelled by gpujobs")
    assert {one["id"] for one in found["jobs"]} == {f"{job}_0", f"{job}_1"}
