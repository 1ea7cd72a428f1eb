"""The file with the code that runs in jobs: its bytes, the Python that it needs, its tracebacks."""

from __future__ import annotations

import ast
import compileall
import importlib
import inspect
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgpack import _cmsgpack

import gpujobs.injob
from gpujobs.clusters import clusterfolder as folder
from gpujobs.clusters import verdict
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Submission
from gpujobs.injob import archive
from gpujobs.injob.commands import COMMANDS
from gpujobs.injob.names import ARCHIVE, PACKAGE, PRELOAD, PROTOCOL
from gpujobs.injob.options import SUBCOMMANDS
from gpujobs.schedulers import base

from ..conftest import slow_variant
from ..support.each import each
from ..support.jobevents import write_job

LIBRARIES = ["libcuda.so.1", "libnvidia-ml.so.1"]
DRIVER = f"""
import threading
import {PRELOAD}

for thread in threading.enumerate()[1:]:
    thread.join(5)
with open("/proc/self/maps") as maps:
    loaded = {{line.rpartition("/")[2].strip() for line in maps}}
    print([name for name in {LIBRARIES} if name in loaded])
"""
SOURCES = sorted(Path(gpujobs.injob.__file__).parent.glob("*.py"))


def test_only_an_archive_with_the_same_options_takes_jobs_of_this_release(tmp_path: Path) -> None:
    path = tmp_path / ARCHIVE
    with zipfile.ZipFile(io.BytesIO(archive.build())) as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    options, known = f"{PACKAGE}/options.py", f"{PACKAGE}/vocabulary"
    path.write_bytes(archive.pack({**files, options: files[options] + b"# a comment"}))
    assert archive.takes_our_options(path)
    assert b"\nsupervise run_on text head ranks\n" in files[known]
    for other in (b"supervise folder text\n", files[known].replace(b" ranks", b" nodes"), b""):
        path.write_bytes(archive.pack({**files, known: other}))
        assert not archive.takes_our_options(path)
    del files[known]  # as 0.3.0
    path.write_bytes(archive.pack(files))
    assert not archive.takes_our_options(path)


def test_modules_that_dask_imports_by_name_exist() -> None:
    """Dask gets them as text, which neither mypy nor an import of ours checks."""
    named = {
        name: path.name
        for path in SOURCES
        for name in re.findall(r"\{(?:names\.)?PACKAGE\}\.(\w+)", path.read_text())
    }
    assert {"preload", "registry", "names", "workerhost"} <= set(named)
    assert not set(named) - {path.stem for path in SOURCES}, named


@pytest.fixture
def pyz(tmp_path: Path) -> Path:
    compileall.compile_dir(SOURCES[0].parent, quiet=1)
    path = tmp_path / ARCHIVE
    path.write_bytes(archive.build())
    return path


def run(*words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env=environ
    )


def test_equal_sources_make_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = archive.build()
    for path in SOURCES[:2]:
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert archive.build() == first


def test_the_archive_contains_the_modules_of_jobs() -> None:
    with zipfile.ZipFile(io.BytesIO(archive.build())) as file:
        entries = file.infolist()
        names = [entry.filename for entry in entries]
        assert file.testzip() is None
    assert names == sorted(names)
    modules = [f"{PACKAGE}/{path.name}" for path in SOURCES if path.name != "archive.py"]
    assert {name for name in names if not name.endswith(".pyc")} == {
        "__main__.py",
        f"{PACKAGE}/vocabulary",
        *modules,
    }
    assert {entry.compress_type for entry in entries} == {zipfile.ZIP_STORED}


def test_jobs_of_the_same_python_compile_nothing(tmp_path: Path, pyz: Path) -> None:
    """Other ones do: `test_it_starts_in_other_pythons`. Bytecode of another source is not packed."""
    shutil.copytree(Path(gpujobs.__file__).parent, tmp_path / "gpujobs")
    injob = tmp_path / "gpujobs" / "injob"
    subprocess.run([sys.executable, "-m", "compileall", "-q", injob], check=True)
    build = "import sys; from gpujobs.injob.archive import build; sys.stdout.buffer.write(build())"
    load = f"import sys, importlib; sys.path[:0] = [{str(pyz)!r}]\nfor name in sys.argv[1:]: print(importlib.import_module('{PACKAGE}.' + name).__file__)"

    def loaded(*modules: str) -> list[str]:
        """Return which files of the archive a job loads, in another time zone."""
        done = subprocess.run(
            [sys.executable, "-Bc", build], cwd=tmp_path, capture_output=True, check=True
        )
        pyz.write_bytes(done.stdout)
        found = run("-c", load, *modules, TZ="UTC+9").stdout
        return [Path(line).name for line in found.splitlines()]

    assert loaded("commands", "log") == ["commands.pyc", "log.pyc"]
    os.utime(injob / "log.py", (1, 1))
    assert loaded("commands", "log") == ["commands.pyc", "log.py"]


def test_it_is_private_in_the_folder(tmp_path: Path) -> None:
    folder.make(tmp_path / "clusters" / "svd-0000", encrypted=False)
    path = tmp_path / "clusters" / "svd-0000" / "injob.pyz"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == archive.build()


@each("path", SOURCES, ids=lambda path: path.name)
def test_the_syntax_is_that_of_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 9))


@each("path", SOURCES, ids=lambda path: path.name)
def test_no_check_has_a_union_at_run_time(path: Path) -> None:
    """Python 3.9 cannot evaluate ``list | tuple``; annotations are not evaluated."""
    nodes = ast.walk(ast.parse(path.read_text()))
    calls = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) == 2]
    checks = [call for call in calls if ast.unparse(call.func) in ("isinstance", "issubclass")]
    assert not [ast.unparse(call) for call in checks if isinstance(call.args[1], ast.BinOp)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_call_of_zip_is_strict(path: Path) -> None:
    """Python 3.9 does not know it."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    strict = [call for call in calls if "strict" in {word.arg for word in call.keywords}]
    assert not [ast.unparse(call) for call in strict if ast.unparse(call.func) == "zip"]


@pytest.mark.parametrize("version", ["3.9", "3.13", *map(slow_variant, ("3.10", "3.12"))])
def test_it_starts_in_other_pythons(version: str, pyz: Path) -> None:
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if not found:
        pytest.skip(f"no Python {version} here")
    for words in (["--help"], ["supervise", "--help"], ["rank", "--help"]):
        done = subprocess.run([found[0], "-S", pyz, *words], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", ["3.9", "3.13", *map(slow_variant, ("3.10", "3.11"))])
def test_the_judge_runs_in_other_pythons(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a batch scheduler here, it judges by the folder alone."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if not found:
        pytest.skip(f"no Python {version} here")
    group, jobs = GroupRecord("", 2, 1, 4), Submission("7", 0, 2, array=True)
    record = ClusterRecord(
        tmp_path.name, "here", "slurm", str(tmp_path), 1.0, (group,), (), False, submissions=(jobs,),
    )  # fmt: skip
    monkeypatch.setenv("PATH", "/nonexistent")
    verdict.write_judge(tmp_path, "slurm")
    verdict.write_record(record)
    (tmp_path / "jobs").mkdir()
    write_job(tmp_path, 1, "left", node="node2", code=3)
    for _ in range(2):
        argv = [found[0], "-S", tmp_path / "judge.pyz", tmp_path]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        written = json.loads((tmp_path / "verdict.json").read_text())
        assert written["gone"] == {"1": "job 1 ended: node2: FAILED"}
        assert written["possible"] == [f"{tmp_path.name}-0"]
    assert not written["usable"] and not done.stderr  # it asks only once


PLUGIN = """
from gpujobs.schedulers import Scheduler
from {words} import *

class Plugin(Scheduler):
    name = "plugin"
"""
CALLER = """
import sys
sys.path.insert(0, "judge.pyz")
from gpujobs.schedulers import get_scheduler
print([base.__module__ for base in get_scheduler(sys.argv[1]).__mro__][:2])
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules that can be imported; batch schedulers that they register are forgotten."""
    monkeypatch.setattr(base, "REGISTERED", dict(base.REGISTERED))
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for module in set(sys.modules) - before:
        del sys.modules[module]


@pytest.mark.parametrize("python", ["3.9", "3.10", "3.13", ""])
@pytest.mark.parametrize(
    "module", ["lone_module", "a_package.inside.flux", "a_namespace.part.flux"]
)
def test_the_judge_has_the_package_of_its_batch_scheduler(
    module: str, python: str, plugins: Path
) -> None:
    """With all modules of the package; it need not be installed where the jobs are."""
    found = [sys.executable]
    if python:
        found = sorted(map(str, Path.home().glob(f".pyenv/versions/{python}.*/bin/python")))
    if not found:
        pytest.skip(f"no Python {python} here")
    path = plugins / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    words = "json.scanner" if module == "lone_module" else f"{module.rpartition('.')[0]}.words"
    path.write_text(PLUGIN.format(words=words))
    (path.parent / "words.py").write_text("STATES = {}\n")
    if module != "lone_module":
        (path.parent / "__init__.py").touch()
    if module.startswith("a_package"):
        (plugins / "a_package" / "__init__.py").touch()
    importlib.import_module(module)
    folder = plugins / "cluster"
    folder.mkdir()
    verdict.write_judge(folder, "plugin")
    done = subprocess.run(
        [found[0], "-S", "-E", "-c", CALLER, "plugin"], cwd=folder, capture_output=True, text=True
    )
    assert done.stdout == f"['{module}', 'gpujobs.schedulers.base']\n", done.stderr
    packed = zipfile.ZipFile(folder / "judge.pyz").namelist()
    assert "gpujobs/schedulers/slurm.py" in packed
    assert not [name for name in packed if "cluster" in name.split("/")[:-1]]


def test_a_batch_scheduler_that_is_not_in_a_file_is_not_packed(plugins: Path) -> None:
    """Nothing of `__main__` is; the jobs say that they cannot ask."""
    own = type("Own", (base.Scheduler,), {"name": "own", "__module__": "__main__"})
    assert base.get_scheduler("own") is own
    verdict.write_judge(plugins, "own")
    packed = zipfile.ZipFile(plugins / "judge.pyz").namelist()
    assert not [name for name in packed if not name.startswith(("gpujobs/", "__main__.py"))]


@pytest.mark.parametrize("word", ["supervise", "rank", "retire", "try-ucxx"])
def test_it_starts_without_other_packages(word: str, pyz: Path) -> None:
    done = run("-S", pyz, word, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: injob.pyz {word}")


def test_the_client_has_the_same_commands() -> None:
    done = run("-m", "gpujobs.injob", "--help")
    assert done.returncode == 0, done.stderr
    assert "try-ucxx" in done.stdout


def test_each_sub_command_has_a_function_of_its_options() -> None:
    assert COMMANDS.keys() == SUBCOMMANDS.keys()
    for name, (module, function) in COMMANDS.items():
        command = getattr(importlib.import_module(f"gpujobs.injob.{module}"), function)
        (options,) = inspect.signature(command).parameters.values()
        assert options.annotation == SUBCOMMANDS[name].__name__


def test_exceptions_show_source_lines(pyz: Path) -> None:
    """Python's own printer of exceptions leaves out the source lines of a zip file before 3.13."""
    missing = f"--folder={pyz.parent / 'missing'}"
    done = run("-S", pyz, "supervise", missing, "--job=0", "--started=1", "--scheduler", "x")
    assert done.returncode == 1
    assert "(folder.path / head).mkdir()" in done.stderr
    assert re.search(r'File "(\S+/)?injob/supervise.py", line \d+, in', done.stderr)
    assert done.stderr.splitlines()[-1].startswith("FileNotFoundError: ")


def test_preload_is_importable_from_the_archive(pyz: Path) -> None:
    code = f"import {PRELOAD} as preload; print(preload.__file__, preload.dask_setup.__name__)"
    done = run("-c", code, PYTHONPATH=f"/nosuch:{pyz}")
    assert done.stdout == f"{pyz}/{PACKAGE}/preload.pyc dask_setup\n", done.stderr


@pytest.mark.parametrize(("protocol", "libraries"), [("ucxx", LIBRARIES), ("tls", [])])
def test_preload_initialises_the_driver_for_ucx(
    pyz: Path, tmp_path: Path, protocol: str, libraries: list[str]
) -> None:
    """Other libraries stand for CUDA and NVML; their functions are missing, as in old drivers."""
    for name in LIBRARIES:
        shutil.copy(_cmsgpack.__file__, tmp_path / name)
    variables = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(pyz), PROTOCOL: protocol}
    done = run("-c", DRIVER, **variables)
    assert done.stdout == f"{libraries}\n", done.stderr
    assert not done.stderr
