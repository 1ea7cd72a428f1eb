"""The files of the project agree with `pyproject.toml`, and with the code."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import click
import pytest
import yaml

from gpujobs.cli.main import main

from ..support.cli import ROOT
from ..support.each import each
from .test_docs_blocks import PYPROJECT

PROJECT = PYPROJECT["project"]
PLACEHOLDER = "https://example.org/gpujobs"
"""In place of the public address of the repository; see CONTRIBUTING.md."""
README = (ROOT / "README.md").read_text()
GITHUB = ROOT / ".github"

NAMES = {"dask_jobqueue": "dask-jobqueue", "ruamel": "ruamel.yaml", "yaml": "pyyaml"}
"""Distributions by the module that they bring, if it has another name."""
IN_JOBS = {
    "bokeh", "cuda", "cupy", "cupyx", "dask_cuda", "dask_mpi", "distributed_ucxx", "IPython",
    "ipywidgets", "mpi4py", "numpy", "pynvml", "rmm", "torch", "ucxx",
}  # fmt: skip
"""Modules that are imported only if they are there, or by who asked for them."""


def imported() -> set[str]:
    """Return the first names of all modules that the package imports, without its own."""
    found = set()
    for path in (ROOT / "gpujobs").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"gpujobs"}


def test_every_package_that_is_imported_is_declared() -> None:
    declared = {re.match(r"[\w.-]+", one)[0] for one in PROJECT["dependencies"]}  # type: ignore[index]
    needed = {NAMES.get(name, name) for name in imported() - IN_JOBS}
    assert sorted(needed - declared) == []


def test_dask_and_its_packages_have_no_bounds() -> None:
    """dask-cuda pins dask exactly, and pip gives up at a second opinion."""
    assert {"cloudpickle", "dask", "distributed", "pyyaml", "tornado"} <= {*PROJECT["dependencies"]}


def test_the_placeholder_of_the_address_is_listed() -> None:
    pages = [*ROOT.glob("*.*"), *GITHUB.rglob("*.yml"), *(ROOT / "docs").glob("*.md")]
    with_it = {path.name for path in pages if path.is_file() and PLACEHOLDER in path.read_text()}
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("## Addresses\n")[2].partition("\n## ")[0]
    assert with_it - {"CONTRIBUTING.md"} == set(
        re.findall(r"`(\w+\.(?:md|cff|toml|yml))`", section)
    ) - {"tests.yml"}


def test_the_addresses_of_the_project_are_pages_of_the_repository() -> None:
    for address in PROJECT["urls"].values():
        assert address.startswith(PLACEHOLDER)
        page = address.removeprefix(PLACEHOLDER).removeprefix("/blob/main/")
        assert page in ("", "/issues") or (ROOT / page).is_file()


def test_who_wrote_it_is_said_once() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["authors"] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]
    assert citation["keywords"] == PROJECT["keywords"]
    assert citation["repository-code"] == PROJECT["urls"]["Source"]
    assert PROJECT["authors"][0]["name"].lower() in (ROOT / "LICENSE").read_text().lower()


def commands_of(name: str) -> list[str]:
    """Return what a workflow runs on a machine with all programs; its actions cannot change."""
    workflow = yaml.safe_load((GITHUB / "workflows" / f"{name}.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["env"]["GPUJOBS_REQUIRE"] == "slurm,sge"
    for step in job["steps"]:  # a tag can be moved
        assert re.fullmatch(r"[\w./-]+@[\da-f]{40}", step.get("uses", f"x@{'0' * 40}"))
    return [step["run"] for step in job["steps"] if "run" in step][1:]


def test_the_workflow_runs_the_two_commands_on_real_batch_schedulers() -> None:
    assert commands_of("tests") == ["make demo", "make test", "make lint"]


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="the sdist does not have it")
def test_each_target_of_the_makefile_with_tests_is_run_by_continuous_integration() -> None:
    rules = re.findall(r"^(\w+):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    targets = {f"make {name}" for name, recipe in rules if "-m pytest" in recipe}
    assert len(targets) == 4
    ours = set(re.findall(r"^(?:make \w+)", (ROOT / ".ci" / "run").read_text(), re.M))
    assert targets <= ours | set(commands_of("weekly"))


@each("form", sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem)
def test_a_form_asks_for_commands_that_exist(form: Path) -> None:
    fields = yaml.safe_load(form.read_text())["body"]
    ids = [field["id"] for field in fields if field["type"] != "markdown"]
    assert len(set(ids)) == len(ids) >= 3
    commands = re.findall(r"`gpujobs ([a-z][^`]*)`", form.read_text())
    assert form.stem != "fault" or "doctor --site NAME --json" in commands
    for words in commands:
        names = words.split()
        group = main.commands[names[0]]
        found = group.commands[names[1]] if isinstance(group, click.Group) else group
        options = {word for item in found.params for word in item.opts}
        assert {word for word in names if word.startswith("-")} <= options


@pytest.mark.skipif(not (ROOT / ".readthedocs.yaml").exists(), reason="an sdist of another tool")
def test_read_the_docs_builds_what_make_docs_builds() -> None:
    config = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    (command,) = config["build"]["jobs"]["build"]["html"]
    makefile = (ROOT / "Makefile").read_text()
    options = re.search(r"/sphinx-build (.*) \. build/docs$", makefile, re.M)
    assert options and f"sphinx {options[1]} . $READTHEDOCS_OUTPUT/html" in command
    assert config["python"]["install"][0]["extra_requirements"] == ["docs"]


def test_the_readme_is_read_in_a_few_minutes_and_leads_to_every_page() -> None:
    assert len(README.split()) < 700
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages - set(re.findall(r"\]\((docs/[\w-]+\.md)", README)) == set()


def test_the_readme_knows_how_many_sites_there_are() -> None:
    files = [path.stem for path in (ROOT / "site_configs").glob("*.yaml")]
    machines = [name for name in files if name != "local" and not name.startswith("example-")]
    assert f"[{len(machines)} machines](docs/included-sites.md)" in README
