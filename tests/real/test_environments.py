"""What a site says for its users, on a real Slurm: environments by name, defaults, other resources."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ..conftest import fresh_folder, make_cli, nothing_left, unavailable
from ..support import slurm as slurm_support
from ..support.backend import SlurmBackend
from ..support.cli import Cli, text_of
from ..support.on_slurm import backend  # noqa: F401

pytestmark = pytest.mark.slurm


def change_site(cli: Cli, **keys: object) -> None:
    """Write the site `here` with other keys."""
    cli.site |= keys
    (cli.home / "sites" / "here.yaml").write_text(text_of(cli.site))


def environments(cli: Cli) -> dict[str, dict[str, Any]]:
    return {
        "good": {"setup": "export OF_ENVIRONMENT=good", "python": cli.python, "gpu": 13, "description": "works"},
        "new": {"python": cli.python, "gpu": 14},
        "gone": {"python": "/nowhere/bin/python"},
    }  # fmt: skip


def printing(name: str) -> list[str]:
    return ["python", "-c", f"import os; print(os.environ.get({name!r}))"]


@pytest.mark.stub
def test_a_job_has_the_environment_that_its_profile_names(cli: Cli) -> None:
    change_site(cli, environments=environments(cli))
    cluster = cli.submit(
        {"gpus": 1, "environment": "good", "run": printing("OF_ENVIRONMENT")}, "--wait"
    )
    assert cli("logs", cluster).stdout == "good\n"
    own = {"good": {"setup": "export OF_ENVIRONMENT=short", "python": cli.python}}
    short = {**cli.site["queues"]["short"], "environments": own}
    change_site(cli, queues={**cli.site["queues"], "short": short})
    cluster = cli.submit(
        {"gpus": 1, "queue": "short", "environment": "good", "run": printing("OF_ENVIRONMENT")},
        "--wait",
    )
    assert cli("logs", cluster).stdout == "short\n"
    listed = cli("sites", "environments")
    assert listed.stdout.splitlines()[1].split() == ["good", "13", cli.python, "works"]


@pytest.mark.stub
def test_a_driver_that_is_too_old_is_the_reason_of_the_job(cli: Cli) -> None:
    change_site(cli, environments=environments(cli))
    path = cli.write("p.yaml", {"gpus": 1, "environment": "new", "run": ["true"]})
    done = cli("submit", str(path), "--wait")
    assert done.returncode != 0
    assert "the driver supports CUDA 13.0; the environment needs 14" in done.stderr
    change_site(
        cli,
        queue_defaults={},
        queues={k: {**q, "driver_cuda": "13.0"} for k, q in cli.site["queues"].items()},
    )
    planned = cli("plan", str(path))
    assert planned.returncode == 2
    assert "its driver supports CUDA 13.0; environment new needs 14" in planned.stderr


@pytest.mark.slow
def test_sites_check_runs_a_job_with_each_environment(cli: Cli, backend: SlurmBackend) -> None:
    found = environments(cli)
    change_site(
        cli, environments={"good": found["good"], "gone": found["gone"]}, environments_only=True
    )
    done = cli("sites", "check", "here", "--live", "--run", "--json", timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    checks: Mapping[str, Any] = {
        check["name"]: check for check in json.loads(done.stdout)["checks"]
    }
    assert checks["good: job"]["state"] == checks["good: GPUs"]["state"] == "ok"
    assert checks["gone: job"]["state"] == "failed"
    assert "job" not in checks
    one = cli("doctor", "--run", "--set", "environment=gone", "--json", timeout=300)
    assert "/nowhere/bin/python" in one.stdout and one.returncode == 1
    backend.wait_empty(15)


@pytest.mark.stub
def test_a_job_has_the_account_and_variables_of_its_user(cli: Cli) -> None:
    folder = cli.home / ".config" / "gpujobs"
    folder.mkdir(parents=True, mode=0o700)
    path = folder / "defaults.yaml"
    path.write_text(
        text_of({"account": "of-file", "environment": "good", "env": {"OF_USER": "mine"}})
    )
    for place in (path, folder, folder.parent):
        if cli.user:
            shutil.chown(place, cli.user)
    profile = {"gpus": 1, "run": ["bash", "-c", "echo $OF_USER $OF_ENVIRONMENT $SLURM_JOB_ACCOUNT"]}
    cluster = cli.submit(profile, "--wait")
    assert cli("logs", cluster).stdout.split()[0] == "mine"
    change_site(cli, environments=environments(cli))
    cli.env["GPUJOBS_ACCOUNT"] = "of-variable"
    shown = cli("plan", str(cli.work / "p.yaml"), "--verbose").stdout
    assert 'account: "of-variable"  # $GPUJOBS_ACCOUNT' in shown
    assert f'OF_USER: "mine"  # {path}:' in shown
    cluster = cli.submit(profile, "--wait")
    assert cli("logs", cluster).stdout.split()[:2] == ["mine", "good"]
    assert "#SBATCH --account=of-variable" in cli("render", str(cli.work / "p.yaml")).stdout
    if cli.user:
        shutil.chown(path, "daemon")
        refused = cli("submit", str(cli.work / "p.yaml"))
        assert (
            refused.returncode == 2
            and f"{path} is not used: {path} belongs to user daemon" in refused.stderr
        )


@pytest.mark.slow
@pytest.mark.stub
def test_run_of_an_allocation_starts_on_another_node_through_the_launcher(cli: Cli) -> None:
    words = [
        "srun",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--relative=1",
        "--gres=none",
    ]
    change_site(cli, run_launcher=words)
    code = "import os; print(os.environ['SLURMD_NODENAME'], os.environ['SLURM_STEP_NODELIST'])"
    profile = {"gpus": 8, "layout": "allocation", "run": ["python", "-c", code]}
    cluster = cli.submit(profile, "--wait")
    first = cli.status(cluster)["jobs"][0]["node"]
    output = cli("logs", cluster).stdout
    assert output.count("\n") == 1, output
    node, step = output.split()
    assert node == step != first
    assert "starts through srun with" in cli("plan", str(cli.work / "p.yaml")).stdout


@pytest.mark.stub
def test_cpu_workers_on_nodes_of_amd_see_one_list_of_gpus(cli: Cli) -> None:
    queues = {"main": {**cli.site["queues"]["main"], "gpu_vendor": "amd"}}
    setup = f"{cli.site['setup']}\nexport ROCR_VISIBLE_DEVICES=2,3 CUDA_VISIBLE_DEVICES=2,3\n"
    change_site(cli, queues=queues, setup=setup)
    run = ["bash", "-c", "echo $ROCR_VISIBLE_DEVICES ${CUDA_VISIBLE_DEVICES-unset}"]
    cluster = cli.submit({"gpus": 0, "workers": {"count": 1}, "run": run}, "--wait")
    assert cli("logs", cluster).stdout == "2,3 unset\n"
    refused = cli("submit", str(cli.write("p.yaml", {"gpus": 1, "run": run})))
    assert refused.returncode == 2
    assert (
        "its GPUs are of AMD: GPU workers need NVIDIA GPUs; CPU workers need none" in refused.stderr
    )


@pytest.fixture(scope="module")
def with_disks(shared_folder: Path) -> Iterator[SlurmBackend]:
    """A real Slurm of one node, with 100 units of a generic resource beside its GPUs."""
    if why := slurm_support.missing():
        unavailable("slurm", why)
    folder = fresh_folder(shared_folder, "disks")
    slurm = slurm_support.PrivateSlurm(folder / "slurm", nodes=1, counted={"lscratch": 100})
    with slurm.running() as running:
        yield SlurmBackend(running)


@pytest.mark.stub
def test_slurm_grants_the_other_resources_of_a_site(with_disks: SlurmBackend, home: Path) -> None:
    cli = make_cli(with_disks, home, "ordinary", stub=True)
    main = {**cli.site["queues"]["main"], "resources": {"lscratch": 100}}
    lines = [
        "--partition={queue}",
        "--nodes={nodes}",
        "--cpus-per-task={cpus_per_node}",
        "--nice={nice}",
    ]
    share = "--gres=gpu:{gpus_per_node},lscratch:{lscratch_per_node}"
    chosen = "--gres=gpu:{gpus_per_node},lscratch:{lscratch}"
    options: dict[str, Any] = {"nice": {"default": "5"}}
    show = ["bash", "-c", "scontrol show job $SLURM_JOB_ID --oneliner"]
    for line, more, wanted, number in (
        (share, {}, {}, "50"),
        (chosen, {"lscratch": {"default": "10"}}, {"options": {"lscratch": 7, "nice": 8}}, "7"),
    ):
        change_site(cli, queues={"main": main}, request=[*lines, line], options={**options, **more})
        cluster = cli.submit({"gpus": 2, "run": show, **wanted}, "--wait")
        job = cli("logs", cluster).stdout
        assert f"lscratch:{number}" in job and "gpu:2" in job, job
        assert f"Nice={8 if wanted else 5} " in job
    many = cli(
        "submit", str(cli.write("p.yaml", {"gpus": 2, "run": show, "options": {"lscratch": 101}}))
    )
    assert (
        many.returncode != 0
        and "lscratch:101" in many.stderr + cli("render", str(cli.work / "p.yaml")).stdout
    )
    evil = cli(
        "submit",
        str(cli.write("p.yaml", {"gpus": 2, "run": show, "options": {"lscratch": "1,gpu:4"}})),
    )
    assert evil.returncode == 2 and "does not match the site's pattern" in evil.stderr
    nothing_left(with_disks)
