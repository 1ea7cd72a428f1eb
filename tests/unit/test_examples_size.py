"""The examples stay small and complete: each folder has a page, each script at most 60 lines, and what it needs is listed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from ruamel.yaml import YAML

from ..support.cli import ROOT
from ..support.each import each

EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir())
TABLE = (EXAMPLES / "README.md").read_text()
ROW = re.compile(
    r"^\| \[.*\]\((?P<name>[\w.]+)\) \| .* \| (?P<needs>.*) \| (?P<tests>.+) \|$", re.M
)
ROWS = {row["name"]: row for row in ROW.finditer(TABLE)}
"""The rows of the list, by the folder or the script that they link to last."""

EVERYWHERE = {"dask", "distributed", "gpujobs", "cloudpickle", "psutil"}
"""gpujobs, and what distributed needs."""
BY_OTHER_NAMES = {
    "torch": "tools/install adds it",
    "xgboost": "xgboost-cpu",
    "jupyterlab": "dask-labextension",
}
"""Libraries of the tests that are not in pyproject.toml by their names, and why they are installed."""


def imported(path: Path) -> set[str]:
    """Return the libraries that a script imports anywhere, by the names of their packages."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    roots = {name.partition(".")[0] for name in found}
    roots -= {other.stem for other in path.parent.glob("*.py")}
    return {name.replace("_", "-") for name in roots - sys.stdlib_module_names - EVERYWHERE}


def installed() -> set[str]:
    """Return the libraries of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [line for extra in ("demo", "mpi", "test", "test-examples") for line in extras[extra]]
    return {re.split(r"[^\w-]", line)[0] for line in lines} | set(BY_OTHER_NAMES)


def needs(name: str) -> tuple[set[str], set[str]]:
    """Return the packages that an example needs, and those that it needs on GPUs only."""
    everywhere, _, on_gpus = ROWS[name]["needs"].partition("; on GPUs: ")
    return set(re.findall("`(.+?)`", everywhere)), set(re.findall("`(.+?)`", on_gpus))


@each("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_a_program_has_at_most_60_lines(path: Path) -> None:
    text = path.read_text()
    is_program = "\ndef main(" in text or "__main__" in text
    assert len(text.splitlines()) <= (60 if is_program else 200)


@each("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_is_complete_and_in_the_list(folder: Path) -> None:
    assert (folder / "README.md").exists()
    assert (folder / "profile.yaml").exists() or (folder / "form.yml").exists()
    assert folder.name in ROWS


@each("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_the_list_has_what_a_script_imports(path: Path) -> None:
    row = path.name if path.parent == EXAMPLES else path.parent.name
    assert imported(path) <= set.union(*needs(row))


@each("name", ROWS)
def test_the_tests_have_what_an_example_needs_without_gpus(name: str) -> None:
    everywhere, on_gpus = needs(name)
    assert everywhere <= installed()
    assert not on_gpus & installed()


@each("name", ROWS)
def test_an_example_is_run_by_a_test(name: str) -> None:
    texts = [path.read_text() for path in (ROOT / "tests" / "real").glob("*.py")]
    assert any(re.search(rf'examples/{name}|"{name}"', text) for text in texts)


@each("path", sorted(EXAMPLES.glob("*/profile.yaml")), ids=lambda p: p.parent.name)
def test_a_profile_runs_in_its_own_folder(path: Path) -> None:
    profile = YAML(typ="safe").load(path)
    assert profile["name"]
    for word in profile.get("run", []):
        assert not word.endswith(".py") or (path.parent / word).exists()
    assert "gpujobs submit profile.yaml" in (path.parent / "README.md").read_text()


def test_results_of_the_examples_are_ignored_by_git() -> None:
    results = ["inference/in/1.npy", "inference/out/1.npy", "checkpoints/checkpoint.json"]
    results += ["search/study.log", "tables/tables/raw/x", "workflows/mean.json"]
    results += ["polars/sales/0.parquet"]
    names = [f"examples/{name}" for name in results]
    done = subprocess.run(
        ["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == names
