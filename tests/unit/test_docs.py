"""The documentation matches the code: examples are valid, commands, keys and link targets exist."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpujobs.cli.main import main
from gpujobs.clusters.folderstate import FolderState
from gpujobs.clusters.judge import judge
from gpujobs.clusters.report import job_json
from gpujobs.config import profile as profile_models
from gpujobs.config.model import key_names, keys_of
from gpujobs.config.sitefiles import load_site
from gpujobs.errors import (
    GpujobsError,
    InputError,
    JobFailedError,
    NoSuchClusterError,
    RefusedError,
    UnavailableError,
)
from gpujobs.injob import names
from gpujobs.injob.folder import RESERVE, SHAPES
from gpujobs.planning.render import render
from gpujobs.schedulers import JobState, JobStatus

from ..support.cli import ROOT
from ..support.each import each
from .report_data import GROUPED, START
from .support import plan

FILES = [
    path
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^>\n]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
PYTHON = ("alone", "opens", "with", "run", "local", "quoted", "gloo", "here", "laptop")
"""How a Python block is executed: the first word of the comment above it."""


def blocks(kind: str) -> list[object]:
    """Return the code blocks of a kind, each with the words of the comment above it."""
    return [
        pytest.param((found["mark"] or "").split(), found["text"], id=f"{path.stem}-{n}")
        for path in FILES
        for n, found in enumerate(BLOCK.finditer(path.read_text()))
        if found["kind"] == kind and not (found["mark"] or "").startswith("before ")
    ]


def listed(text: str, after: str) -> set[str]:
    """Return the words in backquotes between ``after`` and the end of its sentence, or a colon."""
    start = text.index(after) + len(after)
    return set(re.findall(r"`(\w+)`", re.split(r"[.:]\s", text[start:], maxsplit=1)[0]))


def test_python_md_lists_the_keys_of_a_job_and_of_profiles() -> None:
    text = " ".join((ROOT / "docs" / "python.md").read_text().split())
    status = JobStatus(JobState.PENDING)
    answers = dict.fromkeys(GROUPED.jobs.values(), status)
    job = judge(GROUPED, FolderState(), answers, now=START).jobs[0]
    assert listed(text, "(json.md#status), with the keys ") == set(job_json(job))
    keys = listed(text, "(reference-profile.md), with the same names and types: ")
    assert len(keys) > 10 and keys <= set(keys_of(profile_models.Profile))


@each(("mark", "text"), blocks("bash"))
def test_directives_on_a_page_are_those_that_render_prints(
    mark: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directives on the page are those that `gpujobs render` prints for its profile."""
    assert mark[:1] == ["rendered"], "<!-- rendered site=NAME KEY=VALUE --> is missing above it"
    monkeypatch.setenv("HOME", "/home/ada")
    settings = dict(word.split("=") for word in mark[1:])
    profile = {
        "name": "svd",
        "gpus": 4,
        "gpus_per_job": 2,
        "walltime": "2h",
        "run": ["python", "svd.py"],
    }
    made = plan(tmp_path, profile, settings.pop("site"), **settings)
    lines = render(made, "svd-0000")[0].text.splitlines()
    assert [
        line for line in lines if line.startswith(f"{made.scheduler.prefix} ")
    ] == text.splitlines()


def prose(path: Path) -> str:
    return BLOCK.sub("", path.read_text())


@each(("mark", "text"), blocks("yaml"))
def test_blocks_of_yaml_are_planned_or_loaded(mark: list[str], text: str, tmp_path: Path) -> None:
    assert mark and mark[0] in ("profile", "site"), (
        "a comment is missing above it: <!-- profile site=NAME --> or <!-- site -->"
    )
    settings = dict(word.split("=") for word in mark[1:] if word != "part")
    if mark[0] == "profile":
        assert plan(tmp_path, text, settings.pop("site", "local"), **settings)
        return
    if "part" in mark:
        settings = {"account": "p12345"}
        text = text if "extends: " in text else f"extends: example-slurm\n{text}"
    (tmp_path / "site.yaml").write_text(text)
    site = load_site(str(tmp_path / "site.yaml")).site
    for key, queue in site.queues.items():
        if "part" not in mark and queue.gpus_per_node:
            wanted = {"gpus": queue.gpus_per_node, "queue": key, "walltime": "10m"}
            assert (
                plan(tmp_path, wanted, str(tmp_path / "site.yaml"), **settings).gpus
                == queue.gpus_per_node
            )


def commands() -> list[object]:
    """Return the arguments of `gpujobs` in console blocks and in code within the text."""
    found = []
    for path in FILES:
        consoles = "".join(
            match["text"]
            for match in BLOCK.finditer(path.read_text())
            if match["kind"] == "console"
        )
        consoles = consoles.replace("\\\n", "")
        lines = re.findall(r"^\$ (?:eval \"\$\(|\w+=\$\()?gpujobs ([^)\n]*)", consoles, re.M)
        now = prose(path).split("\n## [0.")[0]  # past releases have commands that are gone
        within = re.findall(r"`gpujobs ([a-z-][^`]*)`", now)
        found += [
            pytest.param(words, id=f"{path.stem}: {words}") for words in sorted({*lines, *within})
        ]
    return found


@each("words", commands())
def test_commands_exist(words: str) -> None:
    lexer = shlex.shlex(words, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    arguments = list(lexer)
    arguments = arguments[
        : next((n for n, word in enumerate(arguments) if word[0] in "|&>;"), None)
    ]
    command: click.Command = main
    if arguments[0] == "--host":
        del arguments[:2]
    while isinstance(command, click.Group) and arguments and arguments[0] in command.commands:
        command = command.commands[arguments.pop(0)]
    assert not isinstance(command, click.Group) or arguments == ["--version"]
    try:
        command.make_context("gpujobs", arguments)
    except click.exceptions.Exit:  # --version
        pass
    except click.MissingParameter:  # `gpujobs plan` as a name
        assert not re.search("ID|svd", words)


def test_every_command_has_a_section_and_its_options_exist() -> None:
    """A section explains what `--help`, and the reference that is made of it, do not say."""
    text = (ROOT / "docs" / "commands.md").read_text()
    sections = dict(re.findall(r"^## ([a-z]+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    commands = {name: one for name, one in main.commands.items() if not one.hidden}
    assert sorted(sections) == sorted(commands)
    for name, command in commands.items():
        own = {word for one in each_command(command) for word in options_of(one)}
        named = set(re.findall(r"(?<=`)--?[a-z][a-z-]*(?=[` ])", sections[name]))
        assert sorted(named - own - options_of(main)) == []


def each_command(command: click.Command) -> Iterator[click.Command]:
    """Yield a command and those in its group."""
    yield command
    for one in command.commands.values() if isinstance(command, click.Group) else ():
        yield from each_command(one)


def options_of(command: click.Command) -> set[str]:
    return {word for item in command.params if isinstance(item, click.Option) for word in item.opts}


@each(("mark", "text"), blocks("python"))
def test_python_compiles_and_keywords_exist(mark: list[str], text: str) -> None:
    import gpujobs
    from gpujobs.deploy.keywords import document_of

    how = "a comment is missing above it: see tests/real/test_docs_python.py"
    assert mark[:1] == ["python"] and mark[1] in PYTHON, how
    compile(text, "document", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and re.fullmatch(r".*GPU\w+Cluster", ast.unparse(call.func)):
            kind = getattr(gpujobs, ast.unparse(call.func).rpartition(".")[2])
            methods = (kind.__init__, gpujobs.GPUJobQueueCluster.__init__)
            own = {name for method in methods for name in inspect.signature(method).parameters}
            values = {
                str(item.arg): ast.literal_eval(item.value)
                for item in call.keywords
                if item.arg not in own
            }
            document_of(values, vocabulary=kind.vocabulary)


@each("path", FILES, ids=lambda path: path.stem)
def test_links_have_a_target(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(path)):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert anchor in [
                re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings
            ], target


@each("path", FILES, ids=lambda path: path.stem)
def test_scheduler_is_never_written_alone(path: Path) -> None:
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\"scheduler\"", "", prose(path))
    assert not re.findall(r"(?i)(?<!batch.)(?<!dask.)\bschedulers?\b[^\n]*", text), (
        "batch scheduler or dask scheduler?"
    )


def test_messages_are_real() -> None:
    folders = ((ROOT / "gpujobs").rglob("*.py"), (ROOT / "templates").glob("*.j2"))
    code = "".join(path.read_text() for paths in folders for path in paths)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # strings that continue on the next line
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    parts = [
        part.strip()
        for row in rows
        for text in re.findall(r"`([^`]+)`", row)
        for part in text.split("…")
    ]
    assert len(parts) > 50
    assert not [part for part in parts if part not in code]


def test_equivalents_are_keys_of_a_profile() -> None:
    """The last column of the tables names keys, or commands, which another test checks."""
    text = (ROOT / "docs" / "migrating.md").read_text()
    tables = re.findall(r"^<!-- equivalents -->\n\|.*\n\|.*\n((?:\|.*\n)+)", text, re.M)
    last = [row.split("|")[-2] for row in "".join(tables).splitlines()]
    keys = [key for cell in last for key in re.findall(r"`([a-z_.]+)[:`]", cell)]
    assert len(keys) > 10
    assert set(keys) <= set(key_names(profile_models.Profile))


@each("page", ("how-it-works.md", "in-a-job.md"))
def test_the_modules_of_a_page_exist_and_have_the_names_that_it_says(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for path in set(re.findall(r"`(?:gpujobs/)?([a-z]+/\w+\.py)`", text)):
        assert (ROOT / "gpujobs" / path).is_file(), path
    for name, path in re.findall(r"`(\w+)(?:\(\))?` (?:in|of)\s+`([a-z]+/\w+\.py)`", text):
        code = (ROOT / "gpujobs" / path).read_text()
        assert re.search(rf"^ *(?:def |class )?{name}\b", code, re.M), (name, path)


def test_in_a_job_lists_every_file_of_the_clusters_folder() -> None:
    script = (ROOT / "templates" / "body.sh.j2").read_text()
    code = "".join(path.read_text() for path in (ROOT / "gpujobs").glob("*/*.py"))
    of_jobs = re.findall(r"jobs/\$GPUJOBS_JOB\.([a-z]+)\b(?!-)", script)
    of_jobs += re.findall(r'job_file\([\w.]+, "([a-z]+)"\)', code)
    files = {name.replace("head-*", "head-A").replace("*", "N") for name in SHAPES}
    files |= {f"jobs/N.{ending}" for ending in of_jobs} - {"jobs/N.launch"}
    files |= {
        names.ARCHIVE,
        names.JUDGE,
        names.RECORD,
        names.CERTIFICATE,
        names.KEY,
        RESERVE,
    }
    text = (ROOT / "docs" / "in-a-job.md").read_text()
    table = text.partition("## The cluster's folder\n")[2].partition("\n#")[0]
    first = "".join(re.findall(r"^(\| `.+?) \|", table, re.M))
    assert len(of_jobs) > 8
    assert sorted(files - {"head/owner"} - set(re.findall(r"`([^`]+)`", first))) == []


def rooms(package: Path) -> set[str]:
    """Return the folders and the modules at the root of the package; not `version.py` and the like."""
    apart = {"__init__.py", "__main__.py", "version.py", "mpi.py", "torch.py"}
    modules = {path.name for path in package.glob("*.py")} - apart
    return modules | {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}


def test_every_room_is_in_the_table() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    table = re.search(r"^<!-- rooms -->\n\|.*\n\|.*\n((?:\|.*\n)+)", text, re.M)
    assert table
    rows = re.findall(r"^\| `([^`]+)` \|", table[1], re.M)
    assert sorted(rows) == sorted(rooms(ROOT / "gpujobs"))


def test_every_module_is_in_the_generated_list() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from reference import PARTS
    finally:
        sys.path.pop(0)
    rows = re.findall(r"^\| `(\w+\.py)` \| (\S.*) \|$", PARTS["modules"](), re.M)
    package = ROOT / "gpujobs"
    files = [path.name for path in package.glob("*/*.py") if not path.name.startswith("__")]
    assert sorted(name for name, _ in rows) == sorted(files)
    assert "<!-- generated modules -->" in (ROOT / "docs" / "how-it-works.md").read_text()


def test_errors_have_the_exit_codes_of_the_table() -> None:
    text = (ROOT / "docs" / "commands.md").read_text().partition("## Exit codes")[2]
    rows = {
        int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.+) \|$", text, re.M)
    }
    meanings = {
        GpujobsError: "another error",
        RefusedError: "refused",
        InputError: "not valid",
        UnavailableError: "did not answer",
        NoSuchClusterError: "no cluster with that id",
        JobFailedError: "the cluster failed",
    }
    assert all(words in rows[kind.exit_code] for kind, words in meanings.items())
