"""Job folders without a batch scheduler: what is in them, bad ones, and jobs that do not find theirs."""

from __future__ import annotations

import cProfile
import json
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpujobs.batch.process import System
from gpujobs.cli.usage_text import usage_text
from gpujobs.clusters import connect, scale, submit
from gpujobs.clusters.folderstate import read_state
from gpujobs.clusters.history import History
from gpujobs.clusters.judge import judge
from gpujobs.clusters.ledger import Ledger, Submission
from gpujobs.clusters.monitor import recover_submission, report_on
from gpujobs.clusters.report import ClusterState
from gpujobs.clusters.targets import Targets
from gpujobs.clusters.usage import make_usage
from gpujobs.errors import GpujobsError, InputError, NoSuchClusterError
from gpujobs.injob.folder import Folder
from gpujobs.injob.names import CERTIFICATE, KEY, RECORD
from gpujobs.schedulers import CommandResult, JobId

from ..support.transcripts import SQUEUE_FOUND_HEADER
from .support import made_plan, make_spec

PROFILE = {"gpus": 4, "gpus_per_job": 2, "run": ["python", "x.py"]}
GROUPS = {
    "groups": {
        "gpu": {"gpus": 4, "gpus_per_job": 2},
        "cpu": {"gpus": 0, "queue": "gpu", "workers": {"count": 1}},
    }
}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def rendered(home: Path, profile: dict[str, object] = PROFILE, site: str = "s.yaml") -> Path:
    spec = make_spec(home, profile, str(home / site) if site.endswith(".yaml") else site)
    plan = made_plan(home, profile, site)
    submit.write_folder(spec, plan, home / "F", {"cluster": "svd-0001"}, "svd-0001")
    return home / "F"


def claim(folder: Path, number: int, text: str) -> None:
    (folder / "svd-0001" / "jobs" / f"{number}.claim").write_text(f"{text}\n")


def submissions(folder: Path) -> tuple[Submission, ...]:
    return Ledger().get(str(folder)).submissions


def test_it_has_no_key_and_is_private(home: Path) -> None:
    folder = rendered(home)
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "plan.json", "svd-0001", "svd.sh",
    }  # fmt: skip
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not any(b"PRIVATE KEY" in path.read_bytes() for path in files)
    assert folder.stat().st_mode & 0o777 == (folder / "svd-0001").stat().st_mode & 0o777 == 0o700
    script = (folder / "svd.sh").read_text()
    assert str(home / "F") not in script and "/.gpujobs" not in script
    assert len((folder / "README.md").read_text().splitlines()) == 9
    assert json.loads((folder / "plan.json").read_text()) == {"cluster": "svd-0001"}


def test_a_key_of_a_submission_that_was_killed_is_replaced(home: Path) -> None:
    """It has no certificate, which is written after it."""
    record = Ledger().get(str(rendered(home)))
    (record.path / KEY).write_text("of a killed command")
    submit._make_key(record)
    assert record.encrypted and "PRIVATE KEY" in (record.path / KEY).read_text()
    assert (record.path / CERTIFICATE).exists()


def test_each_group_has_its_scripts(home: Path) -> None:
    folder = rendered(home, GROUPS)
    text = (folder / "README.md").read_text()
    assert "sbatch --parsable svd-gpu-0.sh\n" in text and "sbatch --parsable svd-cpu-2.sh\n" in text
    assert "3 jobs on the site" in text


def test_ids_come_from_the_jobs(home: Path) -> None:
    """Jobs of a copy write the ids of their submissions; that of a script without any is not known."""
    folder = rendered(home, GROUPS)
    assert submissions(folder) == ()
    copy = home / "other" / "copy"
    copy.parent.mkdir(mode=0o700)
    shutil.copytree(folder, copy)
    claim(copy, 1, "77[1]")
    (found,) = submissions(copy)
    assert (found.id, found.first, found.count, found.array) == ("77", 0, 2, True)
    assert found.jobs == {0: JobId("77", 0), 1: JobId("77", 1)}
    record = Ledger().get(str(copy))
    assert record.path == copy / "svd-0001" and [one.group for one in record.unseen] == ["cpu"]
    claim(copy, 2, "78")
    assert [sent.id for sent in submissions(copy)] == ["77", "78"]
    assert submissions(folder) == ()


def test_two_copies_are_not_confused(home: Path) -> None:
    folder = rendered(home)
    shutil.copytree(folder, home / "G")
    ledger = Ledger()
    ledger.get(str(folder))
    with pytest.raises(InputError, match=r"G is a copy of .*/F; name one of them"):
        ledger.get(str(home / "G"))
    ledger.update("svd-0001", notes=("changed",))
    assert Ledger().get(str(home / "G")).notes != ("changed",)
    assert Ledger().get(str(folder)).notes == ("changed",)
    assert Ledger().all() == []


def test_before_a_job_has_started_the_cluster_waits_and_can_be_cancelled(home: Path) -> None:
    folder = rendered(home)
    ledger = Ledger()
    report = report_on(ledger.get(str(folder)), ledger)
    assert report.state is ClusterState.PENDING and "no job has started" in report.reason
    with pytest.raises(GpujobsError, match="has not started yet"):
        connect.address_of(report.record, report.folder)
    with pytest.raises(InputError, match="jobs of its scripts have not started"):
        scale.scale(report.record, {"": 8}, ledger)
    scale.cancel(report.record, ledger)
    assert Folder(str(folder / "svd-0001")).read("ended")["kind"] == "cancelled"
    assert report_on(ledger.get(str(folder)), ledger).state is ClusterState.CANCELLED
    with pytest.raises(InputError, match="was submitted already"):
        submit.submit_folder(folder, Ledger())
    assert not Ledger().folder.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: shutil.rmtree(path / "svd-0001"), "is not a job folder"),
        (lambda path: (path / "svd-0001").rename(path / "mine"), "it is that of svd-0001"),
        (lambda path: shutil.copytree(path / "svd-0001", path / "b"), "is not a job folder"),
        (lambda path: (path / "svd-0001" / RECORD).write_text("{"), "is not a valid record"),
        (lambda path: path.chmod(0o777), "is writable by other users"),
        (lambda path: (path / "svd-0001").chmod(0o770), "is writable by other users"),
    ],
)
def test_a_bad_folder_is_refused(home: Path, change: object, said: str) -> None:
    folder = rendered(home)
    change(folder)  # type: ignore[operator]
    with pytest.raises(GpujobsError, match=said):
        Ledger().get(str(folder))
    folder.chmod(0o700)


@pytest.mark.parametrize("name", ["../other.sh", "/tmp/other.sh", "svd-0001/../svd.sh"])
def test_a_record_that_names_a_script_elsewhere_is_refused(home: Path, name: str) -> None:
    folder = rendered(home)
    (home / "other.sh").write_text("#!/bin/bash\n")
    path = folder / "svd-0001" / RECORD
    record = json.loads(path.read_text())
    record["planned"][0]["script"] = name
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match="is not a file of the job folder"):
        submit.submit_folder(folder, Ledger())


class Slurm(System):
    """A Slurm whose queue has one job of each id in ``queue``, all called svd-0001."""

    def __init__(self, *queue: str) -> None:
        self.queue = queue
        self.cancelled: list[str] = []

    def run(self, argv: Sequence[str], **_: Any) -> CommandResult:
        if argv[0] == "scancel":
            self.cancelled += argv[1:]
        rows = [f"{job}|svd-0001\n" for job in self.queue]
        return CommandResult(tuple(argv), 0, "".join([SQUEUE_FOUND_HEADER, *rows]), "")


@pytest.mark.parametrize("groups", [False, True])
def test_a_killed_submission_does_not_adopt_a_job_of_a_copy(home: Path, groups: bool) -> None:
    """All copies have one name; the claim of a job, in the folder of its submission, decides."""
    folder, ledger = rendered(home, GROUPS if groups else PROFILE), Ledger()
    record = ledger.get(str(folder))
    ledger.update(record.id, intent=record.planned[0])  # and then SIGKILL
    system = Slurm("77")
    found = recover_submission(ledger.get(str(folder)), ledger, at_once=True, system=system)
    assert found.submissions == () and found.intent == record.planned[0] and not found.finished
    with pytest.raises(InputError, match="was submitted already"):
        submit.submit_folder(folder, ledger)
    claim(folder, 1, "78[1]")
    found = recover_submission(ledger.get(str(folder)), ledger, at_once=True, system=system)
    assert [sent.id for sent in found.submissions] == ["78"] and found.intent is None
    assert [sent.id for sent in ledger.get(str(folder)).submissions] == ["78"]


def test_cancel_of_a_killed_submission_leaves_the_job_of_a_copy(home: Path) -> None:
    folder, ledger, system = rendered(home), Ledger(), Slurm("77")
    record = ledger.get(str(folder))
    ledger.update(record.id, intent=record.planned[0])
    scale.cancel(ledger.get(str(folder)), ledger, system=system)
    assert system.cancelled == []
    assert Folder(str(record.path)).read("ended")["kind"] == "cancelled"  # its own job exits
    ledger.update(record.id, intent=replace(record.planned[0], time=1.0))
    system.queue = ()
    assert recover_submission(ledger.get(str(folder)), ledger, system=system).finished


BARRIER = """\
#!/bin/bash
echo >> {home}/queries
for ((n = 0; n < 20; n++)); do
    [ "$(wc -l < {home}/queries)" -ge 2 ] && break
    read -rt 0.05 <> <(:)
done
printf '%s' '{header}'
"""
"""An squeue that answers when the other command asks, too, or after a second."""


def test_one_of_two_submissions_at_once_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is refused, and cancels nothing."""
    folder, commands = rendered(home), home / "commands"
    commands.mkdir()
    for name, text in (
        ("squeue", BARRIER.format(home=home, header=SQUEUE_FOUND_HEADER)),
        ("sbatch", f"#!/bin/bash\ncat > /dev/null\necho >> {home}/sent\necho 77\n"),
        ("scancel", f"#!/bin/bash\ntouch {home}/cancelled\n"),
    ):
        (commands / name).write_text(text)
        (commands / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")

    def submitted(_: int) -> str:
        try:
            return submit.submit_folder(folder, Ledger()).submissions[0].id
        except InputError as error:
            return str(error)

    with ThreadPoolExecutor(2) as two:
        results = sorted(two.map(submitted, range(2)), key=len)
    assert results[0] == "77" and "F was submitted already" in results[1]
    assert (home / "sent").read_text() == "\n" and not (home / "cancelled").exists()
    assert (folder / "svd-0001" / "tls-key.pem").exists()
    assert not (folder / "svd-0001" / "ended").exists()


def test_the_time_of_a_report_grows_with_the_number_of_jobs(home: Path) -> None:
    """Not with its square; a number of jobs that no profile has is damage."""
    folder = rendered(home)
    path = folder / "svd-0001" / RECORD
    record = json.loads(path.read_text())

    def calls(count: int) -> int:
        record["planned"][0]["count"] = count
        path.write_text(json.dumps(record))
        claim(folder, 0, "77[0]")
        found, profile = Ledger().get(str(folder)), cProfile.Profile()
        state = read_state(found.path)
        with profile:
            usage_text(make_usage(judge(found, state, {}, now=1.0), History(), Targets(), 1.0))
        return sum(entry.callcount for entry in profile.getstats())

    few, many = calls(100), calls(800)
    assert many < 10 * few
    with pytest.raises(GpujobsError, match="`planned` has more than 100000 jobs"):
        calls(999_999)


def test_a_missing_folder_is_no_cluster(home: Path) -> None:
    with pytest.raises(NoSuchClusterError, match="is not a job folder"):
        Ledger().get(str(home / "nosuch"))
    with pytest.raises(NoSuchClusterError, match="there is no cluster 'nosuch'"):
        Ledger().get("nosuch")


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({**PROFILE, "requeue": 1}, "`requeue` needs the ids of other jobs"),
        ({**PROFILE, "after": "svd-7f3a"}, "`after` needs the ids of other jobs"),
    ],
)
def test_a_profile_that_needs_gpujobs_has_no_job_folder(
    home: Path, profile: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        rendered(home, profile)
    assert not (home / "F").exists()


def test_a_folder_that_is_in_use_is_not_overwritten(home: Path) -> None:
    rendered(home)
    with pytest.raises(InputError, match="F is not empty"):
        rendered(home)


def test_the_local_site_has_no_job_folders(home: Path) -> None:
    with pytest.raises(InputError, match="jobs of local cannot find their job folder"):
        rendered(home, {"gpus": 0, "workers": {"count": 1}}, "local")


VARIABLES = {
    "slurm": {"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"},
    "pbs": {"PBS_JOBID": "5[1].pbs", "PBS_ARRAY_INDEX": "1"},
    "torque": {"PBS_JOBID": "5[1].torque", "PBS_ARRAYID": "1"},
    "lsf": {"LSB_JOBID": "5", "LSB_JOBINDEX": "2"},
    "sge": {"JOB_ID": "5", "SGE_TASK_ID": "2"},
}
SUBMIT_FOLDER = {
    "slurm": "SLURM_SUBMIT_DIR", "pbs": "PBS_O_WORKDIR", "torque": "PBS_O_WORKDIR",
    "lsf": "LS_SUBCWD", "sge": "SGE_O_WORKDIR",
}  # fmt: skip
ACCOUNT = {"slurm": "p12345", "pbs": "p12345", "torque": "p12345", "lsf": "acc_svd", "sge": "a1"}


def execute(folder: Path, scheduler: str, at: Path) -> subprocess.CompletedProcess[str]:
    """Run the script of job 1 as the batch scheduler would that was asked in the folder ``at``."""
    env = {"PATH": "/usr/bin:/bin", "HOSTNAME": "node1", **VARIABLES[scheduler]}
    return subprocess.run(
        ["bash", str(folder / "svd.sh")], env={**env, SUBMIT_FOLDER[scheduler]: str(at)},
        text=True, capture_output=True, check=False, cwd="/",
    )  # fmt: skip


@pytest.mark.parametrize("scheduler", VARIABLES)
def test_a_job_finds_its_folder(home: Path, scheduler: str) -> None:
    """It may have been renamed; from elsewhere, or if it was used before, the job says why it exits."""
    profile = {**PROFILE, "account": ACCOUNT[scheduler], "environment": {"python": "/bin/true"}}
    rendered(home, profile, f"example-{scheduler}").rename(home / "a b")
    folder = home / "a b"
    done = execute(folder, scheduler, home)
    assert done.returncode == 78
    assert f"{home}/svd-0001 is not there on node1: submit in the job folder" in done.stderr
    done = execute(folder, scheduler, folder)
    log = (folder / "svd-0001" / "logs" / "job-1.log").read_text()
    assert done.returncode == 0, log
    (sent,) = submissions(folder)
    first = sent.jobs[1]
    assert (folder / "svd-0001" / "job-ids").read_text() == f"{first.submission}\n"
    (folder / "svd-0001" / "jobs" / "1.claim").write_text("4711\n")
    done = execute(folder, scheduler, folder)
    assert done.returncode == 78
    assert f"{folder} was submitted already, as job 4711" in done.stderr
    (folder / "svd-0001" / "injob.pyz").unlink()
    done = execute(folder, scheduler, folder)
    assert done.returncode == 78 and "has no injob.pyz" in done.stderr


def test_a_container_mounts_the_copy(home: Path) -> None:
    container = {"image": "/x.sif", "runtime": "apptainer"}
    script = (
        rendered(home, {**PROFILE, "environment": {"container": container}}) / "svd.sh"
    ).read_text()
    assert '--bind="$gpujobs_root":"$gpujobs_root"' in script
    assert str(home / "F") not in script and "/.gpujobs" not in script
