"""`layout: allocation`: its launcher, its limits, and the numbers of its nodes; tests/real has the real thing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.injob.folder import Folder
from gpujobs.injob.job import JobExit
from gpujobs.injob.names import JOB_REQUEST, RUN_NAME
from gpujobs.injob.network import job_nodes
from gpujobs.injob.options import SuperviseOptions
from gpujobs.injob.rank import report_lost, start_launcher
from gpujobs.injob.workers import Workers, claim_node
from gpujobs.planning.render import render

from ..support.processes import patience
from .support import error_of, made_plan

SITE = """\
description: test
scheduler: {scheduler}
visible_devices: scheduler
{more}
queues:
  a: {{gpus_per_node: 4, cpus_per_node: 8, memory_per_node: 64GiB}}
"""
PROFILE = "layout: allocation\ngpus: 8\nwalltime: 1h\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write_site(home: Path, scheduler: str, more: str = "") -> None:
    (home / "s.yaml").write_text(SITE.format(scheduler=scheduler, more=more))


@pytest.mark.parametrize(
    ("scheduler", "launcher"),
    [
        ("slurm", "srun --export=ALL --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1 "),
        ("pbs", "pbs_tmrsh {node} "),
        ("torque", "pbsdsh -u "),
        ("lsf", "blaunch {node} "),
        ("sge", "qrsh -inherit -nostdin -noshell {node} "),
    ],
)
def test_each_batch_scheduler_has_a_built_in_launcher(
    home: Path, scheduler: str, launcher: str
) -> None:
    more = (
        'request: ["-q {queue}", "-pe x {nodes}", "-l gpu={gpus_per_job}"]'
        if scheduler == "sge"
        else ""
    )
    write_site(home, scheduler, more)
    text = " ".join(render(made_plan(home, PROFILE), "svd-1")[0].text.replace("\\\n", " ").split())
    assert f"--workers {launcher.replace('{node}', chr(39) + '{node}' + chr(39))}" in text


def test_the_launcher_ends_all_nodes_unless_they_go_on(home: Path) -> None:
    write_site(home, "slurm")
    assert "--kill-on-bad-exit=1" in render(made_plan(home, PROFILE), "svd-1")[0].text
    text = render(made_plan(home, f"{PROFILE}keep_going: true\n"), "svd-1")[0].text
    assert "--kill-on-bad-exit=0" in text and "--keep-going" in text


@pytest.mark.parametrize("layouts", ["[mpi]", "[allocation]", "[workers, mpi]"])
def test_a_queue_for_mpi_is_for_allocations(home: Path, layouts: str) -> None:
    write_site(home, "slurm", f"layouts: {layouts}")
    assert made_plan(home, PROFILE).gpus == 8


@pytest.mark.parametrize(
    ("scheduler", "more", "profile", "reason"),
    [
        ("slurm", "layouts: [workers]", PROFILE, "it is for layout: workers"),
        ("slurm", "", f"{PROFILE}head: {{}}\n", "`head` has no meaning in `layout: allocation`"),
        ("slurm", "", "gpus: 4\nwalltime: 1h\nkeep_going: true\n", "needs `layout: allocation`"),
        ("slurm", "", f"{PROFILE}run_on: ranks\nrun: [a.py]\n", "needs `layout: mpi`"),
        ("slurm", "", "layout: allocation\ngpus: 6\nwalltime: 1h\n", "has whole nodes of 4 GPUs"),
        (
            "pbs",
            "containers: {runtime: apptainer}",
            f"{PROFILE}environment: {{container: {{image: /i.sif}}}}\n",
            "pbs_tmrsh cannot start containers on several nodes",
        ),
    ],
)
def test_what_an_allocation_cannot_have_is_refused(
    home: Path, scheduler: str, more: str, profile: str, reason: str
) -> None:
    write_site(home, scheduler, more)
    assert reason in error_of(home, profile)


# -- nodes in the job ------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    for name in ("jobs", "logs"):
        (tmp_path / name).mkdir()
    return Folder(str(tmp_path))


def options(folder: Folder, *workers: str, job: int = 0) -> SuperviseOptions:
    return SuperviseOptions(
        str(folder.path), job=job, ranks=2, nodes=2, gpus=8, workers=(*workers,)
    )


def test_nodes_are_numbered_through_all_jobs(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, given, number in (("n1", "1", 1), ("n2", "1", 0)):  # a number that is taken
        monkeypatch.setenv("SLURMD_NODENAME", node)
        monkeypatch.setenv("PMIX_RANK", given)
        assert claim_node(folder, options(folder, job=1)) == number
    assert folder.read("jobs/3.node") == {"node": "n1"}
    assert folder.read("jobs/2.node") == {"node": "n2"}


def test_two_processes_on_a_node_are_refused(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert claim_node(folder, options(folder)) == 0
    for _ in range(2):
        with pytest.raises(LookupError, match="two processes on n1, not one on each node"):
            claim_node(folder, options(folder))


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PBS_NODEFILE", "n1\nn1\nn2\n"),
        ("PE_HOSTFILE", "n1 8 all.q@n1 UNDEFINED\nn2 8 all.q@n2 UNDEFINED\n"),
        ("LSB_DJOB_HOSTFILE", "n1\nn1\nn2\nn2\n"),
    ],
)
def test_the_file_of_each_batch_scheduler_lists_the_nodes_of_a_job(
    tmp_path: Path, variable: str, text: str
) -> None:
    (tmp_path / "nodes").write_text(text)
    assert job_nodes({variable: str(tmp_path / "nodes")}) == ["n1", "n2"]


def test_nodes_without_a_file_are_in_a_variable_or_an_error() -> None:
    assert job_nodes({"LSB_HOSTS": "n1 n1 n2"}) == ["n1", "n2"]
    with pytest.raises(LookupError, match="does not list the nodes"):
        job_nodes({"PBS_NODEFILE": "/nosuch"})


def test_a_launcher_that_names_the_node_starts_once_for_each(folder: Folder) -> None:
    """It is found on the PATH of the shell that submitted the job, and gets no words with quotes."""
    programs = folder.path / "bin"
    programs.mkdir()
    (programs / "rsh1").write_text('#!/bin/sh\nprintf "%s|" "$@"\nshift; exec "$@"\n')
    (programs / "rsh1").chmod(0o755)
    script = str(folder.path / "jobs" / "0.ranks.sh")
    words = ("rsh1", "{node}", "sh", script, "printf", "%s", 'it\'s {node} "x"\n')
    environ = {"PATH": "/usr/bin:/bin", "PBS_O_PATH": str(programs), "LSB_HOSTS": "n1 n2"}
    started = start_launcher(options(folder, *words), environ)
    assert [process.name for process in started] == [
        "the launcher (rsh1) of n1",
        "the launcher (rsh1) of n2",
    ]
    assert all(process.wait(patience(10)) and process.exit_code == 0 for process in started)
    log = (folder.logs / "job-0.log").read_text()
    assert log.count('it\'s {node} "x"\n') == 2
    assert f"n1|sh|{script}|" in log and f"n2|sh|{script}|" in log


def test_a_supervisor_hears_of_lost_nodes_of_its_own_start(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a start before, whose processes on other nodes may still end."""
    heard: list[str] = []

    class Listening(Workers):
        def node_lost(self, reason: str) -> None:
            heard.append(reason)

    job = Listening(options(folder))
    for run, node, number in (("1-n1-1", "n2", 1), ("2-n1-1", "n3", 0), ("2-n1-1", "n4", 1)):
        monkeypatch.setenv(RUN_NAME, run)
        monkeypatch.setenv("SLURMD_NODENAME", node)
        report_lost(options(folder), number, f"{node} is lost", 3)
    with pytest.raises(JobExit, match="n3 is lost") as caught:
        job.check_end()
    assert caught.value.exit_code == 3
    job.options = replace(job.options, keep_going=True)
    for _ in range(2):
        job.check_end()
    assert heard == ["n3 is lost", "n4 is lost"]
    assert not (folder.path / "jobs" / "0.jsonl").exists()  # of the host of the supervisor


def test_a_launcher_does_not_get_the_request_of_its_job(folder: Folder) -> None:
    """`srun` would take SLURM_GPUS_PER_NODE for an option, and refuse it beside its own."""
    environ = {"PATH": os.defpath, "SLURM_GPUS_PER_NODE": "4", "SLURM_NTASKS_PER_GPU": "1"}
    environ |= {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS": "2"}
    (started,) = start_launcher(options(folder, "env"), environ)
    assert started.wait(patience(10))
    names = {line.partition("=")[0] for line in (folder.logs / "job-0.log").read_text().split()}
    assert {"SLURM_JOB_ID", "SLURM_GPUS_ON_NODE", "SLURM_NTASKS"} <= names
    assert not names & {*JOB_REQUEST}
    script = (folder.path / "jobs" / "0.ranks.sh").read_text()  # its processes have it again
    assert "export SLURM_GPUS_PER_NODE=4\n" in script and "SLURM_JOB_ID" not in script


@pytest.mark.parametrize(
    ("request_line", "more"),
    [
        ("--gpus={gpus_per_job}", " --gres=gpu:4"),
        ("-G {gpus_per_job}", " --gres=gpu:4"),
        ("--gpus-per-node={gpus_per_node}", ""),
        ("--gres=gpu:{gpus_per_node}", ""),
    ],
)
def test_a_step_asks_for_gpus_that_its_job_has_counted_together(
    home: Path, request_line: str, more: str
) -> None:
    """Slurm 22.05 would give it one of the four GPUs of the first node."""
    lines = f'request: ["--nodes={{nodes}}", "{request_line}"]'
    for layout, last in (("allocation", "--mpi=none"), ("mpi", "--ntasks-per-node=1")):
        write_site(home, "slurm", lines)
        text = render(made_plan(home, PROFILE.replace("allocation", layout)), "svd-1")[0].text
        assert f'{last}{more} sh "$GPUJOBS_FOLDER' in " ".join(text.replace("\\\n", " ").split())


def test_a_launcher_of_the_site_asks_by_itself(home: Path) -> None:
    own = "node_launcher: [srun, --nodes=2]\nrequest: ['--nodes={nodes}', '--gpus={gpus_per_job}']"
    write_site(home, "slurm", own)
    text = render(made_plan(home, PROFILE), "svd-1")[0].text
    assert 'srun --nodes=2 sh "$GPUJOBS_FOLDER' in " ".join(text.replace("\\\n", " ").split())
