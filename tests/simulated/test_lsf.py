"""The fake LSF prints, refuses and does the same as the real one in the recordings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpujobs.batch.client import SchedulerClient
from gpujobs.schedulers import CommandResult, JobId, JobState
from gpujobs.schedulers.lsf import LSF

from ..conftest import fresh_folder, make_cli
from ..support.cli import NVML
from ..support.fake_lsf import LsfBackend, RelativeOfLsf
from ..support.processes import patience, until
from ..support.transcripts import recorded

SCRIPT = "#!/bin/bash\n#BSUB -J {name}\n#BSUB -o {folder}/%J.%I.out\n{more}\n{work}\n"
SLEEP = "exec sleep 600"


@pytest.fixture
def lsf(lsf_backend: LsfBackend) -> Iterator[LsfBackend]:
    yield lsf_backend
    lsf_backend.clean()


@pytest.fixture
def script(lsf: LsfBackend, tmp_path: Path) -> Callable[..., str]:
    """Return a function that submits a script; it returns the id."""

    def submit(work: str = SLEEP, *more: str, name: str = "x-1") -> str:
        text = SCRIPT.format(
            name=name, folder=tmp_path, more="\n".join(f"#BSUB {line}" for line in more), work=work
        )
        done = lsf.command("bsub", stdin=text)
        assert done.returncode == 0, done.stderr
        found = LSF().parse_submit(done.stdout)
        assert found
        return found

    return submit


@pytest.fixture
def batch(lsf: LsfBackend, monkeypatch: pytest.MonkeyPatch) -> SchedulerClient:
    for name, value in lsf.env().items():
        monkeypatch.setenv(name, value)
    return SchedulerClient(LSF(), timeout=patience(6.0))


def shape(text: str) -> list[str]:
    """Return the lines of ``text`` without the parts that differ between jobs, and single blanks."""
    text = re.sub(r"<[^<>\n]*(\n {21}[^<>\n]*)*>", "<>", text)
    text = re.sub(r"\b[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d", "WHEN", text)
    return [
        re.sub(r" +", " ", re.sub(r"\d+", "9", line)).strip()
        for line in text.splitlines()
        if line.strip()
    ]


def said(file: str, title: str) -> CommandResult:
    return recorded("lsf", file, title)


def running(lsf: LsfBackend, *ids: str) -> None:
    until(lambda: all(job["state"] == "running" for job in lsf.jobs() if str(job["id"]) in ids), 20)


# -- it prints the same ------------------------------------------------------------------------------------
REFUSALS = {
    "unknown queue": ["-q nosuch"], "unknown resource": ["-R 'rusage[nosuch=1]'"], "malformed -R": ["-R 'span[ptile='"],
    "-R twice: IBM LSF joins them, this relative refuses": ["-R 'span[ptile=1]'", "-R 'rusage[ngpus=1]'"],
    "run limit over the queue's": ["-q short", "-W 40"], "bad run limit": ["-W abc"], "run limit with seconds": ["-W 00:10:00"],
    "bad -n": ["-n abc"], "bad memory": ["-M 4GB"], "more slots than there are": ["-n 100"],
}  # fmt: skip


@pytest.mark.parametrize("title", REFUSALS)
def test_the_fake_refuses_with_the_recorded_words(lsf: LsfBackend, title: str) -> None:
    text = SCRIPT.format(
        name="x",
        folder="/tmp",
        more="\n".join(f"#BSUB {line}" for line in REFUSALS[title]),
        work="true",
    )
    done, real = lsf.command("bsub", stdin=text), said("submit.txt", title)
    assert (done.returncode, done.stdout, done.stderr) == (real.exit_code, real.stdout, real.stderr)


def test_the_fake_accepts_with_the_recorded_words(lsf: LsfBackend) -> None:
    for title, text in (
        ("script on standard input", "#BSUB -q main\ntrue\n"),
        ("array", "#BSUB -J a[1-2]\ntrue\n"),
    ):
        assert shape(lsf.command("bsub", stdin=text).stdout) == shape(
            said("submit.txt", title).stdout
        )
    real = said("submit.txt", "empty standard input")
    done = lsf.command("bsub", stdin="")
    assert (done.returncode, done.stderr) == (real.exit_code, real.stderr)


def test_the_fake_lists_jobs_in_the_recorded_format(
    lsf: LsfBackend, script: Callable[..., str]
) -> None:
    one, array, held = (
        script("exit 3", name="failed"),
        script(SLEEP, name="array[1-3]"),
        script(SLEEP, "-H", name="held"),
    )
    until(lambda: [job["exit_code"] for job in lsf.jobs() if str(job["id"]) == one] == [3], 20)
    running(lsf, array)
    done, real = (
        lsf.command("bjobs", "-a", "-w", one, array, held),
        said("status.txt", "wide, all states").stdout.splitlines(),
    )
    header, *rows = done.stdout.splitlines()
    assert header == real[0]
    row = re.compile(
        r"(\d{1,7}) +\w+ +(PEND|PSUSP|RUN|USUSP|DONE|EXIT) +\w+ +\w+ +(-|[\w:]+) +\S.* \w{3} \d\d \d\d:\d\d"
    )
    assert all(row.fullmatch(line) for line in [*rows, *real[1:]])
    starts = [
        header.index(title)
        for title in ("JOBID", "USER", "STAT", "QUEUE", "FROM_HOST", "EXEC_HOST", "JOB_NAME")
    ]
    short = [line for line in [*rows, *real[1:]] if ":node" not in line]
    assert len(short) > 10
    # Each column begins where its title does; only a dash for no host stands in the middle.
    assert all(
        line[at - 1] == " " and (line[at] != " " or at == starts[5])
        for line in short
        for at in starts[1:]
    )
    unknown, of_real = (
        lsf.command("bjobs", "-a", "-w", "99999"),
        said("status.txt", "unknown job id"),
    )
    assert (unknown.returncode, unknown.stderr) == (of_real.exit_code, of_real.stderr)
    for title, job in (("UF", one), ("long, pending", held)):
        known = {
            line
            for line in shape(said("status.txt", title).stdout)
            if "RESOURCE REQ" not in line and "Effective" not in line and "Combined" not in line
        }
        mine = set(shape(lsf.command("bjobs", "-UF", job).stdout))
        if title == "long, pending":  # the reason is another one, and this one was held
            known = {
                line
                for line in known
                if "Submitted" not in line and "rusage" not in line and "not satisfied" not in line
            }
        else:
            known = {re.sub(r", Execution Home <>", "", line) for line in known}
        assert known <= mine, known - mine
    lsf.clean()


def test_the_fake_has_the_recorded_history_of_a_job(
    lsf: LsfBackend, script: Callable[..., str]
) -> None:
    ids = {
        "failed with 3": script("exit 3"),
        "done": script("true"),
        "killed while pending": script(SLEEP, "-H"),
    }
    lsf.command("bkill", ids["killed while pending"])
    until(lambda: not lsf.queue(), 20)
    for title, job in ids.items():
        real = [
            line
            for line in shape(said("finished.txt", title).stdout)
            if line.startswith("WHEN") or "PEND PSUSP" in line
        ]
        real = [line for line in real if "Post job" not in line and "Running with" not in line]
        mine = shape(lsf.command("bhist", "-n", "10", "-l", job).stdout)
        assert [line.replace(" with hold", "") for line in real] == [
            line for line in mine if line in real or line.startswith("WHEN")
        ]
    unknown, of_real = (
        lsf.command("bhist", "-n", "10", "-l", "99999"),
        said("finished.txt", "bhist of an unknown"),
    )
    assert (unknown.returncode, shape(unknown.stdout + unknown.stderr)) == (
        of_real.exit_code,
        shape(of_real.stdout),
    )


def test_the_fake_cancels_with_the_recorded_words(
    lsf: LsfBackend, script: Callable[..., str]
) -> None:
    lone, array = script(), script(name="a[1-6]")
    running(lsf, lone, array)
    calls = {
        "running": [lone], "one member": [f"{array}[3]"], "range": [f"{array}[4-6]"], "array": [array], "unknown": ["99999"],
        "malformed": ["abc"],
    }  # fmt: skip
    for title, words in calls.items():
        done, real = lsf.command("bkill", *words), said("cancel.txt", title)
        assert (done.returncode, shape(done.stdout), shape(done.stderr)) == (
            real.exit_code,
            shape(real.stdout),
            shape(real.stderr),
        )
    until(lambda: not lsf.queue(), 30)
    done, real = lsf.command("bkill", lone), said("cancel.txt", "finished")
    assert (done.returncode, shape(done.stderr)) == (real.exit_code, shape(real.stderr))


def test_an_empty_queue_has_the_recorded_words(lsf: LsfBackend) -> None:
    done, real = lsf.command("bjobs", "-w"), said("status.txt", "nothing left")
    assert (done.returncode, done.stderr) == (real.exit_code, real.stderr)


# -- it does the same -------------------------------------------------------------------------------------
def test_the_fake_sets_the_variables_of_a_job(
    lsf: LsfBackend, script: Callable[..., str], tmp_path: Path
) -> None:
    request = ["-n 4", '-R "span[ptile=2]"', '-gpu "num=2"', "-P p1"]
    number = script("env | sort", *request, name="arr[2-4]")
    until(lambda: not lsf.queue(), 20)
    text = (tmp_path / f"{number}.3.out").read_text()
    wanted = {
        "LSB_JOBID": number, "LSB_JOBINDEX": "3", "LSB_JOBNAME": "arr[2-4]", "LSB_HOSTS": "node1 node1 node2 node2",
        "LSB_MCPU_HOSTS": "node1 2 node2 2 ", "HOME": str(lsf.folder), "LS_SUBCWD": str(lsf.folder),
    }  # fmt: skip
    found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert {
        name: found[name].replace("node3", "node1").replace("node4", "node2") for name in wanted
    } == wanted
    assert len(found["CUDA_VISIBLE_DEVICES"].split(",")) == 2
    assert text.splitlines()[-3:] == [
        f"Sender: LSF System <fake@{found['SLURMD_NODENAME']}>",
        f"Subject: Job {number}: <arr>",
        "Exited with exit code 0.",
    ]


TRAP = (
    'for s in INT TERM USR2; do trap "echo got $s" $s; done\n'
    "touch {}\nuntil [ -e {} ]; do sleep 0.1; done\n"
)


def test_bkill_sends_int_before_anything_else(
    lsf: LsfBackend, script: Callable[..., str], tmp_path: Path
) -> None:
    number = script(TRAP.format(tmp_path / "ready", tmp_path / "end"))
    until((tmp_path / "ready").exists, 20)
    lsf.command("bkill", number)
    until(lambda: "got" in (tmp_path / f"{number}.0.out").read_text(), 10)
    assert (tmp_path / f"{number}.0.out").read_text() == "got INT\n"
    assert lsf.queue()  # it has caught it, and lives
    (tmp_path / "end").touch()


def test_run_limit_is_140_for_who_does_not_listen(
    lsf: LsfBackend, script: Callable[..., str], batch: SchedulerClient
) -> None:
    number = script("kill -USR2 $$; sleep 9")
    until(lambda: not lsf.queue(), 20)
    found = batch.status([JobId(number)], ["x-1"])[JobId(number)]
    assert (found.state, found.exit_code) == (JobState.TIMEOUT, 140)


# -- gpujobs on it ---------------------------------------------------------------------------------
def test_the_commands_tell_the_states_of_jobs(
    lsf: LsfBackend, script: Callable[..., str], batch: SchedulerClient
) -> None:
    ids = {
        "RUNNING": script(), "FAILED": script("exit 3"), "COMPLETED": script("true"), "PENDING": script(SLEEP, "-H"),
        "CANCELLED": script(SLEEP, "-H"),
    }  # fmt: skip
    batch.cancel([JobId(ids["CANCELLED"])], ["x-1"])
    until(lambda: len(lsf.queue()) == 2, 20)
    found = batch.status([JobId(number) for number in ids.values()], ["x-1"])
    assert {found[JobId(number)].state.value for number in ids.values()} == set(ids)
    assert all(found[JobId(number)].state.value == state for state, number in ids.items())
    assert found[JobId(ids["FAILED"])].exit_code == 3
    assert (
        found[JobId(ids["PENDING"])].reason
        == "The job was suspended by the user while pending: 1 host"
    )


def test_whole_arrays_and_members_are_cancelled(
    lsf: LsfBackend, script: Callable[..., str], batch: SchedulerClient
) -> None:
    array, other = script(name="a[1-4]"), script()
    running(lsf, array, other)
    members = [JobId(array, n) for n in range(1, 5)]
    batch.cancel(members[1:3], ["a"], [members[0], members[3]])
    until(lambda: len(lsf.queue()) == 3, 20)
    batch.cancel([*members, JobId(other)], ["a"])  # exit code 255, and yet all are told
    until(lambda: not lsf.queue(), 20)
    batch.cancel([*members, JobId(other)], ["a"])  # again: fine
    found = batch.status(members, ["a"])
    assert {status.state for status in found.values()} <= {JobState.CANCELLED, JobState.FAILED}


def test_a_job_that_left_bjobs_is_found_in_bhist(
    lsf: LsfBackend, script: Callable[..., str], batch: SchedulerClient
) -> None:
    number = script("exit 5")
    until(lambda: not lsf.queue(), 20)
    lsf.fault("forget", "query")
    found = batch.status([JobId(number), JobId("99999")], ["x-1"])
    assert (found[JobId(number)].state, found[JobId(number)].exit_code) == (JobState.FAILED, 5)
    assert found[JobId("99999")].state is JobState.UNKNOWN


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_a_job_of_another_user_is_not_cancelled(
    lsf: LsfBackend, script: Callable[..., str]
) -> None:
    from ..support.processes import run

    number = script()
    done = run(["bkill", number], env={**lsf.env(), "HOME": "/"}, user="nobody", cwd=Path("/"))
    real = said("cancel.txt", "somebody else's")
    assert (done.returncode, shape(done.stderr)) == (real.exit_code, shape(real.stderr))


# -- a relative without -gpu -----------------------------------------------------------------------
@pytest.fixture
def relative(shared_folder: Path) -> Iterator[RelativeOfLsf]:
    folder = fresh_folder(shared_folder, "relative")
    with RelativeOfLsf(folder).running() as running:
        yield running


@pytest.mark.parametrize(
    ("title", "line"),
    [
        ("no -rn", "-rn"), ("unit of memory", "-R 'rusage[mem=1024MB]'"), ("reservation", "-U nores"),
        ("avoid", """-R "select[hname!='node1'] rusage[ngpus=4]\""""),
    ],
)  # fmt: skip
def test_a_relative_refuses_with_the_recorded_words(
    relative: RelativeOfLsf, title: str, line: str
) -> None:
    done = relative.command("bsub", stdin=f"#BSUB {line}\ntrue\n")
    real = said("requests.txt", title)
    assert done.returncode == real.exit_code
    assert done.stderr.splitlines()[:1] == real.stderr.splitlines()[:1]
    assert shape(done.stdout) == shape(real.stdout)


def test_a_relative_reports_the_recorded_lines(relative: RelativeOfLsf) -> None:
    """Each line is one of the recorded lines, but for the numbers."""
    fill = ["#BSUB -n 16", "#BSUB -R 'rusage[ngpus=4]'", f"{SLEEP}"]
    ids = [relative.command("bsub", stdin="\n".join(fill)).stdout for _ in range(relative.nodes)]
    assert len(ids) == relative.nodes
    until(lambda: {job["state"] for job in relative.jobs()} == {"running"}, 20)
    for title in (
        "hosts, wide",
        "resources",
        "queue limits",
        "memory of hosts",
        "parameters, long",
        "version",
    ):
        real = said("inventory.txt", title)
        done = relative.command(*real.argv)
        assert done.returncode == 0
        assert set(shape(done.stdout)) <= set(shape(real.stdout)), title
    for title in ("no GPUs of lshosts", "parameters"):
        real = said("inventory.txt", title)
        done = relative.command(*real.argv)
        assert (done.returncode, done.stdout) == (real.exit_code, real.stdout)
        assert done.stderr.splitlines()[0] == real.stderr.splitlines()[0]


def test_a_job_avoids_the_nodes_of_its_directive(relative: RelativeOfLsf) -> None:
    line = LSF().avoid(["node1", "node2"])
    done = relative.command("bsub", stdin=f"#BSUB {line}\n{SLEEP}\n")
    assert done.returncode == 0, done.stderr
    until(lambda: bool(relative.jobs()[0]["nodes"]), 20)
    assert list(relative.jobs()[0]["nodes"]) == ["node3"]


@pytest.mark.slow
def test_a_draft_of_a_relative_runs_a_job_unchanged(relative: RelativeOfLsf, home: Path) -> None:
    cli = make_cli(relative, home, "ordinary")
    done = cli("sites", "init", "--scheduler", "lsf", "-o", "drafted.yaml")
    assert done.returncode == 0 and "no findings" in done.stderr
    site = str(cli.work / "drafted.yaml")
    done = cli("sites", "check", site, "--live", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["findings"] == []
    settings = [f"--set=env.PYTHONPATH={NVML}", "--set=env.DASK_CUDA_TEST_SINGLE_GPU=1"]
    done = cli("doctor", "--run", "--site", site, *settings, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check["state"] for check in json.loads(done.stdout)["checks"]}
    assert checks["job"] == checks["GPUs"] == "ok"
    profile = cli.write("cpu.yaml", {"gpus": 0, "workers": {"count": 2}, "run": ["true"]})
    done = cli("submit", str(profile), "--site", site, "--wait")
    assert done.returncode == 0, done.stderr
