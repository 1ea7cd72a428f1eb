"""Every code block of the documentation has a test. This one has those of the lines of a console, TOML, templates and output.

A line of a console is checked by its program (`CHECKS`). Comments above a block say more:

- ``executed local``, ``executed delta``, ``executed svd``: (console) also executed, by
  tests/slow/test_guides.py
- ``executed by FILE``: (console, text) also executed, or printed, by the tests in that file
- ``not executed: REASON``: (console) for programs that have no check here
- ``template NAME``: (jinja) rendered as the template NAME of a site
- ``pixi``, ``entry point``: (toml) what the file is
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpujobs.clusters.report import JobPhase, JobReport, WorkerGpu
from gpujobs.deploy.display import JobTable
from gpujobs.planning.render import render
from gpujobs.schedulers import JobId, JobState
from gpujobs.schedulers.base import ENTRY_POINTS

from ..support.cli import ROOT
from ..support.each import each
from ..support.processes import patience
from .support import plan
from .test_docs import BLOCK, FILES, blocks

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
KINDS = {"bash", "console", "jinja", "python", "text", "toml", "yaml"}
"""Kinds of blocks that have a test, here, in test_docs.py or in tests/real/test_docs_python.py."""
EXECUTED = ("executed local", "executed delta", "executed svd")
DIRECTIVE = re.compile(r"\{\w+\}")
"""A kind of block of Sphinx, which `make docs` checks."""


# -- the rule --------------------------------------------------------------------------------------
@each("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_has_a_test(path: Path) -> None:
    fences = re.findall(r"^[ >]*(?:```|~~~)(.*)$", path.read_text(), re.M)
    assert not any(fences[1::2]), "an end of a block has no words"
    kinds = [kind for kind in fences[::2] if not DIRECTIVE.fullmatch(kind)]
    assert set(kinds) <= KINDS
    assert [found["kind"] for found in BLOCK.finditer(path.read_text())] == kinds


# -- consoles --------------------------------------------------------------------------------------
def commands_of(text: str) -> Iterator[str]:
    """Return the commands of a console block, without the output."""
    for line in re.findall(r"^\$ (.*)$", text.replace("\\\n", ""), re.M):
        yield from line.split(" && ")


def check_gpujobs(words: list[str]) -> None:
    """Checked by test_commands_exist."""


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    assert words and set(words) <= set(targets)


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    for word in words[1:]:
        found = re.fullmatch(r"gpujobs(?:\[([\w,]+)\])?", word)
        assert found, "not a package of ours"
        assert set(filter(None, (found[1] or "").split(","))) <= set(EXTRAS)


def check_pytest(words: list[str]) -> None:
    """The files and the options exist."""
    own = re.findall(r'addoption\("(--[\w-]+)"', (ROOT / "tests" / "conftest.py").read_text())
    markers = [
        re.split("[:(]", line)[0] for line in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]
    ]
    values = iter(words)
    for word in values:
        if word == "-k":
            name = next(values)
            files = [ROOT / word for word in words if word.endswith(".py")]
            assert name == "NAME" or all(
                re.search(rf"def test_\w*{name}", file.read_text()) for file in files
            )
        elif word == "-m":
            assert set(re.findall(r"\w+", next(values))) - {"or", "not", "and"} <= set(markers)
        elif word.startswith("-"):
            assert word.split("=")[0] in own
        else:
            assert (ROOT / word).exists()


def check_python(words: list[str]) -> None:
    """The script exists, and has these options."""
    if words[0] == "-m":
        assert words[1] in ("pytest", "zipfile")
        if words[1] == "pytest":
            check_pytest(words[2:])
        return
    assert (ROOT / words[0]).is_file()
    words = [word.strip("[]") for word in words]
    if not words[1:]:
        return
    done = subprocess.run(
        [sys.executable, *words, "--help"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=patience(60),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in words[1:]:
        assert not word.startswith("--") or re.search(rf"{word}\b", done.stdout), word


def check_folder(words: list[str]) -> None:
    """`mkdir`, `cd`: nothing of ours."""


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "gpujobs": check_gpujobs,
    "make": check_make,
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    "mkdir": check_folder,
    "cd": check_folder,
}


@each(("mark", "text"), blocks("console"))
def test_commands_options_and_files_of_console_blocks_exist(mark: list[str], text: str) -> None:
    assert " ".join(mark[:2]) in ("", *EXECUTED, "executed by", "not executed:")
    if mark[:2] == ["executed", "by"]:
        assert (ROOT / mark[2]).is_file()
        return
    unknown = []
    found = list(commands_of(text))
    assert found
    for command in found:
        inner = re.fullmatch(r'(?:eval "|\w+=)\$\((.*)\)"?', command)
        words = shlex.split(inner[1] if inner else command, comments=True)
        while variable := re.match(r"([A-Z_]+)=", words[0]):
            assert re.search(variable[1], (ROOT / "CONTRIBUTING.md").read_text())
            del words[0]
        program = Path(words[0]).name
        if program in CHECKS:
            CHECKS[program](words[1:])
        else:
            unknown.append(program)
    if unknown:
        assert mark[:2] == ["not", "executed:"] and mark[2:], f"no check of {', '.join(unknown)}"
    else:
        assert mark[:1] != ["not"], "all of its lines have a check"


def scripts_in_text() -> list[str]:
    """Return the calls of our scripts in code within the text."""
    pattern = r"`(?:python )?((?:benchmarks|tools)/[\w/]+\.py[^`]*)`"
    texts = (BLOCK.sub("", path.read_text()) for path in FILES)
    return sorted({words for text in texts for words in re.findall(pattern, text)})


@each("words", scripts_in_text())
def test_scripts_in_the_text_exist(words: str) -> None:
    script, *options = words.split()
    text = (ROOT / script).read_text()
    assert not [word for word in options if word.startswith("--") and f'"{word}"' not in text]


# -- TOML, templates, output -----------------------------------------------------------------------
def check_pixi(found: dict[str, Any]) -> None:
    assert set(found) == {"workspace", "system-requirements", "dependencies", "pypi-dependencies"}
    assert set(found["workspace"]) == {"channels", "platforms"}
    assert "gpujobs" in found["pypi-dependencies"] and "dask-cuda" in found["dependencies"]
    version = re.match(r"3\.(\d+)", found["dependencies"]["python"])
    oldest = re.match(r">=3\.(\d+)", PYPROJECT["project"]["requires-python"])
    assert version and oldest and int(version[1]) >= int(oldest[1])


def check_entry_point(found: dict[str, Any]) -> None:
    assert list(found["project"]["entry-points"]) == [ENTRY_POINTS]


@each(("mark", "text"), blocks("toml"))
def test_blocks_of_toml_are_what_they_are_called(mark: list[str], text: str) -> None:
    checks = {"pixi": check_pixi, "entry point": check_entry_point}
    checks[" ".join(mark)](tomllib.loads(text))


@each(("mark", "text"), blocks("jinja"))
def test_blocks_of_templates_are_in_a_script_that_bash_accepts(
    mark: list[str], text: str, tmp_path: Path
) -> None:
    """The lines of the template are in the script of a job, and bash can parse it."""
    (word, name) = mark
    assert word == "template"
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / f"{name}.sh.j2").write_text(text)
    site = tmp_path / "s.yaml"
    site.write_text(f"extends: example-{name}\n")
    profile = {"gpus": 4, "walltime": "1h", "account": "p12345", "run": ["python", "svd.py"]}
    script = render(plan(tmp_path, profile, str(site)), "svd-0000", site_folder=tmp_path)[0].text
    own = [line for line in text.splitlines() if not line.startswith("{")]
    assert own and not [line for line in own if line not in script.splitlines()]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_table_of_jobs_looks_as_in_the_documentation() -> None:
    """The table of `cluster.jobs` in docs/python.md."""
    workers = tuple(f"svd-7f3a-0-{n}" for n in range(4))
    gpus = tuple(
        WorkerGpu(name, "gpu01", f"GPU-{n}", "NVIDIA A100-SXM4-40GB", 40 * 2**30)
        for n, name in enumerate(workers)
    )
    running = JobReport(
        0, JobId("4711", 0), JobPhase.RUNNING, JobState.RUNNING,
        id="4711_0", node="gpu01", workers=workers, connected=workers, gpus=gpus,
    )  # fmt: skip
    waiting = JobReport(
        1, JobId("4711", 1), JobPhase.WAITING, JobState.PENDING,
        id="4711_1", reason="Resources", workers=tuple(f"svd-7f3a-1-{n}" for n in range(4)),
    )  # fmt: skip
    table = [line.rstrip() for line in repr(JobTable([running, waiting])).splitlines()]
    ((_, text),) = (block.values for block in blocks("text") if "python-" in str(block.id))
    assert table == text.splitlines()


@each(("mark", "text"), blocks("text"))
def test_output_names_its_test(mark: list[str], text: str) -> None:
    assert mark[:2] == ["executed", "by"]
    assert (ROOT / mark[2]).is_file()
