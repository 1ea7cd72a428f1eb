"""The client of a batch scheduler, with small scripts as its commands."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpujobs.batch.client import SchedulerClient, with_canceller
from gpujobs.cli.main import main
from gpujobs.config.sitefiles import load_site
from gpujobs.doctor.checks import Check, CheckState
from gpujobs.doctor.host import check_host
from gpujobs.errors import RefusedError, UnavailableError
from gpujobs.schedulers import NOT_LISTED, JobId, JobState, JobStatus, get_scheduler

from ..support.cli import text_of
from ..support.transcripts import SQUEUE_HEADER

Make = Callable[..., SchedulerClient]


@pytest.fixture
def client(tmp_path: Path) -> Make:
    """Return a function that makes a client; its keywords are commands, as bash."""

    def make(name: str, **commands: str) -> SchedulerClient:
        for command, code in commands.items():
            path = tmp_path / command
            path.write_text(f"#!/bin/bash\n{code}\n")
            path.chmod(0o755)
        paths = {command: str(tmp_path / command) for command in commands}
        return SchedulerClient(get_scheduler(name)(), paths, timeout=1.0)

    return make


def doctor(folder: Path, client: SchedulerClient) -> Check:
    """Return what `gpujobs doctor` reports on the batch scheduler of ``client``."""
    names = (
        "sbatch",
        "squeue",
        "scancel",
        "qsub",
        "qstat",
        "qselect",
        "qdel",
        "bsub",
        "bjobs",
        "bkill",
    )
    site = {
        "description": "x",
        "scheduler": client.scheduler.name,
        "queues": {"main": {}},
        "directory": str(folder),
        "commands": {**dict.fromkeys(names, "/bin/true"), **client.commands},
    }
    (folder / "here.yaml").write_text(text_of(site))
    checks = check_host(load_site(str(folder / "here.yaml")))
    return next(check for check in checks if check.name == "batch scheduler")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("slurm", "squeue"),
        ("pbs", "qselect"),
        ("torque", "qstat"),
        ("sge", "qstat"),
        ("lsf", "bjobs"),
    ],
)
def test_failure_of_an_unknown_kind_is_no_answer(
    client: Make, tmp_path: Path, name: str, command: str
) -> None:
    broken = client(name, **{command: "echo 'libxyz.so: cannot open shared object' >&2; exit 1"})
    with pytest.raises(UnavailableError, match=rf"{command} failed with exit code 1: libxyz\.so"):
        broken.find("svd-0001")
    check = doctor(tmp_path, broken)
    assert check.state is CheckState.FAILED and "libxyz.so" in check.result
    assert check.result.startswith(f"{name} does not answer on this host: ")
    remedy = f"is this a login node of here? If it is, run {command} on this host to see why"
    assert check.remedy == remedy


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("slurm", "sbatch, scancel, squeue"),
        ("pbs", "qdel, qselect, qstat, qsub"),
        ("torque", "qdel, qstat, qsub"),
        ("sge", "qdel, qstat, qsub"),
        ("lsf", "bjobs, bkill, bsub"),
    ],
)
def test_doctor_looks_for_every_command_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, missing: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    site = {"description": "x", "scheduler": name, "queues": {"main": {}}}
    (tmp_path / "here.yaml").write_text(text_of(site))
    checks = check_host(load_site(str(tmp_path / "here.yaml")))
    assert next(check.result for check in checks if check.name == "commands") == (
        f"not found: {missing}"
    )


def test_another_user_who_cancelled_a_job_is_named() -> None:
    status = JobStatus(JobState.CANCELLED)
    assert with_canceller(status) == status
    assert with_canceller(replace(status, cancelled_by=os.getuid())).reason == ""
    # The name of the user differs if root runs the tests.
    name = pwd.getpwuid(1 - bool(os.getuid())).pw_name
    other = replace(status, cancelled_by=1 - bool(os.getuid()))
    assert with_canceller(other).reason == f"cancelled by {name}"


def test_no_jobs_are_an_answer(client: Make, tmp_path: Path) -> None:
    lsf = client("lsf", bjobs="echo 'No job found' >&2; exit 255")
    assert lsf.find("svd-0001") == set()
    assert doctor(tmp_path, lsf).state is CheckState.OK


PENDING = f"echo '{SQUEUE_HEADER}5|0-1|PENDING||N/A|Priority|svd-0001'; echo '6|N/A|RUNNING|n1|N/A|None|svd-0001'"


def test_cancel_without_effect_is_reported(client: Make) -> None:
    """The command succeeds; jobs that keep waiting are named, a running one may take its time."""
    slurm = client("slurm", scancel="exit 0", squeue=PENDING)
    jobs = [JobId("5", 0), JobId("5", 1), JobId("6"), JobId("7")]
    with pytest.raises(RefusedError, match=r"slurm did not cancel 5_0, 5_1:\n.*still in the queue"):
        slurm.cancel(jobs, ["svd-0001"])
    slurm.cancel(jobs[2:], ["svd-0001"])


def test_a_cancel_that_takes_a_moment_is_waited_for(client: Make, tmp_path: Path) -> None:
    later = f"[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; {PENDING}; }}"
    client("slurm", scancel="exit 0", squeue=later).cancel([JobId("5", 0)], ["svd-0001"])
    assert (tmp_path / "asked").exists()


def test_cancel_that_cannot_be_checked_is_no_error(
    client: Make, caplog: pytest.LogCaptureFixture
) -> None:
    squeue = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    client("slurm", scancel="exit 0", squeue=squeue).cancel([JobId("5", 0)], ["svd-0001"])
    assert "could not check that the jobs are cancelled" in caplog.text


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        (
            "echo 'sbatch: error: Unable to contact slurm controller' >&2; exit 1",
            3,
            "contact slurm",
        ),
        ("echo 'allocation failure: Invalid account' >&2; exit 1", 1, "Invalid account"),
        ("echo 'nothing that we know'", 1, "nothing that we know"),
    ],
)
def test_no_estimate_is_an_error(
    home: Path, monkeypatch: pytest.MonkeyPatch, script: str, code: int, message: str
) -> None:
    (home / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
    (home / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    (home / "p.yaml").write_text(
        "site: ./s.yaml\ngpus: 1\nenvironment: {python: /usr/bin/python3}\n"
    )
    done = CliRunner().invoke(main, ["plan", "p.yaml", "--estimate", "--json"])
    assert done.exit_code == code and message in done.stderr
    assert json.loads(done.stdout)["estimated_start"] is None


SUBMITTED = (
    "echo Submitted by the wrapper; echo 4711; echo 'Remaining balance of the account:'; echo 117"
)


def test_the_id_among_several_numbers_is_that_of_the_job_with_our_name(
    client: Make, tmp_path: Path
) -> None:
    listed = "printf 'ARRAY_JOB_ID|NAME\\n4711|svd-7f3a\\n117|other\\n'"
    found = client("slurm", sbatch=SUBMITTED, squeue=listed)
    assert found.submit("#!/bin/bash\n", "svd-7f3a", set(), tmp_path) == "4711"
    found = client("pbs", qsub=SUBMITTED, qselect="echo 4711")
    assert found.submit("#!/bin/bash\n", "svd-7f3a", set(), tmp_path) == "4711"


def test_no_number_is_taken_for_the_id_if_none_is_certain(client: Make, tmp_path: Path) -> None:
    sbatch = f"echo run >> {tmp_path}/runs; {SUBMITTED}"
    unsure = client("slurm", sbatch=sbatch, squeue="echo 'ARRAY_JOB_ID|NAME'")
    with pytest.raises(UnavailableError, match=r"several numbers.*: 4711, 117"):
        unsure.submit("#!/bin/bash\n", "svd-7f3a", set(), tmp_path)
    assert (tmp_path / "runs").read_text() == "run\n"  # once


ACCOUNTED = JobId("100")


@pytest.mark.parametrize(
    ("sacct", "reason"),
    [
        ("printf '100|COMP'", "accounting did not answer: the answer of sacct is incomplete"),
        ("echo 'sacct: error: Connection refused' >&2; exit 1", "accounting did not answer"),
        ("true", "the batch scheduler does not list it"),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", "does not list it"),
    ],
)
def test_a_job_that_accounting_was_not_asked_for_is_unknown(
    client: Make, sacct: str, reason: str
) -> None:
    asked = client("slurm", squeue=f"echo '{SQUEUE_HEADER.strip()}'", sacct=sacct)
    status = asked.status([ACCOUNTED], ["svd-7f3a"])[ACCOUNTED]
    assert status.state is JobState.UNKNOWN
    assert reason in status.reason


def test_a_torn_row_is_no_answer(client: Make) -> None:
    asked = client("slurm", squeue=f"echo '{SQUEUE_HEADER.strip()}'; echo '100|N/A|PEND'")
    with pytest.raises(UnavailableError, match="the answer of squeue is incomplete"):
        asked.status([ACCOUNTED], ["svd-7f3a"])


def test_not_found_counts_only_for_the_job_that_is_named(client: Make) -> None:
    two = [JobId("100.s"), JobId("200.s")]
    torque = client("torque", qstat="echo 'qstat: Unknown Job Id Error 100.s' >&2; exit 153")
    assert {status.reason for status in torque.status(two, ["x"]).values()} == {
        "qstat: Unknown Job Id Error 100.s"
    }
    two = [JobId("100"), JobId("200")]
    lsf = client("lsf", bjobs="echo 'Job <100> is not found' >&2; exit 255", bhist="true")
    assert {status.reason for status in lsf.status(two, ["x"]).values()} == {
        "Job <100> is not found"
    }
    both = "echo 'Job <100> is not found' >&2; echo 'Job <200> is not found' >&2; exit 255"
    lsf = client("lsf", bjobs=both, bhist="true")
    assert set(lsf.status(two, ["x"]).values()) == {NOT_LISTED}


def test_an_array_whose_indexes_cannot_be_read_is_unknown(client: Make) -> None:
    row = "100|0-9999999999|PENDING||N/A|Priority|svd-7f3a"
    asked = client("slurm", squeue=f"echo '{SQUEUE_HEADER.strip()}'; echo '{row}'", sacct="true")
    status = asked.status([JobId("100", 1)], ["svd-7f3a"])[JobId("100", 1)]
    assert status == JobStatus(JobState.UNKNOWN, reason="its index cannot be read")
