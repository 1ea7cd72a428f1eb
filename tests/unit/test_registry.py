"""Batch schedulers register themselves, and are found by name: built in, imported, or of another package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpujobs.batch.process import environment
from gpujobs.config.model import json_schema
from gpujobs.config.site import Site
from gpujobs.errors import InputError
from gpujobs.planning.render import render
from gpujobs.schedulers import Scheduler, get_scheduler, scheduler_names, usable_schedulers
from gpujobs.schedulers.base import REGISTERED
from gpujobs.schedulers.slurm import Slurm

from ..support.cli import ROOT, text_of
from ..support.each import each
from .support import plan

BUILT_IN = ["local", "lsf", "pbs", "sge", "slurm", "torque"]
TEMPLATE = "#!{{ shell }}\n#SBATCH -J {{ name }}\n{% set job_name = name %}{% set job_id = '' %}{% set index = '' %}\n{% include 'body.sh.j2' %}\n"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The classes of a test are forgotten after it."""
    scheduler_names()  # imports the built-in ones
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


def define(name: str) -> type[Scheduler]:
    return type("Own", (Slurm,), {"name": name, "__module__": f"package.of.{name}"})


def test_built_in_ones_need_no_list() -> None:
    assert scheduler_names() == BUILT_IN
    for name in BUILT_IN:
        assert get_scheduler(name).name == name


def test_only_the_one_that_is_needed_is_imported() -> None:
    code = (
        "import json, sys; from gpujobs.schedulers import get_scheduler; get_scheduler('lsf')\n"
        "print(json.dumps([*sys.modules]))"
    )
    loaded = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    others = {f"gpujobs.schedulers.{name}" for name in BUILT_IN} - {"gpujobs.schedulers.lsf"}
    assert "gpujobs.schedulers.lsf" in loaded
    assert not others & set(loaded) and "importlib.metadata" not in loaded


def test_a_class_that_was_imported_is_known_by_its_name(tmp_path: Path) -> None:
    own = define("own")
    assert get_scheduler("own") is own
    assert "own" in scheduler_names()
    assert "own" in json.dumps(json_schema(Site)["properties"])
    site = {"description": "x", "scheduler": "own", "queues": {"main": {"gpus_per_node": 4}}}
    (tmp_path / "here.yaml").write_text(text_of(site))
    made = plan(tmp_path, {"gpus": 1, "walltime": "1h"}, str(tmp_path / "here.yaml"))
    with pytest.raises(InputError, match=r"no template own\.sh\.j2"):
        render(made, "svd-0000", site_folder=tmp_path)
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "own.sh.j2").write_text(TEMPLATE)
    assert "#SBATCH -J svd-0000" in render(made, "svd-0000", site_folder=tmp_path)[0].text


def test_subclass_without_a_name_does_not_register() -> None:
    before = dict(REGISTERED)
    type("Patched", (Slurm,), {})
    assert before == REGISTERED
    assert get_scheduler("slurm") is Slurm


def test_name_belongs_to_one_class() -> None:
    first, again = define("own"), define("own")  # the same class, imported again
    assert first is not again is get_scheduler("own")
    with pytest.raises(
        TypeError, match=r"two batch schedulers have the name own: package\.of\.own"
    ):
        type("Other", (Slurm,), {"name": "own"})


@each("name", ["slrum", "Slurm", "base", "registry", "", "..config", "a b", "jobs"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InputError) as error:
        get_scheduler(name)
    assert f"{name!r} is not one of the known batch schedulers ({', '.join(BUILT_IN)})" in str(
        error.value
    )
    assert ("did you mean slurm?" in str(error.value)) is (name.lower() in ("slrum", "slurm"))


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with an entry point to the module demo_batch."""
    information = tmp_path / "demo_batch-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: demo-batch\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[gpujobs.schedulers]\ndemo = demo_batch\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "demo_batch", raising=False)
    return tmp_path


def test_an_entry_point_is_imported_when_it_is_asked_for(plugin: Path) -> None:
    (plugin / "demo_batch.py").symlink_to(ROOT / "tests" / "fakes" / "demo" / "demo_batch.py")
    assert scheduler_names() == sorted([*BUILT_IN, "demo"])
    assert "demo_batch" not in sys.modules
    assert get_scheduler("demo").environment == ("DEMO_FOLDER",)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import nosuch", "ModuleNotFoundError: No module named 'nosuch'"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_an_entry_point_that_cannot_be_imported_is_an_error_with_its_cause(
    plugin: Path, text: str, cause: str
) -> None:
    (plugin / "demo_batch.py").write_text(text)
    with pytest.raises(InputError, match=rf"demo: demo_batch cannot be imported \({cause}"):
        get_scheduler("demo")


def test_an_entry_point_without_the_class_is_an_unknown_name(plugin: Path) -> None:
    (plugin / "demo_batch.py").write_text("")
    with pytest.raises(InputError, match="'demo' is not one of the known batch schedulers"):
        get_scheduler("demo")


def test_commands_get_the_variables_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "SBATCH_PARTITION", "PBS_SERVER"):
        monkeypatch.setenv(name, "x")
    found = environment(Slurm.environment, Slurm.fixed_environment)
    assert found["SLURM_CONF"] == "x" and found["SLURM_BITSTR_LEN"] == "0"
    assert not {"SBATCH_PARTITION", "PBS_SERVER"} & set(found)
    assert "SLURM_CONF" not in environment()


def test_one_that_cannot_be_imported_is_a_warning(
    plugin: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`run --here` and `sites init` look at all of them."""
    (plugin / "demo_batch.py").write_text("import nosuch")
    with caplog.at_level("WARNING", "gpujobs"):
        assert sorted(one.name for one in usable_schedulers()) == BUILT_IN
    assert "demo: demo_batch cannot be imported (ModuleNotFoundError" in caplog.text
