"""The specification of a cluster, as `gpujobs scale` reads it later."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path

import pytest

from gpujobs.config.document import Document
from gpujobs.config.spec import (
    ClusterSpec,
    read_spec,
    settings_document,
    with_settings,
    write_spec,
)
from gpujobs.errors import Position
from gpujobs.planning.plan import make_plan
from gpujobs.planning.render import render

from .support import MACHINE, make_spec


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "profile",
    [
        "gpus: 8\nwalltime: 2h\naccount: p12345\nrun: [python, 'a b.py']\nenv: {A: yes}\n",
        "gpus: 1\nworkers: {options: {lifetime: 1h, a-b: true, n: 2, quoted: '2', list: [1, '1']}}\n",
        "gpus: 0\nworkers: {count: 2, memory: 1GiB, resources: {X: 0.5}}\nhead: {cpus: 2}\n",
    ],
)
def test_a_specification_is_read_as_it_was_written(folder: Path, profile: str) -> None:
    spec = make_spec(folder, profile, "example-slurm")
    write_spec(spec, folder / "spec.json")
    assert stat.S_IMODE((folder / "spec.json").stat().st_mode) == 0o600
    found = read_spec(folder / "spec.json")
    assert found.profile == spec.profile and found.site.site == spec.site.site
    assert (found.name, found.workdir, found.python) == (spec.name, spec.workdir, spec.python)
    assert found.site.name == spec.site.name and found.site.path == spec.site.path
    more = with_settings(found, settings_document(("gpus=4", "workers.threads=2")))
    assert (more.profile.gpus, more.profile.workers.threads) == (4, 2)
    assert more.profile.run == spec.profile.run


def script_of(spec: ClusterSpec) -> str:
    return render(make_plan(spec, python="/opt/python", machine=MACHINE), "svd-0000")[0].text


@pytest.mark.parametrize(
    ("written", "expected"),
    [("~", ""), ("~/svd run", "svd run"), ("~nosuchuser/a", None), ("/a/~", None)],
)
def test_tilde_in_workdir_is_the_home_folder(
    folder: Path, written: str, expected: str | None
) -> None:
    spec = make_spec(folder, {"gpus": 0, "workdir": written}, "local")
    assert spec.workdir == (Path(written) if expected is None else folder / expected)
    assert f"cd {shlex.quote(str(spec.workdir))} || exit 77" in script_of(spec)


def test_a_value_without_a_position_is_not_blamed_on_a_lower_layer() -> None:
    there = Position("s.yaml", 3, 1)
    lower = Document({"walltime": "1h", "gpus": "1"}, there)
    found = Document({"walltime": "10m", "name": "x"}, source="doctor").over(lower)
    assert found.position(("walltime",)) == found.position(("name",)) == Position("doctor")
    assert found.position(("gpus",)) == found.position(()) == there
