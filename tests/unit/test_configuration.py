"""Dask's configuration in jobs: defaults of gpujobs are below the user's values, and no option hides a value by default."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gpujobs.clusters.prepare import make_cluster_plan
from gpujobs.injob.configuration import collecting_no_garbage, preload_options
from gpujobs.injob.names import PRELOAD
from gpujobs.planning.render import render

from ..support.cli import text_of
from .support import made_plan, make_spec

distributed = pytest.importorskip("distributed")
PROGRAM = """
import json, sys
from gpujobs.injob.configuration import add_defaults, preload_options
add_defaults("GPU=2", "/scratch")
import dask, distributed
worker = dask.config.get("distributed.worker")
options = [preload_options(role, sys.argv[1:]) for role in ("worker", "scheduler")]
print(json.dumps([worker["resources"], worker["lifetime"], dask.config.get("temporary-directory"), *options]))
"""
OURS = f"--preload={PRELOAD}"


def configured(folder: Path, values: dict[str, Any], *arguments: str, **environ: str) -> list[Any]:
    """Return resources, lifetime, directory and preloads of workers of a user with this configuration."""
    path = folder / "dask.yaml"
    path.write_text(text_of(values))
    own = {"DASK_CONFIG": str(path), "DASK_ROOT_CONFIG": "/nosuch", **environ}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, "HOME": str(folder), **own},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def test_defaults_apply_where_the_user_has_set_nothing(tmp_path: Path) -> None:
    resources, lifetime, directory, *preloads = configured(tmp_path, {})
    assert resources == {"GPU": 2} and directory == "/scratch"
    assert lifetime == {"duration": None, "stagger": "0 seconds", "restart": False}
    assert preloads == [[OURS], [OURS]]


def test_the_configuration_of_the_user_has_priority(tmp_path: Path) -> None:
    worker = {"preload": ["a", "b"], "resources": {"MEMORY": 3}, "lifetime": {"duration": "45s"}}
    values = {
        "distributed": {"worker": worker, "scheduler": {"preload": "c"}},
        "temporary-directory": "/own",
    }
    resources, lifetime, directory, *preloads = configured(tmp_path, values)
    assert resources == {"GPU": 2, "MEMORY": 3} and directory == "/own"
    assert lifetime == {"duration": "45s", "stagger": "0 seconds", "restart": False}
    assert preloads == [["--preload=a", "--preload=b", OURS], ["--preload=c", OURS]]


def test_preloads_of_the_profile_replace_those_of_the_configuration() -> None:
    assert preload_options("worker", ["--preload=x", "--nthreads=1"]) == [OURS]


# -- no option of ours has a value that the user's configuration would have ------------------------
def keys_of(kind: type) -> dict[str, str]:
    """Return the keys of dask's configuration that arguments of a class hide, by the argument."""
    found = {}
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))  # type: ignore[misc]
    for node in ast.walk(tree):
        if isinstance(node, ast.If):  # if preload is None: preload = dask.config.get(…)
            names = [part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)]
            names += [part.attr for part in ast.walk(node.test) if isinstance(part, ast.Attribute)]
            parts = [part for statement in node.body for part in ast.walk(statement)]
        elif isinstance(node, ast.BoolOp):  # idle_timeout or dask.config.get(…)
            names = [part.id for part in node.values if isinstance(part, ast.Name)]
            parts = list(ast.walk(node))
        else:
            continue
        keys = [key for part in parts if (key := key_of(part))]
        found.update({name: key for name in names for key in keys})
    parameters = inspect.signature(kind).parameters
    return {name: key for name, key in found.items() if name in parameters}


def key_of(node: ast.AST) -> str:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dask.config.get" and node.args:
        return str(ast.literal_eval(node.args[0]))
    return ""


CONFIGURABLE = {
    "scheduler": keys_of(distributed.Scheduler),
    "workers": {
        **keys_of(distributed.Worker),
        **keys_of(distributed.Nanny),
        "local_directory": "temporary-directory",
    },
}


def test_this_test_finds_the_keys_of_dask() -> None:
    known = {"resources", "preload", "lifetime", "lifetime_stagger", "preload_nanny"}
    assert known <= CONFIGURABLE["workers"].keys()
    assert {"preload", "idle_timeout", "contact_address"} <= CONFIGURABLE["scheduler"].keys()
    assert 'dask.config.get("temporary-directory")' in inspect.getsource(distributed.core.Server)


@pytest.mark.parametrize(
    "profile",
    [
        {"gpus": 2},
        {"gpus": 0, "queue": "gpu"},
        {"gpus": 2, "workers": {"worker_class": "nanny"}},
        {"gpus": 2, "workers": {"workers_per_gpu": 2}},
        {"gpus": 2, "layout": "allocation"},
        {"gpus": 2, "head": {"queue": "gpu"}, "requeue": 1},
    ],
)
def test_no_option_that_is_given_by_default_hides_a_key_of_dasks_configuration(
    home: Path, profile: dict[str, Any]
) -> None:
    for script in render(made_plan(home, profile), "p-0000"):
        text = script.text.replace("\\\n", " ")
        commands = re.findall(r"-- (?:distributed|dask_cuda)\.(\S*)(.*?)(?: --workers| --run| &$)", text, re.M)  # fmt: skip
        assert commands
        for module, arguments in commands:
            role = "scheduler" if "scheduler" in module else "workers"
            given = {name.replace("-", "_") for name in re.findall(r"--([a-z-]+)", arguments)}
            assert given, text
            assert not given & CONFIGURABLE[role].keys()


def test_no_keyword_of_mpi_ranks_that_is_given_by_default_hides_a_key(home: Path) -> None:
    profile = {"gpus": 2, "layout": "mpi", "run_on": "ranks", "run": ["x.py"]}
    (script,) = render(made_plan(home, profile), "p-0000")
    given = json.loads(re.findall(r"--worker-options[\s\\]+'([^']*?\})", script.text)[0])
    assert given and not given.keys() & CONFIGURABLE["workers"].keys()
    assert "--local-directory" not in script.text


# -- the user's shell ------------------------------------------------------------------------------
def test_jobs_get_the_files_of_dasks_configuration_that_the_shell_names(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("DASK_CONFIG", "own.yaml")
    monkeypatch.setenv("DASK_DISTRIBUTED__WORKER__DAEMON", "False")
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TLS__CA_FILE", "/of/connect")
    plan = make_cluster_plan(make_spec(home, {"gpus": 2}, str(home / "s.yaml")))
    text = render(plan, "p-0000")[0].text
    assert f"export DASK_CONFIG={home / 'own.yaml'} " in text
    note = "jobs do not get DASK_DISTRIBUTED__WORKER__DAEMON of this shell"
    assert [one for one in plan.notes if "DASK_" in one] == [
        f"{note}: use `env`, or a file in DASK_CONFIG"
    ]
    env = {"DASK_DISTRIBUTED__WORKER__DAEMON": "False"}
    plan = make_cluster_plan(make_spec(home, {"gpus": 2, "env": env}, str(home / "s.yaml")))
    assert not [one for one in plan.notes if "DASK_" in one]


def test_python_looks_for_garbage_again_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), collecting_no_garbage():
        assert not gc.isenabled()
        importlib.import_module("a_package_that_is_not_there")
    assert gc.isenabled()
