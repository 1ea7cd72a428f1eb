"""The fakes of OpenPBS and Torque print, refuse and set the same as the recorded real ones."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpujobs.batch.client import SchedulerClient
from gpujobs.schedulers import CommandResult, JobId, JobState
from gpujobs.schedulers.pbs import PBS

from ..conftest import make_cli
from ..real.programs import WHO
from ..support.backend import FAKE_GPUS
from ..support.cli import Cli
from ..support.fakes import FakeBackend, PbsBackend, TorqueBackend
from ..support.processes import patience, until
from ..support.transcripts import recorded

SLEEP = "#!/bin/bash\n#PBS -j oe\nsleep 600\n"
SCRIPTS = {
    "ok": "#!/bin/bash\n#PBS -N hello\n#PBS -l walltime=00:10:00\ntrue\n",
    "sleep": SLEEP,
    "fail": "#!/bin/bash\n#PBS -j oe\nexit 3\n",
    "arr": "#!/bin/bash\n#PBS -N arr\n#PBS -J 0-7\n#PBS -j oe\nsleep 600\n",
    "mixed": "#!/bin/bash\n#PBS -l select=1:ncpus=1\n#PBS -l nodes=1\ntrue\n",
    "crlf": "#!/bin/bash\r\n#PBS -N x\r\ntrue\r\n",
    "bad": "#!/bin/bash\n#PBS --foo bar\ntrue\n",
    "badopt": "#!/bin/bash\n#PBS -z -Y\ntrue\n",
    "late": "#!/bin/bash\ntrue\n#PBS -N toolate\n",
    "blank": "\n\n#!/bin/bash\n#PBS -N afterblank\ntrue\n",
}


class RecordedPbs(PbsBackend):
    """As the recorded one was set up: the release 23.06.06, which has no quirks."""

    nodes, slots = 2, 8
    settings: ClassVar[dict[str, Any]] = {**PbsBackend.settings, "quirks": {}}


QUEUES = {"workq": {}, "gpuq": {"max_walltime": 86400}, "shortq": {"max_walltime": 1800}}


@pytest.fixture(scope="session")
def pbs(shared_folder: Path) -> Iterator[FakeBackend]:
    with RecordedPbs(
        shared_folder / "recorded-pbs", queues=QUEUES, hook=False
    ).running() as running:
        _write(running.folder, "pbs")
        yield running


class RecordedTorque(TorqueBackend):
    """As the recorded one was set up."""

    nodes, slots = 2, 8


@pytest.fixture(scope="session")
def torque(shared_folder: Path) -> Iterator[FakeBackend]:
    queues = {"batch": {}, "short": {"max_walltime": 1800}}
    with RecordedTorque(shared_folder / "recorded-torque", queues=queues).running() as running:
        _write(running.folder, "tq")
        yield running


def _write(folder: Path, suffix: str) -> None:
    for name, text in SCRIPTS.items():
        (folder / f"{name}.{suffix}").write_bytes(text.encode())


def same_words(backend: FakeBackend, was: CommandResult) -> None:
    """Run a recorded command; its exit code and words (of a usage, the first line) are the recorded ones."""
    words = [word for word in shlex.split(" ".join(was.argv)) if word not in ("timeout", "90")]
    done = backend.command(*words)
    assert done.returncode == was.exit_code
    assert _words(done.stderr) == _words(was.stderr)
    assert not was.stdout or _words(done.stdout) == _words(was.stdout)


def _words(text: str) -> list[str]:
    """Return lines without numbers and dates; nothing of a usage, and of a message said three times one."""
    text = re.sub(r"\n*usage: [\s\S]*", "", text)
    lines = [re.sub(r"\d+", "0", line).strip() for line in text.splitlines()]
    return [line for n, line in enumerate(lines) if line and line not in lines[:n]]


# -- qsub ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "title",
    [
        "unknown queue", "unknown resource", "unknown resource in select", "walltime over the queue's limit", "missing script",
        "bad option value in the script", "bad option", "bad walltime", "bad memory", "memory in GiB spelling", "select and nodes together",
        "select and ngpus together", "name with a space", "name with a slash", "array of one", "array notation of Torque", "array too large",
        "fractional gpus", "place with a bad word",
    ],
)  # fmt: skip
def test_the_fake_of_pbs_refuses_with_the_recorded_words(pbs: FakeBackend, title: str) -> None:
    same_words(pbs, recorded("pbs", "02-submit-rejected.txt", title))


def test_the_fake_of_pbs_refuses_root_unless_it_was_told_not_to(shared_folder: Path) -> None:
    was = recorded("pbs", "02-submit-rejected.txt", "root is refused or not")
    with RecordedPbs(
        shared_folder / "rootless-pbs", queues=QUEUES, acl_roots=False
    ).running() as running:
        if os.geteuid() != 0:
            pytest.skip("not root")
        _write(running.folder, "pbs")
        same_words(running, was)


def test_pbs_refuses_crlf_and_arrays_that_may_not_be_started_again(pbs: FakeBackend) -> None:
    same_words(pbs, recorded("pbs", "01-submit-ok.txt", "CRLF line ends"))
    done = pbs.command("qsub", stdin="#!/bin/bash\n#PBS -r n\n#PBS -J 0-1\ntrue\n")
    assert done.returncode != 0 and "cannot submit non-rerunable Array Job" in done.stderr


@pytest.mark.parametrize(
    "title",
    [
        "script with directives",
        "array: the id has brackets",
        "command line over directive",
        "two whole nodes",
        "gpu type",
    ],
)
def test_the_fake_of_pbs_accepts_with_the_recorded_words(pbs: FakeBackend, title: str) -> None:
    was = recorded("pbs", "01-submit-ok.txt", title)
    done = pbs.command(*was.argv)
    assert (done.returncode, re.sub(r"\d+", "0", done.stdout, count=1)) == (
        0,
        re.sub(r"\d+", "0", was.stdout, count=1),
    )
    pbs.clean()


def test_directives_stop_at_the_first_command(pbs: FakeBackend) -> None:
    for script, name in (("late.pbs", "late.pbs"), ("blank.pbs", "afterblank")):
        number = pbs.command("qsub", script).stdout.strip()
        assert listed(pbs, number)["Job_Name"] == name
    pbs.clean()


@pytest.mark.parametrize(
    "title",
    ["array notation of PBS Pro", "unknown queue", "unknown resource", "more gpus than there are", "more nodes than there are",
     "walltime over the queue's limit", "missing script", "bad directive", "bad walltime", "name with a space"],
)  # fmt: skip
def test_the_fake_of_torque_refuses_with_the_recorded_words(
    torque: FakeBackend, title: str
) -> None:
    file = "01-submit-ok.txt" if title == "array notation of PBS Pro" else "02-submit-rejected.txt"
    same_words(torque, recorded("torque", file, title))


def test_torque_takes_a_select_and_ignores_it(torque: FakeBackend) -> None:
    was = recorded("torque", "01-submit-ok.txt", "select of PBS Pro: not refused, ignored or not")
    assert torque.command(*was.argv).returncode == was.exit_code == 0
    job = torque.jobs()[-1]
    assert (job["needs"]["slots"], job["needs"]["gpus"]) == (1, 0)
    torque.clean()


# -- qstat ---------------------------------------------------------------------------------------------------------
def listed(backend: FakeBackend, number: str) -> dict[str, Any]:
    jobs: dict[str, dict[str, Any]] = json.loads(
        backend.command("qstat", "-x", "-f", "-F", "json", number).stdout
    )["Jobs"]
    return jobs[number]


def shape(job: dict[str, Any]) -> dict[str, str]:
    """Return names and types of a job's attributes, without those that depend on its options."""
    own = {"depend", "session_id", "comment", "Resource_List", "Variable_List", "Execution_Time"}
    return {key: type(value).__name__ for key, value in job.items() if key not in own}


def was_listed(file: str, title: str, number: str) -> dict[str, Any]:
    jobs: dict[str, dict[str, Any]] = json.loads(recorded("pbs", file, title).stdout)["Jobs"]
    return jobs[number]


def test_a_running_job_is_listed_as_recorded(pbs: FakeBackend) -> None:
    number = pbs.command(
        "qsub", "-N", "running", "-l", "select=1:ncpus=1:ngpus=1", "sleep.pbs"
    ).stdout.strip()
    until(lambda: listed(pbs, number)["job_state"] == "R", 10)
    now, was = listed(pbs, number), was_listed("03-status.txt", "running, json", "95.node1")
    assert shape(now) == shape(was)
    assert (now["substate"], now["exec_vnode"]) == (was["substate"], was["exec_vnode"])
    assert set(now["Resource_List"]) == set(was["Resource_List"])
    assert pbs.command("qdel", number).returncode == 0
    assert (
        "terminated by" in listed(pbs, number)["comment"] or listed(pbs, number)["job_state"] == "F"
    )
    until(lambda: listed(pbs, number)["job_state"] == "F", 10)
    assert (listed(pbs, number)["substate"], listed(pbs, number)["Exit_status"]) == (91, 271)


def test_a_waiting_job_is_listed_as_recorded(pbs: FakeBackend) -> None:
    number = pbs.command(
        "qsub", "-N", "pending", "-l", "select=1:ncpus=1:ngpus=100", "sleep.pbs"
    ).stdout.strip()
    until(lambda: "comment" in listed(pbs, number), 10)
    now, was = listed(pbs, number), was_listed("03-status.txt", "pending, json", "96.node1")
    assert shape(now) == shape(was)
    assert now["comment"].startswith("Can Never Run") and was["comment"].startswith("Can Never Run")
    pbs.command("qdel", number)
    assert (listed(pbs, number)["substate"], "Exit_status" in listed(pbs, number)) == (91, False)


def test_an_array_is_listed_as_recorded(pbs: FakeBackend) -> None:
    number = pbs.command("qsub", "arr.pbs").stdout.strip()
    member = number.replace("[]", "[2]")
    until(lambda: listed(pbs, number)["job_state"] == "B", 10)
    until(lambda: "exec_host" in listed(pbs, member), 10)
    was = was_listed("03-status.txt", "array parent, json", "100[].node1")
    assert shape(listed(pbs, number)) == shape(was)
    assert shape(listed(pbs, member)) | {"Checkpoint": "str", "Hold_Types": "str"} == shape(
        was_listed("03-status.txt", "one array member, json", "100[2].node1")
    ) | {"Checkpoint": "str", "Hold_Types": "str"}
    pbs.clean()


def test_a_failed_job_is_listed_as_recorded(pbs: FakeBackend) -> None:
    number = pbs.command("qsub", "fail.pbs").stdout.strip()
    until(lambda: listed(pbs, number)["job_state"] == "F", 10)
    now = listed(pbs, number)
    was = recorded("pbs", "04-finished.txt", "failed with 3").stdout
    assert (now["substate"], now["Exit_status"]) == (93, 3)
    assert '"substate":\t93' in was and '"Exit_status":\t3' in was
    assert set(re.findall(r'^\t\t\t"(\w+)"', was, re.M)) <= set(now)
    assert pbs.command("qstat", number).returncode == 35
    assert "Job has finished, use -x or -H" in pbs.command("qstat", number).stderr
    assert pbs.command("qdel", number).returncode == 35


@pytest.mark.parametrize("title", ["unknown job id", "unknown job id, full", "malformed id"])
def test_qstat_of_an_unknown_job_has_the_recorded_words(pbs: FakeBackend, title: str) -> None:
    same_words(pbs, recorded("pbs", "03-status.txt", title))


def test_the_table_of_qstat_is_the_recorded_one(pbs: FakeBackend) -> None:
    number = pbs.command("qsub", "-h", "sleep.pbs").stdout.strip()
    was = recorded("pbs", "03-status.txt", "plain").stdout.splitlines()
    now = pbs.command("qstat").stdout.splitlines()
    assert now[:2] == was[:2]
    assert re.match(rf"{re.escape(number)} +sleep.pbs +\w+ +0 H workq", now[-1])
    pbs.clean()


@pytest.mark.parametrize("title", ["unknown", "malformed"])
def test_qdel_of_an_unknown_job_has_the_recorded_words(pbs: FakeBackend, title: str) -> None:
    same_words(pbs, recorded("pbs", "05-cancel.txt", title))


@pytest.mark.parametrize(
    "title", ["submit", "status", "status, json", "one job, json", "cancel", "nodes"]
)
def test_pbs_that_is_down_has_the_recorded_words(pbs: FakeBackend, title: str) -> None:
    pbs.fault("down")
    try:
        was = recorded("pbs", "07-server-down.txt", title)
        done = pbs.command(*was.argv)
    finally:
        pbs.fault("")
    assert (done.returncode, _words(done.stderr), _words(done.stdout)) == (
        was.exit_code,
        _words(was.stderr),
        _words(was.stdout),
    )


@pytest.mark.parametrize("title", ["submit", "status", "cancel", "nodes"])
def test_torque_that_is_down_has_the_recorded_words(torque: FakeBackend, title: str) -> None:
    torque.fault("down")
    try:
        was = recorded("torque", "07-server-down.txt", title)
        done = torque.command(*was.argv[2:])
    finally:
        torque.fault("")
    assert done.returncode == was.exit_code
    assert set(_words(done.stderr)) <= set(_words(was.stderr))


def test_torque_lists_the_recorded_attributes(torque: FakeBackend) -> None:
    number = torque.command(
        "qsub", "-N", "running", "-l", "nodes=1:ppn=1:gpus=1", "sleep.tq"
    ).stdout.strip()
    until(lambda: "job_state = R" in torque.command("qstat", "-f1", number).stdout, 10)
    now = torque.command("qstat", "-f1", number).stdout
    was = recorded("torque", "03-status.txt", "running, one attribute a line").stdout
    names = set(re.findall(r"^    (\S+) =", now, re.M))
    assert names <= set(re.findall(r"^    (\S+) =", was, re.M)) | {"resources_used.walltime"}
    assert {"job_state", "exec_host", "exec_gpus", "Resource_List.nodes", "comment"} <= names
    assert torque.command("qdel", number).returncode == 0
    until(lambda: "exit_status = 271" in torque.command("qstat", "-f1", number).stdout, 10)
    done = torque.command("qdel", number)
    assert (done.returncode, _words(done.stderr)) == (
        170,
        _words(recorded("torque", "05-cancel.txt", "finished").stderr),
    )
    same_words(torque, recorded("torque", "05-cancel.txt", "unknown"))
    same_words(torque, recorded("torque", "03-status.txt", "unknown"))


def test_jobs_are_seen_at_a_site_without_history(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There `qstat -x` is refused, and jobs that live are seen all the same."""
    with RecordedPbs(
        shared_folder / "forgetful-pbs", queues=QUEUES, history=0
    ).running() as running:
        _write(running.folder, "pbs")
        monkeypatch.setenv("PATH", running.env()["PATH"])
        batch = SchedulerClient(PBS(), timeout=patience(6.0))
        number = PBS().parse_submit(running.command("qsub", "arr.pbs").stdout)
        assert number
        jobs = [JobId(number, n) for n in range(8)]
        until(
            lambda: (
                {status.state for status in batch.status(jobs, []).values()} == {JobState.RUNNING}
            ),
            20,
        )
        batch.cancel(jobs, ["arr"])
        until(
            lambda: (
                {status.state for status in batch.status(jobs, []).values()} == {JobState.UNKNOWN}
            ),
            20,
        )


@pytest.mark.parametrize("kind", [PbsBackend, TorqueBackend])
def test_jobs_of_another_server_are_seen_and_cancelled(
    kind: type[PbsBackend], shared_folder: Path, home: Path
) -> None:
    """`cluster` of the site: submitted to that server, which is then queried and told to cancel."""
    folder = shared_folder / f"other-{kind.name}"
    with (
        kind(folder, server="other", first_id=4242).running() as other,
        kind(shared_folder / f"near-{kind.name}", peers={"other": str(folder)}).running() as near,
    ):
        cli = make_cli(near, home, "root" if os.geteuid() == 0 else "ordinary")
        site = str(cli.write("far.yaml", near.site() | {"cluster": "other"}))
        profile = {"gpus": 2, "gpus_per_job": 1, "directives": ["-h"]}
        cluster = cli.submit(profile, "--site", site)
        cli.submit(profile, "--site", site, name="more.yaml")
        assert not near.jobs() and len(other.jobs()) == 4
        found = cli.status(cluster)["jobs"]
        assert [job["id"] for job in found] == ["4242[0].other", "4242[1].other"]
        assert {job["state"] for job in found} == {"PENDING"}
        assert cli("cancel", "--all").returncode == 0
        assert not other.queue()


# -- environment ---------------------------------------------------------------------------------------------------
def environment(backend: FakeBackend, *options: str) -> dict[str, str]:
    path = backend.folder / "spool" / "environment"
    path.unlink(missing_ok=True)
    done = backend.command(
        "qsub",
        *options,
        # The jobs of an array run at the same time.
        stdin=f"#!/bin/bash\nenv > {path}.$$; cp $PBS_GPUFILE {path}.gpus; mv {path}.$$ {path}\n",
    )
    assert done.returncode == 0, done.stderr
    until(path.exists, 10)
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)


def _names(title: str, name: str) -> set[str]:
    return set(re.findall(r"^(\w+)=", recorded(name, "06-environment.txt", title).stdout, re.M))


@pytest.mark.parametrize(
    ("title", "options"),
    [("parallel job", ["-l", "select=2:ncpus=2:mpiprocs=2"]), ("array job", ["-J", "4-5"])],
)
def test_pbs_sets_in_a_job_what_it_set(pbs: FakeBackend, title: str, options: list[str]) -> None:
    found = environment(pbs, *options)
    own = {
        "FOO",
        "PBS_JOBCOOKIE",
        "PBS_MOMPORT",
        "PBS_O_INTERACTIVE_AUTH_METHOD",
        "PBS_O_INTERACTIVE_ENCRYPT_METHOD",
    }
    assert _names(title, "pbs") - own <= set(found)
    assert "CUDA_VISIBLE_DEVICES" not in found  # without a hook
    assert found["OMP_NUM_THREADS"] == ("2" if title == "parallel job" else "1")


@pytest.mark.parametrize(
    ("title", "options"),
    [("parallel job", ["-l", "nodes=2:ppn=2:gpus=2"]), ("array job", ["-t", "4"])],
)
def test_torque_sets_in_a_job_what_it_set(
    torque: FakeBackend, title: str, options: list[str]
) -> None:
    if title == "array job":
        options = ["-t", "4-5"]
    found = environment(torque, *options)
    own = {"PBS_JOBCOOKIE", "PBS_MOMPORT", "PBS_MICFILE", "PBS_WALLTIME"}
    assert _names(title, "torque") - own <= set(found)
    if title == "parallel job":
        assert found["CUDA_VISIBLE_DEVICES"] == "1,0"
        until((torque.folder / "spool" / "environment.gpus").exists, 10)
        lines = (torque.folder / "spool" / "environment.gpus").read_text().split()
        assert sorted(lines) == ["node1-gpu0", "node1-gpu1", "node2-gpu0", "node2-gpu1"]


# -- GPUs without a variable --------------------------------------------------------------------------
@pytest.mark.conformance(slow=("pbs",))
@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("torque", {"visible_devices": {"file": "PBS_GPUFILE"}}),
        (
            "pbs",
            {
                "visible_devices": "exclusive",
                "exclusive": True,
                "directives": ["-l place=scatter:excl"],
            },
        ),
    ],
    indirect=["backend"],
    ids=["torque-file", "pbs-exclusive"],
)
def test_each_worker_has_its_own_gpu(
    cli: Cli, backend: FakeBackend, changes: dict[str, Any]
) -> None:
    site = backend.site()
    if changes.get("exclusive"):  # as if there were no hook
        site["setup"] = f"unset CUDA_VISIBLE_DEVICES\n{FAKE_GPUS}"
    site["queues"] = {
        "main": {**site["queues"]["main"], "exclusive": changes.pop("exclusive", False)}
    }
    whole = site["queues"]["main"]["exclusive"]
    cli.write("who.py", WHO)
    profile = {
        "gpus": 8,
        "start_workers": 8,
        "run": ["python", "who.py"],
        "env": {"WANTED": "8"},
        **({} if whole else {"gpus_per_job": 2}),
    }
    done = cli(
        "submit",
        str(cli.write("p.yaml", profile)),
        "--wait",
        "--site",
        str(cli.write("own.yaml", site | changes)),
    )
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])["workers"]
    assert len({(node, devices.split(",")[0]) for devices, node, _ in found.values()}) == 8
    assert len({gpu["uuid"] for gpu in cli.gpus(cluster).values()}) == 8
