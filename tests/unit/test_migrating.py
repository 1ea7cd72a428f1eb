"""The tables of docs/migrating.md: the names of the other tools exist, and so do those of gpujobs.

Those of dask-jobqueue and of LocalCUDACluster are in test_dask_jobqueue.py and test_local_cuda.py.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import dask.config
import pytest
import yaml

import gpujobs
from gpujobs.cli.main import main
from gpujobs.config.fields import size
from gpujobs.config.model import key_names
from gpujobs.config.profile import Profile
from gpujobs.deploy.clusteroptions import configured
from gpujobs.deploy.keywords import document_of, spec_of
from gpujobs.deploy.vocabulary import PARAMETERS, seconds
from gpujobs.planning.plan import make_plan
from gpujobs.schedulers import get_scheduler

from ..conftest import unavailable
from ..support.each import each
from ..support.migrating import PAGE, names

COILED = {
    *(
        "n_workers",
        "worker_gpu",
        "worker_gpu_type",
        "worker_memory",
        "worker_cpu",
        "worker_options",
    ),
    *("worker_vm_types", "region", "name", "workspace", "account", "software", "package_sync"),
    *("container", "environ", "spot_policy", "idle_timeout", "no_client_timeout"),
    *("wait_for_workers", "shutdown_on_close"),
}
"""Keywords of `coiled.Cluster` that the table has, from its signature in coiled 1.135.6 (2026-11-22)."""
COILED_COMMANDS = ["coiled run", "coiled batch run"]
"""Commands of the same release."""


def table(title: str) -> list[list[str]]:
    """Return the cells of the rows of the tables of a section."""
    section = re.search(rf"^## From {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert section
    tables = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", section[1], re.M)
    rows = re.findall(r"^\| (.*) \|$", "".join(tables), re.M)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def keyword_of(code: str) -> str | None:
    """Return the name in `name`, `name=value`; None for other code."""
    found = re.fullmatch(r"([A-Za-z_]\w*)(=.*)?", code)
    return found[1] if found else None


def check_call(code: str, names: dict[str, object]) -> None:
    """Check `cluster.method(name=value)` or `Class(name=value)`: the keywords exist."""
    call = ast.parse(code.replace("…", "..."), mode="eval").body
    assert isinstance(call, ast.Call)
    function: object = names
    for name in ast.unparse(call.func).split("."):
        function = names[name] if function is names else getattr(function, name)
    keywords = [str(item.arg) for item in call.keywords]
    if inspect.isclass(function):
        for item in call.keywords:
            check_keyword(str(item.arg), item.value)
    else:
        assert callable(function)
        known = inspect.signature(function).parameters
        assert set(keywords) <= {*known, *ADAPTIVE}


ADAPTIVE = {"minimum", "maximum", "hold"}
"""Keywords of `adapt` that pass through ``**kwargs``."""
OURS: dict[str, object] = {
    **{name: getattr(gpujobs, name) for name in gpujobs.__all__},
    "cluster": gpujobs.GPUJobQueueCluster,
    "gpujobs": gpujobs,
}


def check_keyword(name: str, value: ast.expr | None) -> None:
    """Check a keyword of the cluster classes, and its value if that is a literal."""
    if name in {*PARAMETERS, *inspect.signature(gpujobs.GPULocalCluster).parameters}:
        return
    if value is None or "..." in ast.unparse(value):
        assert name in {*gpujobs.GPUJobQueueCluster.vocabulary.known(), *key_names(Profile)}
    else:
        document_of({name: ast.literal_eval(value)})


def check_ours(code: str) -> None:
    """Check code of the last column: a keyword, a call, a command, or keys of a profile."""
    if code.startswith("gpujobs "):
        assert code.split()[1] in main.commands
    elif keyword_of(code) and "=" not in code:
        if code not in OURS:
            check_keyword(code, None)
    elif keyword_of(code):
        name, _, value = code.partition("=")
        check_keyword(name, ast.parse(value.replace("…", "..."), mode="eval").body)
    elif re.match(r"[\w.]+\(", code) and code != "Client()":
        check_call(code, OURS)
    elif re.match(r"GPU\w+\.\w+$", code):
        kind, _, name = code.partition(".")
        assert hasattr(OURS[kind], name)
    elif ": " in code:
        value = yaml.safe_load(code.replace("…", "x"))
        assert set(value) <= set(key_names(Profile))


def check_theirs(code: str, known: set[str], check: Callable[[str], None]) -> None:
    """Check code of the first column: a keyword among ``known``, or what ``check`` accepts."""
    name = keyword_of(code)
    if name:
        assert name in known, code
    else:
        check(code)


@each("row", table("Coiled"), ids=lambda row: row[0][:40])
def test_an_option_of_coiled_means_what_the_table_says(row: list[str]) -> None:
    def other(code: str) -> None:
        if code.startswith("coiled "):
            assert code in COILED_COMMANDS
        else:
            check_call(code, OURS)  # the methods are dask's

    for code in codes(row[0]):
        check_theirs(code, COILED, other)
    for code in codes(row[1]):
        check_ours(code)


def calls() -> list[str]:
    """Return the keywords with a value, and the calls, in the meanings of names of other tools."""
    titles = ("dask-jobqueue keywords", "dask-jobqueue attributes", "LocalCUDACluster keywords")
    texts = [row.text for title in titles for row in names(title).values()]
    found = {code for text in texts for code in codes(text)}
    return sorted(code for code in found if "=" in code or code.startswith("cluster."))


@each("code", calls())
def test_a_keyword_in_a_meaning_exists(code: str) -> None:
    check_ours(code)


def test_a_number_of_seconds_gets_its_unit_and_is_rounded_up() -> None:
    values = [5, 2.1, "5", 0.0, -1.5, "5m", None]
    assert [seconds(value) for value in values] == ["5s", "3s", "5s", 0.0, -1.5, "5m", None]


def test_the_options_of_dask_mpi_in_the_table_exist() -> None:
    from dask_mpi.cli import main as command

    assert isinstance(command, click.Command)
    options = {word for item in command.params for word in item.opts}
    for row in table("dask-mpi"):
        for word in re.findall(r"(?<!\w)--[a-z-]+", row[0]):
            assert word in options
        for code in codes(row[1]):
            check_ours(code)


def test_the_options_of_sbatch_in_the_table_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("sbatch"):
        unavailable("slurm", "sbatch is not installed")
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=none\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    words = subprocess.run(["sbatch", "--help"], capture_output=True, text=True).stdout
    named = {word for row in table("a batch script") for word in re.findall(r"--[a-z-]+", row[0])}
    assert len(named) > 10
    assert not {word for word in named if not re.search(rf"{word}(?![\w-])", words)}


# -- scripts, before and after -------------------------------------------------------------------------------------------
PAIRS = re.findall(
    r"^<!-- before (\w+) -->\n```\w+\n(.*?)^```$.*?^<!-- ([^\n>]+) -->\n```\w+\n(.*?)^```$",
    PAGE,
    re.M | re.S,
)
"""The kind and the text of the block before; the comment and the text of the one after."""


def keywords_in(text: str) -> dict[str, object]:
    """Return the keywords of the call of a class in a block."""
    (call,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}


def test_there_are_five_scripts() -> None:
    assert [kind for kind, *_ in PAIRS] == ["jobqueue", "yaml", "script", "script", "script"]


def test_a_cluster_of_dask_jobqueue_needs_only_another_class(home: Path) -> None:
    _, before, _, after = PAIRS[0]
    keywords = keywords_in(before)
    assert keywords == keywords_in(after)
    plan = make_plan(spec_of(keywords, None, 0, ("slurm",)), python="python", replaces="owner")
    shape = plan.groups[0].shape
    assert (shape.gpus, shape.workers, shape.cpus) == (4, 4, 16)
    assert [note.split()[0] for note in plan.notes[:2]] == ["--lifetime", "processes=1"]


def test_a_configuration_of_dask_jobqueue_is_the_profile_after_it(home: Path) -> None:
    _, before, _, after = PAIRS[1]
    with dask.config.set(yaml.safe_load(before)):
        found = document_of({}, configured("slurm"), scheduler=get_scheduler("slurm")())
    profile = yaml.safe_load(after)
    for key in ("queue", "account", "gpus_per_job", "cpus_per_job", "network"):
        assert found.value[key] == profile[key], key
    memory = [size(value["memory_per_job"]) // 2**30 for value in (found.value, profile)]
    assert memory[0] == memory[1]


@pytest.mark.parametrize(("before", "after"), [(one[1], one[3]) for one in PAIRS[2:]])
def test_a_batch_script_asks_for_the_gpus_of_the_profile_after_it(before: str, after: str) -> None:
    profile, slurm, nodes = yaml.safe_load(after), get_scheduler("slurm")(), 1
    for line in re.findall(r"^#SBATCH (.*)$", before, re.M):
        if found := re.fullmatch(r"--nodes=(\d+)", line):
            nodes = int(found[1])
            continue
        for key, value in slurm.meaning(line).settings.items():
            if key == "gpus_per_job":
                assert profile["gpus"] == int(value) * nodes
                assert profile.get("gpus_per_job", value) == value
            else:
                assert profile[key] == value
    assert "--nthreads 1" in before or "dask-mpi" not in before
