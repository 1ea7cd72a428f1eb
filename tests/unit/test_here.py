"""The job that a process is in, from the recorded environments of real batch schedulers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpujobs.clusters import here
from gpujobs.clusters.prepare import make_cluster_plan
from gpujobs.config.document import Document
from gpujobs.deploy import GPUJobQueueCluster
from gpujobs.errors import InputError

from ..support.transcripts import recorded

JOBS = {
    "slurm": ("environment.txt", "step of salloc on the first node"),
    "pbs": ("06-environment.txt", "parallel job"),
    "torque": ("06-environment.txt", "parallel job"),
    "lsf": ("environment.txt", "parallel job"),
    "sge": ("environment.txt", "parallel job"),
}


def environment(name: str, folder: Path, title: str = "") -> dict[str, str]:
    """Return the variables of a job of two nodes; its list of nodes is in ``folder``."""
    file, usual = JOBS[name]
    text = recorded(name, file, title or usual).stdout
    variables, *lists = re.split(r"^== .*\n", text, flags=re.M)
    environ = dict(re.findall(r"^(\w+)=(.*)$", variables, re.M))
    for variable in {"PBS_NODEFILE", "PE_HOSTFILE"} & environ.keys():
        (folder / "nodes").write_text(re.sub(r"^/.*\n", "", lists[0], flags=re.M))
        environ[variable] = str(folder / "nodes")
    return environ


@pytest.fixture
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Put this process into a job of the batch scheduler that the parameter names."""
    name: str = request.param
    for variable in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment(name, tmp_path).items():
        if variable not in ("HOME", "PATH", "SHELL", "USER", "PWD", "TMPDIR"):
            monkeypatch.setenv(variable, value)
    monkeypatch.setenv("GPUJOBS_SITE_PATH", str(tmp_path))
    monkeypatch.delenv("GPUJOBS_SITE", raising=False)
    return name


@pytest.mark.parametrize(
    ("name", "job_id", "queue"),
    [
        ("slurm", "2", "main"),
        ("pbs", "124.node1", "gpuq"),
        ("torque", "37.node1", "batch"),
        ("lsf", "122", "normal"),
        ("sge", "65", "all.q"),
    ],
)
def test_the_job_is_found(name: str, job_id: str, queue: str, tmp_path: Path) -> None:
    found = here.find_job(environment(name, tmp_path))
    assert (found.scheduler.name, found.id, found.queue) == (name, job_id, queue)
    assert found.nodes == 2 and found.granted.on_node


def test_a_shell_of_salloc_on_the_login_node_is_on_no_node(tmp_path: Path) -> None:
    title = "shell of salloc on the login node"
    found = here.find_job(environment("slurm", tmp_path, title))
    assert found.nodes == 2 and not found.granted.on_node


def test_a_job_without_a_list_of_nodes_has_one(tmp_path: Path) -> None:
    environ = environment("sge", tmp_path)
    del environ["PE_HOSTFILE"]
    assert here.find_job(environ).nodes == 1


@pytest.mark.parametrize(
    ("gpus", "per_node"), [("a100:8", 4), ("a100:2,h100:6", 3), ("many", 0), ("-", 0), ("", 0)]
)
def test_the_gpus_of_a_job_of_slurm_are_divided_by_its_nodes(
    gpus: str, per_node: int, tmp_path: Path
) -> None:
    environ = {**environment("slurm", tmp_path), "SLURM_GPUS": gpus}
    environ.pop("SLURM_GPUS_PER_NODE", None)
    assert here.find_job(environ).granted.gpus_per_node == per_node


@pytest.mark.parametrize("tres", ["gres/gpu=1", "cpu=2,gres/gpu:a100=1", "gres/gpu:1,cpu=2"])
def test_the_gpus_of_tasks_count_for_their_nodes(tres: str, tmp_path: Path) -> None:
    """Slurm keeps --gpus-per-task so from 23.11 on; before, in SLURM_GPUS_PER_TASK."""
    of_job = {**environment("slurm", tmp_path), "SLURM_NTASKS": "8"}
    for name in [name for name in of_job if name.startswith("SLURM_GPUS")]:
        del of_job[name]
    assert here.find_job({**of_job, "SLURM_TRES_PER_TASK": tres}).granted.gpus_per_node == 4
    assert here.find_job({**of_job, "SLURM_TRES_PER_TASK": "cpu=2"}).granted.gpus_per_node == 0
    assert here.find_job({**of_job, "SLURM_GPUS_PER_TASK": "a100:1"}).granted.gpus_per_node == 4


@pytest.mark.parametrize("environ", [{}, {"JOB_ID": "a build server's"}, {"SLURM_CONF": "/x"}])
def test_outside_of_a_job_the_error_names_submit(environ: dict[str, str]) -> None:
    with pytest.raises(InputError, match="in no job of a batch scheduler") as caught:
        here.find_job(environ)
    assert "gpujobs submit" in str(caught.value)


@pytest.mark.parametrize("job", JOBS, indirect=True)
def test_the_launcher_of_the_batch_scheduler_starts_one_allocation_on_all_nodes(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    document = Document({"gpus": 6, "walltime": "1h", "run": ["true"]})
    spec, devices, note = here.cluster_here(document)
    plan = make_cluster_plan(spec, devices=devices)
    (group,) = plan.groups
    assert (group.shape.nodes, group.shape.gpus, plan.devices) == (2, 6, ("0", "1", "2"))
    assert plan.scheduler.name == "local" and group.walltime is None
    assert note.endswith("2 nodes with 3 GPUs; not used: `walltime` of the profile")
    launcher = here.find_job().scheduler.node_launcher[0]
    assert f"2 nodes started by {launcher}" in plan.layout.head_text(group.shape, own_head=False)
    memory = group.shape.memory
    assert (memory == 2 * 16 * 2**30) is (job == "slurm")


SITE = """
description: a site
scheduler: sge
visible_devices: {variable: OWN_GPUS}
node_launcher: [ssh, "{node}"]
network: {interface: ib0, protocols: [ucxx, tcp]}
setup: "true  # of the site"
account: {required: true}
queues:
  gpu: {name: all.q, gpus_per_node: 8, network: {interface: ib1}, max_walltime: 1h}
defaults: {walltime: 30m, env: {FROM: site}}
"""


@pytest.mark.parametrize("job", ["sge"], indirect=True)
def test_the_site_of_this_host_gives_its_software_and_no_limits(
    job: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its software, its network and its launcher count, its limits and its accounts do not."""
    (tmp_path / "mine.yaml").write_text(SITE)
    monkeypatch.setenv("OWN_GPUS", "cuda2,cuda3")
    spec, devices, _ = here.cluster_here(Document({"run": ["true"]}), site="mine")
    plan = make_cluster_plan(spec, devices=devices)
    (group,) = plan.groups
    assert (plan.gpus, plan.devices) == (4, ("2", "3"))
    assert group.visible_devices == "variable:OWN_GPUS" and group.profile.env == {"FROM": "site"}
    assert "of the site" in plan.site.setup and plan.site.node_launcher == ("ssh", "{node}")
    assert plan.transport.interface == "ib1" and plan.transport.protocols[0] == "ucxx"


@pytest.mark.parametrize("job", ["slurm"], indirect=True)
@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({"groups": {"a": {"gpus": 1}}}, "which has no `groups`"),
        ({"gpus": 0}, "2 nodes, and no GPU"),
        ({"workers": {"gpus_per_worker": 5}}, "not a multiple"),
    ],
)
def test_a_profile_that_cannot_run_here_is_refused(
    job: str, profile: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        spec, devices, _ = here.cluster_here(Document({**profile, "run": ["true"]}))
        make_cluster_plan(spec, devices=devices)


@pytest.mark.parametrize("job", ["slurm"], indirect=True)
def test_the_walltime_is_what_is_left_of_the_job(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here.time, "time", lambda: 1000.0)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "4600")
    spec, _, _ = here.cluster_here(Document({"run": ["true"]}))
    assert spec.profile.walltime == 3600
    assert spec.python == sys.executable


@pytest.mark.parametrize("job", ["slurm"], indirect=True)
def test_steps_of_a_job_do_not_get_its_request(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in the hint is for a shell, which has the variables."""
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "4")
    monkeypatch.setenv("SLURM_GPUS", "8")
    found = here.find_job()
    hint = [*here.unset_words(found), *here.enter_words(found)]
    names = ("SLURM_CPUS_PER_TASK", "SLURM_GPUS", "SLURM_GPUS_PER_NODE")
    words = [word for name in names for word in ("-u", name)]
    assert hint[: len(words) + 2] == ["env", *words, "srun"]
    assert hint[-1] == "--gres=gpu:4"
    assert here.unset_words(found, {}) == []


@pytest.mark.parametrize("job", ["slurm"], indirect=True)
def test_a_step_has_the_variables_that_its_launcher_did_not_get(
    job: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Programs read SLURM_CPUS_PER_TASK; `srun` would give the step no more CPUs."""
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "a100:4")
    launcher = tmp_path / "srun"
    launcher.write_text('#!/bin/sh\necho "${SLURM_GPUS_PER_NODE-none}"\nexec "$@"\n')
    launcher.chmod(0o755)
    code = "from gpujobs.batch.process import become; become(['./srun'], ['/usr/bin/env'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    first, *lines = done.stdout.splitlines()
    assert first == "none"
    assert {"SLURM_GPUS_PER_NODE=a100:4", "SLURM_CPUS_PER_TASK=8", "SLURM_JOB_ID=2"} <= {*lines}


@pytest.mark.parametrize("job", ["slurm"], indirect=True)
def test_notes_about_keywords_are_shown_in_a_job_as_elsewhere(
    home: Path, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost")
    words = {"shebang": "#!/bin/zsh", "worker_extra_args": ["--lifetime", "1h"]}
    with GPUJobQueueCluster.here(gpus_per_job=0, network={"dashboard": "off"}, **words):
        said = capsys.readouterr().out
    assert "shebang: not used" in said and "job 2 of slurm" in said
