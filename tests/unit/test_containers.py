"""Containers in a plan: runtime and image, from the profile and the site; what is refused, and where."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gpujobs.cli.plan_text import plan_json, plan_text
from gpujobs.clusters.plannotes import image_notes
from gpujobs.clusters.prepare import make_cluster_plan
from gpujobs.deploy.keywords import spec_of
from gpujobs.errors import InputError

from ..support.each import each
from .support import SLURM, error_of, made_plan, make_spec

IMAGES = "images: {rapids: /sw/rapids-26.10.sif, pytorch: 'docker://pytorch/pytorch:2.4'}"
SITE = f"{SLURM}containers: {{runtime: apptainer, {IMAGES}, binds: ['/data:/mnt', $WORK], args: [--no-home]}}\n"


def profile(home: Path, **container: object) -> dict[str, object]:
    return {"gpus": 1, "workdir": str(home), "environment": {"container": container}}


@pytest.fixture
def site(home: Path) -> Path:
    path = home / "c.yaml"
    path.write_text(SITE)
    return path


@pytest.mark.parametrize(
    ("image", "found"),
    [
        ("rapids", "/sw/rapids-26.10.sif"),
        ("pytorch", "docker://pytorch/pytorch:2.4"),
        ("/own/x.sif", "/own/x.sif"),
        ("~/x.sif", "~/x.sif"),
        ("x.sif", "WORKDIR/x.sif"),
        ("images/x", "WORKDIR/images/x"),
        ("oras://ghcr.io/x/y", "oras://ghcr.io/x/y"),
    ],
)
def test_an_image_is_a_name_of_the_site_a_path_or_an_address(
    home: Path, site: Path, image: str, found: str
) -> None:
    plan = made_plan(home, profile(home, image=image), "c.yaml")
    assert plan.groups[0].container and plan.groups[0].container.runtime.name == "apptainer"
    assert plan.groups[0].container.image == found.replace("WORKDIR", str(home))
    assert plan.groups[0].python == "python3"
    assert [note for note in plan.notes if "the cluster ends" not in note] == []


def test_the_plan_shows_the_container(home: Path, site: Path) -> None:
    plan = made_plan(home, profile(home, image="rapids", runtime="charliecloud"), "c.yaml")
    assert "container       /sw/rapids-26.10.sif (charliecloud)\n" in plan_text(plan, "svd-0000")
    found = {"runtime": "charliecloud", "image": "/sw/rapids-26.10.sif"}
    assert plan_json(plan, "svd-0000")["container"] == found
    without = made_plan(home, {"gpus": 1}, "c.yaml")
    assert plan_json(without, "svd-0000")["container"] is None
    assert "container" not in plan_text(without, "svd-0000")


GROUPS = """\
groups:
  gpu: {gpus: 1, environment: {python: /opt/env/bin/python}}
  prep: {gpus: 0, queue: gpu, workers: {count: 2}, environment: {container: {image: rapids}}}
"""
RAPIDS = {"runtime": "apptainer", "image": "/sw/rapids-26.10.sif"}


def test_the_plan_shows_the_container_of_each_group(home: Path, site: Path) -> None:
    plan = made_plan(home, GROUPS, "c.yaml")
    rows = [line.split(maxsplit=2) for line in plan_text(plan, "svd-0000").splitlines()]
    software = [row for row in rows if row[1] in ("container", "python")]
    assert software == [
        ["gpu:", "container", "none"],
        ["prep:", "container", "/sw/rapids-26.10.sif (apptainer)"],
        ["gpu:", "python", "/opt/env/bin/python"],
        ["prep:", "python", "python3"],
    ]
    found: Any = plan_json(plan, "svd-0000")
    containers = {"gpu": None, "prep": RAPIDS}
    assert {group["name"]: group["container"] for group in found["groups"]} == containers
    assert {jobs["group"]: jobs["container"] for jobs in found["jobs"]} == containers
    assert [jobs["python"] for jobs in found["jobs"]] == ["/opt/env/bin/python", "python3"]


def test_the_plan_shows_the_container_of_the_head(home: Path, site: Path) -> None:
    """The profile's own environment is that of its jobs, and the default of the groups."""
    base = "head: {queue: gpu}\nenvironment: {container: {image: pytorch}}\n"
    plan = made_plan(home, base + GROUPS, "c.yaml")
    text = plan_text(plan, "svd-0000")
    assert re.search(r"^head: container +docker://pytorch/\S+ \(apptainer\)$", text, re.M)
    found: Any = plan_json(plan, "svd-0000")
    assert [jobs["group"] for jobs in found["jobs"]] == ["head", "gpu", "prep"]
    images = [jobs["container"]["image"] for jobs in found["jobs"]]
    pytorch = "docker://pytorch/pytorch:2.4"
    assert images == [pytorch, pytorch, "/sw/rapids-26.10.sif"]


def test_groups_with_the_same_container_have_one_row(home: Path, site: Path) -> None:
    groups = "groups: {one: {gpus: 1}, two: {gpus: 2}}\n"
    plan = made_plan(home, f"environment: {{container: {{image: rapids}}}}\n{groups}", "c.yaml")
    text = plan_text(plan, "svd-0000")
    assert re.search(r"^container +/sw/rapids-26.10.sif \(apptainer\)$", text, re.M)


def test_arguments_of_the_site_are_those_of_its_runtime(home: Path, site: Path) -> None:
    for runtime, args in (("apptainer", ("--no-home", "--x")), ("charliecloud", ("--x",))):
        wanted = profile(home, image="rapids", runtime=runtime, args="--x")
        plan = made_plan(home, wanted, "c.yaml")
        assert plan.groups[0].container and plan.groups[0].container.args == args


def test_the_profile_chooses_the_python_of_the_image(home: Path, site: Path) -> None:
    own = {"container": {"image": "rapids"}, "python": "/opt/conda/bin/python"}
    plan = made_plan(
        home, {"gpus": 1, "environment": {**own, "setup": "module load cuda"}}, "c.yaml"
    )
    assert plan.groups[0].python == "/opt/conda/bin/python"


@pytest.mark.parametrize(
    ("image", "note"),
    [
        ("org/name:1", "org/name:1 on this host; the nodes need it, or is it docker://org/name:1?"),
        ("/sw/x.sif", "no image /sw/x.sif on this host; the nodes need it"),
    ],
)
def test_a_bare_image_may_be_an_address(home: Path, site: Path, image: str, note: str) -> None:
    plan = made_plan(home, {"gpus": 1, "environment": {"container": {"image": image}}}, "c.yaml")
    (found,) = image_notes(plan)
    assert found.endswith(note)


@each(
    ("container", "environment", "site", "message"),
    [
        ({"image": "rapid"}, {}, SITE, "no image rapid: its images are pytorch, rapids"),
        ({"image": "rapid"}, {}, SITE, "did you mean rapids?"),
        ({"image": "ubuntu:24.04"}, {}, SITE, "docker://ubuntu:24.04"),
        ({"image": "rapids"}, {}, SLURM, "it names no images"),
        ({"image": "/x.sif"}, {}, SLURM, "`environment.container.runtime` is needed"),
        ({"runtime": "apptainer"}, {}, SITE, "`environment.container.image` is required"),
        ({"runtime": "docker", "image": "x.sif"}, {}, SITE, "is not one of apptainer"),
        ({"runtime": "charliecloud", "image": "docker://x"}, {}, SITE, "not the address docker://x"),
        ({"image": "rapids"}, {"setup": "conda activate x"}, SITE, "no effect on the container's"),
        ({"image": "rapids"}, {"setup": ". venv/bin/activate"}, SITE, "`setup` has no effect"),
        (
            {"runtime": "pyxis", "image": "x.sqsh"},
            {},
            SITE.replace("slurm", "lsf").replace('"--account={account}"', '"-P {account}"'),
            "pyxis is a part of Slurm",
        ),
    ],
)  # fmt: skip
def test_a_wrong_container_is_refused(
    home: Path, container: dict[str, str], environment: dict[str, str], site: str, message: str
) -> None:
    (home / "c.yaml").write_text(site)
    found = {**profile(home), "environment": {**environment, "container": container}}
    error = error_of(home, found, "c.yaml")
    assert message in error
    assert "svd.yaml:" in error


def test_pyxis_needs_srun(home: Path) -> None:
    (home / "c.yaml").write_text(f"{SLURM}mpi: {{command: [mpirun, -n, '{{ranks}}']}}\n")
    wanted = {**profile(home, runtime="pyxis", image="/x.sqsh"), "layout": "mpi", "gpus": 4}
    assert "pyxis needs srun; the site starts nodes by mpirun" in error_of(home, wanted, "c.yaml")


def test_a_folder_that_cannot_be_mounted_is_refused(home: Path, site: Path) -> None:
    wanted = {**profile(home, image="rapids"), "workdir": "/work/a:b c"}
    assert "which apptainer cannot mount: it has ':'" in error_of(home, wanted, "c.yaml")
    wanted = {**profile(home, image="/x.sqsh", runtime="pyxis"), "workdir": "/work/a:b c"}
    assert "which pyxis cannot mount: it has ' ' and ':'" in error_of(home, wanted, "c.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("binds: [data]", "must be an absolute path"),
        ("binds: ['/a,/b']", "must be an absolute path"),
        ("binds: ['/a:/b:ro']", "must be an absolute path"),
        ("images: {x: y.sif}", "must be an absolute path, or an address"),
        ("runtime: docker", "is not one of"),
        ("args: [--no-home]", "needs `runtime` with `args`"),
        ("image: {x: /y.sif}", "unknown key `containers.image`"),
    ],
)
def test_mistakes_of_a_site_in_its_containers_are_refused(
    home: Path, text: str, message: str
) -> None:
    (home / "c.yaml").write_text(f"{SLURM}containers: {{{text}}}\n")
    assert message in error_of(home, {"gpus": 1}, "c.yaml")


def test_an_image_that_is_not_on_this_host_is_noted(home: Path, site: Path) -> None:
    def notes(image: str) -> list[str]:
        spec = make_spec(home, profile(home, image=image), str(site))
        return [note for note in make_cluster_plan(spec).notes if "container" in note]

    (home / "x.sif").touch()
    assert notes("y.sif") == [
        f"container: there is no image {home}/y.sif on this host; the nodes need it"
    ]
    assert notes("x.sif") == notes("docker://x") == notes("$SCRATCH/x.sif") == []


def test_an_image_that_this_host_cannot_look_up_may_be_there(home: Path, site: Path) -> None:
    """As behind a folder that this user cannot enter, or with a name that is too long here."""
    spec = make_spec(home, profile(home, image=f"{home}/{'x' * 300}.sif"), str(site))
    assert not [note for note in make_cluster_plan(spec).notes if "container" in note]


def test_the_python_classes_have_a_keyword_for_the_container(site: Path) -> None:
    spec = spec_of({"container": {"image": "rapids", "args": ["--x"]}}, str(site), 1)
    assert spec.profile.environment.container
    assert spec.profile.environment.container.args == ("--x",)
    with pytest.raises(InputError, match="keyword container"):
        spec_of({"container": {"imag": "rapids"}}, str(site), 1)
