"""The folder from which workers import the modules of a program, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpujobs.clusters.prepare import make_cluster_plan
from gpujobs.planning.plan import Plan

from ..support.cli import ROOT
from .support import make_spec


def planned(home: Path, run: list[str]) -> Plan:
    return make_cluster_plan(make_spec(home, {"gpus": 1, "run": run}, str(home / "s.yaml")))


def program(home: Path, name: str = "app/main.py") -> Path:
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    path.parent.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "run", [["python", "app/main.py"], ["python3", "-u", "app/main.py", "x.py"], ["app/main.py"]]
)
def test_jobs_import_from_the_folder_of_the_script(home: Path, run: list[str]) -> None:
    program(home)
    plan = planned(home, run)
    assert plan.modules == str(home / "app")
    assert f"workers also import modules from {home}/app, the folder of app/main.py" in plan.notes


@pytest.mark.parametrize(
    "run", [["python", "main.py"], ["python", "-m", "app.main"], ["bash", "app/job.sh"], ["true"]]
)
def test_programs_that_import_from_the_working_directory_need_no_folder_of_modules(
    home: Path, run: list[str]
) -> None:
    program(home)
    program(home, "main.py")
    plan = planned(home, run)
    assert plan.modules == ""
    assert not any("modules" in note for note in plan.notes)


def test_a_link_leads_to_the_folder_of_its_target(home: Path) -> None:
    target = program(home, "elsewhere/real.py")
    (home / "app").mkdir()
    (home / "app" / "main.py").symlink_to(target)
    assert planned(home, ["python", "app/main.py"]).modules == str(target.parent)


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_that_all_users_can_write_is_not_used(home: Path, mode: int) -> None:
    program(home).parent.chmod(mode)
    plan = planned(home, ["python", "app/main.py"])
    assert plan.modules == ""
    assert plan.notes == (
        f"own modules of app/main.py: {home}/app is not used: {home}/app is writable by all users; "
        "`workdir` or PYTHONPATH may name it",
    )


def test_a_folder_below_one_that_all_users_can_write_is_not_used(home: Path) -> None:
    program(home)
    home.chmod(0o757)
    plan = planned(home, ["python", "app/main.py"])
    assert plan.modules == "" and f"{home} is writable by all users" in plan.notes[0]


@pytest.mark.skipif(os.getuid() != 0, reason="chown needs root")
def test_the_group_of_a_project_can_write_the_folder(home: Path) -> None:
    folder = program(home).parent
    for place in (home, folder):
        os.chown(place, 65534, 31)  # nobody, and a group that is not private
        place.chmod(0o2775)
    assert planned(home, ["python", "app/main.py"]).modules == str(folder)
    os.chown(home, 0, 0)
    home.chmod(0o1777)  # like /tmp: whoever was the first has made the folder there
    plan = planned(home, ["python", "app/main.py"])
    assert plan.modules == "" and f"{folder} belongs to user " in plan.notes[0]


OWNER = """
from gpujobs.clusters.prepare import with_modules
from gpujobs.config.spec import make_spec
from gpujobs.config.document import Document
print(with_modules(make_spec(Document({}), site="local"), replaces='owner')[0].modules)
"""


@pytest.mark.parametrize(
    ("words", "folder"),
    [(["app/owner.py"], "app"), (["-m", "app.owner"], ""), (["-c", OWNER], ""), (["owner.py"], "")],
)
def test_the_folder_of_the_main_script_of_an_owner_is_found(
    home: Path, words: list[str], folder: str
) -> None:
    for name in ("app/owner.py", "owner.py"):
        program(home, name).write_text(OWNER)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=home, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (str(home / folder) if folder else "")
