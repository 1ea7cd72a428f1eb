"""`gpujobs explain`: value, origin, overridden values and limits of a key; the submit command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpujobs.cli.main import main

from .support import SLURM

PROFILE = "gpus: 8\nwalltime: 2h\nworkers: {memory: 20GiB}\nenv: {A: b}\n"


@pytest.fixture
def folder(home: Path) -> Path:
    (home / "p.yaml").write_text(PROFILE)
    (home / "s.yaml").write_text(
        SLURM.replace("max_nodes: 1", "max_nodes: 1, max_jobs: 9, max_gpus_per_user: 8")
    )
    (home / "t.yaml").write_text("extends: ./s.yaml\ndefaults: {walltime: 30m}\n")
    return home


def gpujobs(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def explained(key: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = gpujobs("explain", "p.yaml", key, "--site", "./t.yaml", "--json", *arguments)
    assert done.exit_code == code, done.output
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def place(origin: dict[str, Any]) -> tuple[str, str, str, int | None]:
    return origin["value"], origin["kind"], Path(origin["source"]).name, origin["line"]


def test_all_origins_of_a_value_in_their_order(folder: Path) -> None:
    found = explained("walltime", "--set", "walltime=3h", "--set", "walltime=4h")
    assert found["value"] == "4h" and found["used"] == {"": "4h"}
    assert place(found["set_by"]) == ("4h", "command line", "--set walltime=4h", None)
    assert [place(origin) for origin in found["overrode"]] == [
        ("3h", "command line", "--set walltime=3h", None),
        ("2h", "profile", "p.yaml", 2),
        ("30m", "site default", "t.yaml", 2),
        ("1h", "site default", "s.yaml", 6),
        (None, "built-in", "built-in", None),
    ]
    (limit,) = found["limits"]
    assert (limit["limit"], limit["value"], limit["line"]) == ("queues.gpu.max_walltime", "1d", 5)


@pytest.mark.parametrize(
    ("key", "value", "used", "kind", "limits"),
    [
        ("queue", "auto", "gpu", "built-in", []),
        ("gpus", "8", 8, "profile", ["queues.gpu.max_jobs", "queues.gpu.max_gpus_per_user"]),
        ("gpus_per_job", None, 4, "built-in", ["queues.gpu.gpus_per_node", "queues.gpu.max_nodes"]),
        ("workers.memory", "20GiB", "20GiB", "profile", ["queues.gpu.memory_per_node"]),
        ("workers.threads", 1, 1, "built-in", ["queues.gpu.cpus_per_node"]),
        ("memory_per_job", None, "480GiB", "built-in", ["queues.gpu.memory_per_node"]),
        ("account", None, None, "built-in", ["account.pattern", "account.required"]),
        ("site", "./t.yaml", "t", "command line", []),
        ("network.encryption", None, True, "built-in", []),
    ],
)
def test_values_of_the_plan(
    folder: Path, key: str, value: object, used: object, kind: str, limits: list[str]
) -> None:
    found = explained(key)
    assert (found["value"], found["used"], found["set_by"]["kind"]) == (value, {"": used}, kind)
    assert [limit["limit"] for limit in found["limits"]] == limits
    assert found["description"]


def test_names_of_the_users_choice(folder: Path) -> None:
    assert place(explained("env.A")["set_by"]) == ("b", "profile", "p.yaml", 4)
    assert explained("env.B")["set_by"] is None
    done = gpujobs("explain", "p.yaml", "env.B", "--site", "./t.yaml")
    assert done.stdout == "env.B = not set\n"


def test_keys_of_a_site(folder: Path) -> None:
    done = gpujobs("explain", "p.yaml", "queues.gpu.max_jobs", "--site", "./t.yaml")
    assert done.exit_code == 2
    assert (
        "a profile has no key `queues.gpu.max_jobs`\n  hint: it is a key of a site" in done.stderr
    )


def test_groups_have_a_value_each(folder: Path) -> None:
    groups = "groups: {a: {gpus: 4, walltime: 1h}, b: {gpus: 1}}\nwalltime: 2h\n"
    (folder / "p.yaml").write_text(groups)
    assert explained("walltime")["used"] == {"a": "1h", "b": "2h"}
    assert explained("groups.a.walltime")["value"] == "1h"


def test_a_queue_of_the_site_has_values_of_its_own(folder: Path) -> None:
    (folder / "p.yaml").write_text("gpus: 4\n")
    own = SLURM.replace("max_nodes: 1", "max_nodes: 1, walltime: 20m, env: {A: c}")
    (folder / "s.yaml").write_text(own)
    found = explained("walltime")
    assert place(found["set_by"]) == ("20m", "queue of the site", "s.yaml", 5)
    assert found["used"] == {"": "20m"} and place(found["overrode"][0])[0] == "30m"
    assert explained("env.A")["value"] == "c"


def test_text(folder: Path) -> None:
    done = gpujobs("explain", "p.yaml", "walltime", "--site", "./t.yaml")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["walltime", "=", "2h"] and lines[1] == ["used", "2h"]
    assert lines[2][:3] == ["set", "by", "profile:"] and lines[2][3].endswith("p.yaml:2:11")
    assert lines[3][:2] == ["overrides", "30m,"] and lines[5][0] == "limit"


def test_a_profile_that_cannot_be_planned_is_explained_all_the_same(folder: Path) -> None:
    done = gpujobs("explain", "p.yaml", "walltime", "--site", "./t.yaml", "--set", "walltime=2d")
    assert done.exit_code == 2 and done.stdout.startswith("walltime = 2d\n")
    assert "limit" in done.stdout and "walltime 2d is more than its 24h" in done.stderr


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("waltime", "did you mean `walltime`"),
        ("workers.memry", "did you mean `workers.memory`"),
        ("workers", "is a section"),
    ],
)
def test_keys_that_cannot_be_explained(folder: Path, key: str, message: str) -> None:
    done = gpujobs("explain", "p.yaml", key, "--site", "./t.yaml")
    assert done.exit_code == 2 and message in done.stderr


def test_render_shows_the_submit_command_apart_from_the_scripts(folder: Path) -> None:
    done = gpujobs("render", "p.yaml", "--site", "./t.yaml")
    assert "submit command: sbatch --parsable < SCRIPT, in " in done.stderr
    assert "submit command" not in done.stdout
    (folder / "t.yaml").write_text("extends: ./s.yaml\ncommands: {sbatch: /opt/slurm/sbatch}\n")
    assert (
        "/opt/slurm/sbatch --parsable" in gpujobs("render", "p.yaml", "--site", "./t.yaml").stderr
    )
