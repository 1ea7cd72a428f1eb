"""The flow goes one way, and commands that need no dask do not import it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpujobs

PACKAGE = Path(gpujobs.__file__).parent
HEAVY = ("pydantic", "dask", "distributed", "dask_jobqueue", "tornado", "numpy", "cryptography")

# From the ground up: a room may import from its own floor's folder and from what stands before it, nothing behind it.
FLOORS = [
    "version", "errors", "text", "injob", "mpi", "schedulers", "config", "planning", "batch", "clusters",
    "deploy", "doctor", "cli",
]  # fmt: skip
APART = {"__init__", "__main__"}


def room(path: Path) -> str:
    """Return the folder of the package that a file is in, or the file's own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Return the rooms of this package that a file imports from."""
    found = set()
    for item in ast.walk(ast.parse(path.read_text())):
        if isinstance(item, ast.ImportFrom) and item.level:
            base = path.parents[item.level - 1]
            names = (
                [item.module.split(".")[0]] if item.module else [alias.name for alias in item.names]
            )
            found |= {room(base / name) for name in names}
    return found


def test_every_room_has_its_floor() -> None:
    assert {room(path) for path in PACKAGE.rglob("*.py")} == set(FLOORS) | APART


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_go_one_way(path: Path) -> None:
    own = room(path)
    if own in APART:
        return
    allowed = {*FLOORS[: FLOORS.index(own)], own}
    assert imports(path) <= allowed


def test_schedulers_do_no_input_or_output() -> None:
    for path in (PACKAGE / "schedulers").glob("*.py"):
        text = path.read_text()
        assert not [
            word for word in ("subprocess", "open(", "import socket", "import os") if word in text
        ], path


def test_processes_are_started_in_one_module() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "import subprocess" in path.read_text()
    }
    assert users == {"batch/process.py", "injob/process.py"}  # injob runs inside jobs


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "injob").glob("*.py")), ids=lambda path: path.name
)
def test_injob_needs_only_the_standard_library_and_distributed(path: Path) -> None:
    """In a job it is a package of another name, in an environment without gpujobs."""
    others = {"distributed", "pynvml", "mpi4py", "dask_mpi"}
    if path.name != "preload.py":  # its processes are dask's
        assert not top_level_imports(path) & others
    for item in ast.walk(ast.parse(path.read_text())):
        if isinstance(item, ast.ImportFrom) and item.level:
            assert item.level == 1
        elif isinstance(item, ast.Import | ast.ImportFrom):
            assert {
                name.split(".")[0] for name in imported(item)
            } <= others | sys.stdlib_module_names


def imported(item: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(item, ast.ImportFrom):
        return [str(item.module)]
    return [alias.name for alias in item.names]


def top_level_imports(path: Path) -> set[str]:
    """Return the packages that a module imports whenever it is imported."""
    return {
        name.split(".")[0]
        for item in ast.parse(path.read_text()).body
        if isinstance(item, ast.Import | ast.ImportFrom)
        for name in imported(item)
    }


def test_injob_imports_in_no_circle() -> None:
    before: dict[str, set[str]] = {}
    for path in (PACKAGE / "injob").glob("*.py"):
        before[path.stem] = {
            str(item.module)
            for item in ast.walk(ast.parse(path.read_text()))
            if isinstance(item, ast.ImportFrom) and item.level
        }
    while free := {name for name, needed in before.items() if not needed & before.keys()}:
        before = {name: needed for name, needed in before.items() if name not in free}
    assert not before


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["render"], ["plan"], ["plan", "--json"], ["status"], ["sites", "list"]],
    ids=" ".join,
)
def test_commands_import_no_dask(arguments: list[str], tmp_path: Path) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text("site: example-slurm\ngpus: 8\nwalltime: 2h\naccount: p12345\n")
    words = [*arguments, str(profile)] if arguments[0] in ("render", "plan") else arguments
    code = (
        "import json, sys\nfrom gpujobs.cli.main import main\n"
        f"try: main({words!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
        "print('\\n' + json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"HOME": str(tmp_path), "PATH": ""},
    )
    loaded = json.loads(done.stderr.strip().splitlines()[-1])
    assert not [name for name in loaded if name.split(".")[0] in HEAVY]
    if arguments == ["--version"]:
        assert not [name for name in loaded if name.split(".")[0] in ("jinja2", "ruamel")]
    if arguments == ["status"]:
        assert not [name for name in loaded if name.split(".")[0] == "jinja2"]


def test_importing_gpujobs_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import gpujobs; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.split(".")[0] for name in ast.literal_eval(done.stdout)} <= {
        "gpujobs",
        "__future__",
        "typing",
    }
