"""Imports go one way between rooms and in no cycle inside one; most commands import no dask."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import gpujobs

from ..support.each import each

PACKAGE = Path(gpujobs.__file__).parent
HEAVY = ("pydantic", "dask", "distributed", "dask_jobqueue", "tornado", "numpy", "cryptography")
MODULES = sorted(PACKAGE.rglob("*.py"))

FLOORS = (
    ("version", "errors", "text", "injob"),
    ("mpi", "torch", "schedulers"),
    ("config",),
    ("planning", "batch"),
    ("clusters",),
    ("deploy", "doctor"),
    ("cli",),
)
"""Rooms from the ground up. A room may import from itself and from the floors below its own."""
ENTRANCES = ("__init__", "__main__")
FILES_AT_ROOT = 8


def room(path: Path) -> str:
    """Return the folder of the package that holds a file, or the name of a file at its root."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module; the first one is the module."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def imported(path: Path) -> Iterator[Path]:
    """Yield the modules of this package that ``path`` imports, also those inside functions."""
    for item in nodes(path):
        if isinstance(item, ast.ImportFrom) and item.level:
            base = path.parents[item.level - 1].joinpath(*(item.module or "").split("."))
            for alias in item.names:
                yield module_at(base / alias.name) or module_at(base) or base


def modules(path: Path, *, lazy: bool = True) -> set[str]:
    """Return the packages other than this one that ``path`` imports; ``lazy``: also in functions."""
    tree = nodes(path)[0]
    assert isinstance(tree, ast.Module)
    found: set[str] = set()
    for item in nodes(path) if lazy else tree.body:
        if isinstance(item, ast.Import):
            found |= {alias.name.split(".")[0] for alias in item.names}
        elif isinstance(item, ast.ImportFrom) and not item.level:
            found.add(str(item.module).split(".")[0])
    return found


def module_at(path: Path) -> Path | None:
    """Return the file of a module or a package, None if ``path`` is neither."""
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((file for file in files if file.exists()), None)


def find_cycle(graph: dict[Path, set[Path]]) -> list[str]:
    """Return the modules of a cycle, none if there is no cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(path.relative_to(PACKAGE)) for path in error.args[1]]
    return []


def test_every_room_has_its_floor() -> None:
    rooms = {name for floor in FLOORS for name in floor}
    assert {room(path) for path in MODULES} == rooms | set(ENTRANCES)


def test_each_module_has_a_name_of_its_own() -> None:
    names = [path.stem for path in MODULES if path.stem not in ENTRANCES]
    assert sorted(names) == sorted(set(names))


def test_the_root_of_the_package_has_few_files() -> None:
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= FILES_AT_ROOT


@each("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    own = room(path)
    if own in ENTRANCES:
        return
    floor = next(number for number, floor in enumerate(FLOORS) if own in floor)
    allowed = {own, *(name for below in FLOORS[:floor] for name in below)}
    assert {room(target) for target in imported(path)} <= allowed


@each("name", [name for floor in FLOORS for name in floor])
def test_no_room_has_a_cycle_of_imports(name: str) -> None:
    graph = {
        path: {target for target in imported(path) if room(target) == name}
        for path in MODULES
        if room(path) == name
    }
    assert find_cycle(graph) == []


def test_a_cycle_is_found() -> None:
    first, second, third = (PACKAGE / name for name in ("a.py", "b.py", "c.py"))
    assert find_cycle({first: {second}, second: {third}, third: set()}) == []
    cycle = find_cycle({first: {second}, second: {third}, third: {first}})
    assert sorted(set(cycle)) == ["a.py", "b.py", "c.py"]


@each("path", sorted((PACKAGE / "cli").glob("*.py")), ids=lambda path: path.stem)
def test_commands_need_no_alias(path: Path) -> None:
    imports = [
        alias
        for item in nodes(path)
        if isinstance(item, ast.Import | ast.ImportFrom)
        for alias in item.names
    ]
    assert not [alias.name for alias in imports if alias.asname]


def test_schedulers_do_no_input_or_output() -> None:
    for path in (PACKAGE / "schedulers").glob("*.py"):
        text = path.read_text()
        assert not [
            word for word in ("subprocess", "open(", "import socket", "import os") if word in text
        ], path


def test_processes_are_started_in_one_module_on_each_side() -> None:
    users = [str(path.relative_to(PACKAGE)) for path in MODULES if "subprocess" in modules(path)]
    assert users == ["batch/process.py", "injob/children.py"]


IN_DASK = ("dashboard.py", "registry.py", "drain.py", "drains.py", "rest.py")
"""Modules of processes of dask."""


@each("path", sorted((PACKAGE / "injob").glob("*.py")), ids=lambda path: path.name)
def test_injob_needs_only_the_standard_library_and_distributed(path: Path) -> None:
    """In a job it is a package of another name, in an environment without gpujobs."""
    others = {"dask", "distributed", "tornado", "pynvml", "mpi4py", "dask_mpi", "rmm", "cupy"}
    others |= {"psutil", "torch", "cryptography"}
    assert modules(path) <= others | sys.stdlib_module_names
    if path.name not in IN_DASK:
        assert not modules(path, lazy=False) & others
    assert all(target.parent == PACKAGE / "injob" for target in imported(path))


@each(
    "arguments",
    [
        ["--version"],
        ["render"],
        ["plan"],
        ["plan", "--json"],
        ["status"],
        ["sites", "list"],
        ["sites", "check", "example-slurm"],
        ["queues", "--site", "local"],
    ],
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
    if arguments in (["--version"], ["status"]):  # no sites, no templates
        assert not [name for name in loaded if name.split(".")[0] in ("jinja2", "ruamel")]


def test_importing_gpujobs_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import gpujobs; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.split(".")[0] for name in ast.literal_eval(done.stdout)} <= {
        "gpujobs",
        "__future__",
        "typing",
    }


@each("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_text_files_have_an_encoding(path: Path) -> None:
    """Files are UTF-8 also in a locale that is not."""
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            modes = [item.value for item in node.args if isinstance(item, ast.Constant)]
            binary = any(isinstance(mode, str) and "b" in mode for mode in modes)
            of_path = name == "write_text" or (name == "read_text" and not node.args)
            opens = name in ("fdopen", "open") and not binary and not _is(node.func, "os", "open")
            named = {keyword.arg for keyword in node.keywords}
            assert not (of_path or opens) or "encoding" in named, f"{path}:{node.lineno}"


def _is(function: ast.expr, module: str, name: str) -> bool:
    return ast.unparse(function) == f"{module}.{name}"
