"""Scripts as they are submitted, read and kept.

``GPUJOBS_UPDATE_GOLDEN=1 pytest tests/golden`` writes them again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gpujobs.planning.plan import Machine
from gpujobs.planning.render import JobRoles, render, render_jobs

from ..conftest import slow_variant
from ..support.each import each
from ..unit.support import MACHINE, plan
from .shellcheck import accept

CASES = Path(__file__).parent / "cases"
SVD: dict[str, object] = {
    "run": ["python", "svd.py", "--size", "10000"],
    "workdir": "/home/ada/svd",
}
PROFILES: dict[str, tuple[str, dict[str, object]]] = {
    "slurm-two-jobs-of-four": ("mahti", {
        **SVD, "gpus": 8, "account": "project_2001234", "network": {"protocol": "tcp"}, "env": {"OMP_NUM_THREADS": "4", "GREETING": "it's me"},
        "environment": {"setup": "module load python-data\nsource venv/bin/activate\n"},
        "workers": {"rmm_pool_size": 0.8, "enable_cudf_spill": True, "pre_import": ["cudf", "cupy"]}}),
    "slurm-one-mig-slice": ("mahti", {**SVD, "gpus": 1, "gpu_type": "a100_1g.5gb", "account": "project_2001234", "network": {"protocol": "tcp"}}),
    "slurm-eight-jobs-of-one": ("example-slurm", {**SVD, "gpus": 8, "gpus_per_job": 1, "account": "p12345", "network": {"encryption": True}}),
    "slurm-head-of-its-own": ("example-slurm", {
        **SVD, "gpus": 4, "account": "p12345", "head": {"cpus": 2, "memory": "8GiB"}, "start_workers": 4, "network": {"protocol": "tcp"}}),
    "slurm-nanny": ("example-slurm", {**SVD, "gpus": 4, "account": "p12345", "network": {"protocol": "tcp"}, "workers": {"worker_class": "nanny"}}),
    "slurm-workers-of-two-gpus": ("example-slurm", {
        **SVD, "gpus": 8, "account": "p12345", "network": {"protocol": "tcp", "dashboard": "off"}, "workers": {"gpus_per_worker": 2}}),
    "slurm-mpi-two-workers-on-a-gpu": ("mahti", {
        **SVD, "layout": "mpi", "gpus": 8, "account": "project_2001234", "workers": {"workers_per_gpu": 2, "worker_class": "nanny"}}),
    "slurm-cpu-workers": ("example-slurm", {
        **SVD, "gpus": 0, "account": "p12345", "workers": {"count": 4, "threads": 8, "memory": "64GiB", "resources": {"MEMORY": 64}}}),
    "slurm-groups": ("example-slurm", {
        **SVD, "account": "p12345", "network": {"protocol": "tcp"}, "env": {"OMP_NUM_THREADS": "4"}, "groups": {
            "gpu": {"gpus": 4, "gpus_per_job": 2, "start_workers": 2},
            "prep": {"gpus": 0, "account": "p67890", "walltime": "30m", "workers": {"count": 2, "threads": 8, "memory": "64GiB", "resources": {"MEMORY": 64}},
                     "environment": {"setup": "module load arrow\n"}, "env": {"ARROW": "1"}, "start_workers": 1}}}),
    "slurm-head-in-a-group": ("example-slurm", {
        **SVD, "account": "p12345", "network": {"protocol": "tcp"}, "head": {"group": "prep"}, "groups": {
            "gpu": {"gpus": 4}, "prep": {"gpus": 0, "workers": {"count": 2, "threads": 8, "memory": "64GiB"}}}}),
    "sge-groups": ("example-sge", {
        **SVD, "account": "astro1", "network": {"protocol": "tcp"}, "groups": {
            "gpu": {"gpus": 4}, "prep": {"gpus": 0, "workers": {"count": 2, "threads": 8, "memory": "32GiB"}}}}),
    "local-groups": ("local", {**SVD, "groups": {"one": {"gpus": 1}, "more": {"gpus": 1, "workers": {"threads": 2}}}}),
    "slurm-without-run-not-encrypted": ("example-slurm", {
        "workdir": "/home/ada", "gpus": 2, "account": "p12345", "network": {"protocol": "tcp", "encryption": False}}),
    "slurm-staged-environment": ("staged", {**SVD, "gpus": 4}),
    "sge-two-jobs-of-four": ("example-sge", {
        **SVD, "gpus": 8, "account": "astro1", "network": {"encryption": True}, "env": {"GREETING": "it's me"},
        "directives": ["-l exclusive"]}),
    "sge-one-job-counted-once": ("myriad", {**SVD, "gpus": 2, "gpu_type": "a100", "walltime": "90m"}),
    "sge-gpus-of-each-slot": ("sge-per-slot", {**SVD, "gpus": 16, "walltime": "3d"}),
    "sge-cpu-workers": ("example-sge", {
        **SVD, "gpus": 0, "account": "astro1", "workers": {"count": 4, "threads": 8, "memory": "32GiB"}, "network": {"protocol": "tcp"}}),
    "pbs-whole-nodes": ("derecho", {**SVD, "gpus": 8, "account": "ABCD0001", "walltime": "1h"}),
    "pbs-array-of-single-gpus": ("gadi", {**SVD, "gpus": 8, "gpus_per_job": 1, "account": "ab12", "walltime": "6h"}),
    "pbs-lone-job": ("example-pbs", {**SVD, "gpus": 1, "account": "p12345", "directives": ["-M ada@example.org"]}),
    "pbs-mpi": ("polaris", {**SVD, "gpus": 8, "account": "p1", "walltime": "1h", "layout": "mpi"}),
    "torque-array": ("example-torque", {**SVD, "gpus": 4, "gpus_per_job": 2, "queue": "batch"}),
    "torque-cpu-workers": ("example-torque", {**SVD, "gpus": 0, "workers": {"count": 2, "threads": 8, "memory": "16GiB"}}),
    "slurm-mpi-four-nodes": ("mahti", {**SVD, "layout": "mpi", "gpus": 16, "account": "project_2001234"}),
    "slurm-mpi-script-in-ranks": ("mahti", {
        "workdir": "/home/ada/svd", "run": ["svd.py", "--size", "10 000"], "run_on": "ranks", "layout": "mpi", "gpus": 8,
        "account": "project_2001234", "workers": {"worker_class": "nanny"}, "network": {"protocol": "tcp"}}),
    "slurm-owned-by-python": ("example-slurm", {"workdir": "/home/ada", "gpus": 8, "gpus_per_job": 2, "account": "p12345"}),
    "lsf-one-job-of-two": ("dtu", {**SVD, "gpus": 2, "queue": "gpua100", "walltime": "90m"}),
    "lsf-eight-jobs-of-one": ("example-lsf", {
        **SVD, "gpus": 8, "gpus_per_job": 1, "account": "acc_svd", "queue": "gpu", "network": {"protocol": "tcp"}, "walltime": "36h"}),
    "lsf-mpi": ("example-lsf", {**SVD, "layout": "mpi", "gpus": 8, "account": "acc_svd", "network": {"protocol": "tcp"}}),
    "lsf-head-of-its-own": ("example-lsf", {
        **SVD, "gpus": 4, "account": "acc_svd", "head": {"queue": "normal", "cpus": 2, "memory": "8GiB"}, "network": {"protocol": "tcp"}}),
    "lsf-cpu-workers": ("example-lsf", {
        **SVD, "gpus": 0, "account": "acc_svd", "workers": {"count": 4, "threads": 8, "memory": "64GiB", "resources": {"MEMORY": 64}}}),
    "slurm-apptainer": ("containers", {
        **SVD, "gpus": 4, "env": {"GREETING": "it's me"}, "network": {"protocol": "tcp"},
        "environment": {"setup": "module load apptainer", "container": {"image": "rapids", "args": ["--bind=$WORK/my data"]}}}),
    "slurm-apptainer-owned-by-python": ("containers", {
        "workdir": "/home/ada", "gpus": 2, "gpus_per_job": 1, "environment": {"container": {"image": "docker://rapidsai/base:26.10"}}}),
    "slurm-apptainer-requeue": ("containers", {
        **SVD, "gpus": 2, "gpus_per_job": 1, "network": {"protocol": "tcp"}, "requeue": 1, "environment": {"container": {"image": "rapids"}}}),
    "slurm-apptainer-in-one-group": ("containers", {
        **SVD, "network": {"protocol": "tcp"}, "groups": {
            "gpu": {"gpus": 2}, "prep": {"gpus": 0, "queue": "gpu", "workers": {"count": 2, "threads": 8, "memory": "64GiB"},
                                         "environment": {"container": {"image": "rapids"}}}}}),
    "slurm-pyxis-mpi": ("containers", {
        **SVD, "layout": "mpi", "gpus": 8, "env": {"OMP_NUM_THREADS": "4"}, "network": {"protocol": "tcp"},
        "environment": {"container": {"runtime": "pyxis", "image": "nvcr.io#nvidia/rapidsai/base:26.10"}}}),
    "slurm-podman": ("containers", {
        **SVD, "gpus": 4, "env": {"GREETING": "it's me"}, "network": {"protocol": "tcp"},
        "environment": {"container": {"runtime": "podman", "image": "docker://docker.io/rapidsai/base:26.10", "args": ["--shm-size=1g"]}}}),
    "slurm-podman-hpc-mpi": ("containers", {
        **SVD, "layout": "mpi", "gpus": 8, "network": {"protocol": "tcp"},
        "environment": {"container": {"runtime": "podman-hpc", "image": "docker://docker.io/rapidsai/base:26.10"}}}),
    "sge-charliecloud": ("example-sge", {
        **SVD, "gpus": 8, "account": "astro1", "env": {"GREETING": "it's me"}, "network": {"protocol": "tcp"},
        "environment": {"python": "/opt/conda/bin/python", "container": {"runtime": "charliecloud", "image": "~/rapids"}}}),
    "pbs-charliecloud-mpi-script-in-ranks": ("polaris", {
        "workdir": "/home/ada/svd", "run": ["svd.py"], "run_on": "ranks", "layout": "mpi", "gpus": 8, "account": "p1", "walltime": "1h",
        "network": {"protocol": "tcp"}, "environment": {"container": {"runtime": "charliecloud", "image": "/sw/rapids"}}}),
    "slurm-requeue": ("example-slurm", {
        **SVD, "gpus": 2, "gpus_per_job": 1, "account": "p12345", "network": {"protocol": "tcp"}, "requeue": 1, "walltime_exit": 85}),
    "sge-requeue": ("example-sge", {**SVD, "gpus": 1, "account": "astro1", "network": {"protocol": "tcp"}, "requeue": 1}),
    "lsf-requeue": ("example-lsf", {**SVD, "gpus": 1, "account": "acc_svd", "queue": "gpu", "network": {"protocol": "tcp"}, "walltime": "36h", "requeue": 1}),
    "pbs-requeue": ("example-pbs", {**SVD, "gpus": 1, "account": "p12345", "requeue": 1}),
    "local-cpu": ("local", {**SVD, "gpus": "auto"}),
    "local-two-gpus": ("local", {**SVD, "gpus": 2, "gpus_per_job": 1}),
}  # fmt: skip
SHELLCHECKED = (
    "slurm-groups", "slurm-apptainer-requeue", "slurm-mpi-script-in-ranks", "slurm-staged-environment",
    "sge-two-jobs-of-four", "pbs-array-of-single-gpus", "lsf-head-of-its-own", "local-two-gpus",
)  # fmt: skip
"""Of each batch scheduler and each part of a script one, for `make test`."""
OWNED = ("slurm-owned-by-python", "slurm-apptainer-owned-by-python")
"""Scripts of worker jobs whose dask scheduler is in a Python process."""
TWO_GPUS = Machine(
    gpus=("0", "3"), cpus=16, memory=64 * 2**30, busy={"1": "process 1", "2": "process 1"}
)
MACHINES = {"local-two-gpus": TWO_GPUS, "local-groups": TWO_GPUS}


def text_of(case: str, folder: Path) -> str:
    site, profile = PROFILES[case]
    made = plan(folder, profile, site, MACHINES.get(case, MACHINE))
    scripts = render(made, "svd-0000")
    if case in OWNED:
        roles = JobRoles(scheduler=False, workers=True, run=False, replaces="owner")
        scripts = render_jobs(made, "svd-0000", made.groups[0], roles, 0, made.groups[0].shape.jobs)
    return "".join(script.text for script in scripts)


@pytest.fixture(autouse=True)
def home_of_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("GPUJOBS_SITE_PATH", raising=False)


@each("case", PROFILES)
def test_script_is_unchanged(case: str, tmp_path: Path) -> None:
    text, kept = text_of(case, tmp_path), CASES / f"{case}.sh"
    if os.environ.get("GPUJOBS_UPDATE_GOLDEN"):
        kept.write_text(text)
    assert text == kept.read_text()


def test_every_script_has_a_profile() -> None:
    assert {path.stem for path in CASES.glob("*.sh")} == set(PROFILES)


@pytest.mark.parametrize(
    "cases", [pytest.param(SHELLCHECKED, id="few"), slow_variant(tuple(PROFILES), id="all")]
)
def test_bash_and_shellcheck_accept_the_scripts(cases: tuple[str, ...], tmp_path: Path) -> None:
    found = []
    for path in (CASES / f"{case}.sh" for case in cases):
        for number, text in enumerate(re.split(r"^(?=#!)", path.read_text(), flags=re.M)[1:]):
            found.append(tmp_path / f"{path.stem}-{number}.sh")
            found[-1].write_text(text)
    accept(found)


@each("path", sorted(CASES.glob("*.sh")), ids=lambda path: path.stem)
def test_lines_are_short_and_blank_lines_stand_alone(path: Path) -> None:
    text = path.read_text()
    assert max(len(line) for line in text.splitlines()) <= 140
    assert "\n\n\n" not in text


def test_the_id_occurs_once(tmp_path: Path) -> None:
    assert text_of("slurm-two-jobs-of-four", tmp_path).count("svd-0000") == 1
