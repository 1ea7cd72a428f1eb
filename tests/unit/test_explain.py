"""`gpujobs explain`: value, origin, overridden values and limits of a key; the submit command."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpujobs.cli.main import main
from gpujobs.config.model import Model, Table, keys_of
from gpujobs.config.profile import Profile, Workers
from gpujobs.config.site import Queue, Site
from gpujobs.planning.explain import _ADDED, _LIMITS, _LIMITS_WITHOUT_RUN, _SUPPLIED

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
        ("network.protocol", "auto", "tls", "built-in", []),
    ],
)
def test_values_of_the_plan(
    folder: Path, key: str, value: object, used: object, kind: str, limits: list[str]
) -> None:
    found = explained(key)
    assert (found["value"], found["used"], found["set_by"]["kind"]) == (value, {"": used}, kind)
    assert [limit["limit"] for limit in found["limits"]] == limits
    assert found["description"]
    if key == "network.protocol":  # as docs/transport.md says
        assert "the fastest of the site's protocols" in found["description"]


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


SITE_KEYS = """description: x
scheduler: slurm
setup: module load site
scratch: /local
max_idle_timeout: 20m
directives: [--constraint=gpu]
network: {interface: ib0, encryption: required}
containers: {runtime: apptainer, args: [--cleanenv], images: {rapids: /images/rapids.sif}}
environment: {staging: /apps/environment.tar.gz}
options:
  storage: {directive: "--license={storage}", default: gdata, pattern: "[a-z+]+"}
  project: {directive: "--wckey={project}"}
defaults: {walltime: 1h, env: {A: site, B: site}}
queues:
  gpu:
    gpus_per_node: 4
    gpu_type: a100
    cpus_per_node: 64
    memory_per_node: 480GiB
    env: {A: queue}
  other:
    like: gpu
    gpu_type: h100
    setup: module load other
    scratch: /fast
    network: {interface: ib1}
    directives: [--constraint=other]
    options: {storage: {directive: "--license={storage}", default: fast}}
"""


@pytest.fixture
def rich(home: Path) -> Path:
    """The site t.yaml, over s.yaml, with values for keys of profiles."""
    (home / "s.yaml").write_text(SITE_KEYS)
    (home / "t.yaml").write_text("extends: ./s.yaml\nnetwork: {interface: ib7}\n")
    (home / "p.yaml").write_text("gpus: 2\n")
    return home


@pytest.mark.parametrize(
    ("key", "value", "kind", "site_key", "line", "used"),
    [
        ("network.interface", "ib7", "site", "network.interface", 2, "ib7"),
        ("workers.local_directory", "/local", "site", "scratch", 4, "/local"),
        ("gpu_type", "a100", "queue of the site", "queues.gpu.gpu_type", 17, "a100"),
        (
            "environment.python",
            "/apps/environment.tar.gz",
            "site",
            "environment.staging",
            9,
            "python",
        ),
        ("options.storage", "gdata", "site", "options.storage.default", 11, None),
        ("env.A", "queue", "queue of the site", None, 20, None),
        ("env.B", "site", "site default", None, 13, None),
    ],
)
def test_values_that_the_site_supplies(
    rich: Path, key: str, value: str, kind: str, site_key: str | None, line: int, used: str | None
) -> None:
    found = explained(key)
    origin = found["set_by"]
    assert (found["value"], origin["kind"], origin["site_key"]) == (value, kind, site_key)
    assert origin["line"] == line
    assert found["used"] == (used and {"": used})


@pytest.mark.parametrize(
    ("key", "site_key", "value", "site_value"),
    [
        ("network.interface", "queues.other.network.interface", "ib1", "ib7"),
        ("workers.local_directory", "queues.other.scratch", "/fast", "/local"),
        ("options.storage", "queues.other.options.storage.default", "fast", "gdata"),
    ],
)
def test_values_of_a_queue_override_those_of_the_site(
    rich: Path, key: str, site_key: str, value: str, site_value: str
) -> None:
    found = explained(key, "--set", "queue=other")
    assert (found["value"], found["set_by"]["site_key"]) == (value, site_key)
    assert found["overrode"][0]["value"] == site_value
    done = gpujobs("explain", "p.yaml", key, "--site", "./t.yaml", "--set", "queue=other")
    assert f"{site_key} of the site: " in done.stdout


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("network.interface", "eth0"),
        ("workers.local_directory", "/mine"),
        ("environment.python", "/mine/bin/python"),
        ("options.storage", "own"),
        ("gpu_type", "a100"),
        ("env.A", "profile"),
    ],
)
def test_values_of_the_profile_override_those_of_the_site(rich: Path, key: str, value: str) -> None:
    supplied = explained(key)["set_by"]
    found = explained(key, "--set", f"{key}={value}")
    assert (found["value"], found["set_by"]["kind"]) == (value, "command line")
    if key != "environment.python":  # then the site's environment is not staged
        assert found["overrode"][0] == supplied


@pytest.mark.parametrize(
    ("key", "queue", "value", "site_key"),
    [
        ("environment.setup", "gpu", "module load site", "setup"),
        ("environment.setup", "other", "module load other", "queues.other.setup"),
        ("directives", "gpu", ["--constraint=gpu"], "directives"),
        ("directives", "other", ["--constraint=other"], "queues.other.directives"),
        ("environment.container.args", "gpu", ["--cleanenv"], "containers.args"),
    ],
)
def test_values_that_the_site_adds(
    rich: Path, key: str, queue: str, value: object, site_key: str
) -> None:
    profile = f"gpus: 1\nqueue: {queue}\nenvironment: {{container: {{image: rapids}}}}\n"
    (rich / "p.yaml").write_text(profile)
    (added,) = explained(key)["added"]
    assert (added["value"], added["site_key"]) == (value, site_key) and added["line"]
    if key == "environment.setup":
        (rich / "p.yaml").write_text(f"gpus: 1\nqueue: {queue}\nenvironment: {{setup: mine}}\n")
        found = explained(key)
        assert (found["value"], found["added"]) == ("mine", [added])
    assert added == explained(key)["added"][0]


def test_lines_that_the_site_adds_are_shown_in_one_line(rich: Path) -> None:
    (rich / "t.yaml").write_text("extends: ./s.yaml\nsetup: |\n  module load a\n  module load b\n")
    done = gpujobs("explain", "p.yaml", "environment.setup", "--site", "./t.yaml")
    assert "added    module load a; module load b, setup of the site: " in done.stdout


def test_arguments_of_another_runtime_are_not_added(rich: Path) -> None:
    image = "environment: {container: {image: rapids, runtime: charliecloud}}\n"
    (rich / "p.yaml").write_text(f"gpus: 1\n{image}")
    assert explained("environment.container.args")["added"] == []
    assert explained("environment.container.runtime")["used"] == {"": "charliecloud"}


def test_the_container_of_a_site(rich: Path) -> None:
    (rich / "p.yaml").write_text("gpus: 1\nenvironment: {container: {image: rapids}}\n")
    runtime = explained("environment.container.runtime")
    assert (runtime["value"], runtime["set_by"]["site_key"]) == ("apptainer", "containers.runtime")
    image = explained("environment.container.image")
    assert (image["value"], image["used"]) == ("rapids", {"": "/images/rapids.sif"})


@pytest.mark.parametrize(("key", "used"), [("idle_timeout", "20m"), ("client_timeout", None)])
def test_the_end_of_a_cluster_without_run(rich: Path, key: str, used: str | None) -> None:
    found = explained(key)
    assert (found["value"], found["used"]) == (used, {"": used})
    assert [(one["limit"], one["line"]) for one in found["limits"]] == [("max_idle_timeout", 5)]
    with_run = explained(key, "--set", "run=true")
    assert (with_run["value"], with_run["limits"], with_run["used"]) == (None, [], {"": None})
    own = explained(key, "--set", f"{key}=9m")
    assert (own["value"], own["used"], own["set_by"]["kind"]) == ("9m", {"": "9m"}, "command line")


def test_the_default_end_of_a_cluster_without_run(folder: Path) -> None:
    (folder / "t.yaml").write_text("extends: ./s.yaml\n")
    for key in ("idle_timeout", "client_timeout"):
        found = explained(key)
        assert (found["value"], found["used"], found["limits"]) == (None, {"": "30m"}, [])


@pytest.mark.parametrize(
    ("key", "limits"),
    [
        ("network.encryption", ["network.encryption"]),
        ("network.dashboard", ["network.encryption"]),
        ("options.storage", ["options.storage.pattern"]),
    ],
)
def test_limits_of_the_site(rich: Path, key: str, limits: list[str]) -> None:
    assert [limit["limit"] for limit in explained(key)["limits"]] == limits


def test_an_option_of_the_profile(rich: Path) -> None:
    (rich / "p.yaml").write_text("gpus: 1\noptions: {storage: own}\n")
    assert place(explained("options.storage")["set_by"]) == ("own", "profile", "p.yaml", 2)
    assert explained("options.project")["set_by"] is None


def test_an_option_that_is_added_to_the_default(rich: Path) -> None:
    text = SITE_KEYS.replace("default: gdata,", 'default: gdata, separator: "+",')
    (rich / "s.yaml").write_text(text)
    found = explained("options.storage", "--set", "options.storage=+own")
    assert (found["value"], found["set_by"]["kind"]) == ("+own", "command line")
    (added,) = found["added"]
    assert (added["value"], added["site_key"]) == ("gdata", "options.storage.default")
    assert [origin["kind"] for origin in found["overrode"]] == []
    replaced = explained("options.storage", "--set", "options.storage=own")
    assert replaced["added"] == [] and replaced["overrode"] == [added]


TABLES = ["env", "options", "workers.options", "workers.resources"]


@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_names_of_the_users_choice(rich: Path, table: str) -> None:
    assert explained(f"{table}.x1")["set_by"] is None
    (rich / "p.yaml").write_text("groups: {a: {gpus: 1}}\n")
    assert explained(f"groups.a.{table}.x1")["set_by"] is None


def test_all_tables_are_tested() -> None:
    own = {name: key for name, key in keys_of(Profile).items() if name != "groups"}
    of_workers = {f"workers.{name}": key for name, key in keys_of(Workers).items()}
    keys = {**own, **of_workers}
    assert {name for name, key in keys.items() if isinstance(key.kind, Table)} == set(TABLES)


def test_keys_of_a_group(rich: Path) -> None:
    groups = "groups: {a: {gpus: 4, walltime: 1h}, b: {gpus: 1, queue: other}}\nwalltime: 2h\n"
    (rich / "p.yaml").write_text(groups)
    found = explained("groups.a.walltime")
    assert (found["value"], found["used"]) == ("1h", {"a": "1h"})
    assert [origin["value"] for origin in found["overrode"]] == ["2h", "1h", None]
    assert place(explained("groups.b.walltime")["set_by"]) == ("2h", "profile", "p.yaml", 2)
    scratch = explained("groups.b.workers.local_directory")
    assert scratch["set_by"]["site_key"] == "queues.other.scratch"
    assert scratch["used"] == {"b": "/fast"}
    assert explained("groups.b.gpus")["overrode"][0]["kind"] == "built-in"
    done = gpujobs("explain", "p.yaml", "groups.a.waltime", "--site", "./t.yaml")
    assert done.exit_code == 2 and "did you mean `walltime`" in done.stderr
    done = gpujobs("explain", "p.yaml", "groups.c.walltime", "--site", "./t.yaml")
    assert done.exit_code == 2
    assert "the profile has no group `c`" in done.stderr and "its groups are a, b" in done.stderr
    done = gpujobs("explain", "p.yaml", "groups..walltime", "--site", "./t.yaml")
    assert done.exit_code == 2 and "the profile has no group ``" in done.stderr
    (rich / "p.yaml").write_text("gpus: 1\n")
    done = gpujobs("explain", "p.yaml", "groups.a.walltime", "--site", "./t.yaml")
    assert done.exit_code == 2 and "it has no groups" in done.stderr


OF_NO_PROFILE = {
    "site": [
        *("description", "source", "contact", "hostnames", "environment_variables"),
        *("cluster_names", "scheduler", "extends", "queues", "queue_defaults", "request"),
        *("cpu_request", "multi_node_request", "submit_arguments", "visible_devices", "mpi"),
        *("workers_launcher", "node_launcher", "shell", "directory", "cluster", "commands", "poll"),
        *("max_array_size", "notes"),
    ],
    "queue": [
        *("name", "like", "auto", "gpu_memory", "resources", "gpu_fractions", "notes"),
        *("request", "cpu_request", "multi_node_request", "submit_arguments"),
        *("visible_devices", "mpi", "workers_launcher", "node_launcher"),
    ],
}
"""Keys that supply, add to or limit no value of a profile."""


@pytest.mark.parametrize(
    ("model", "others"),
    [(Site, ["defaults", "options"]), (Queue, ["walltime", "env", "options"])],
)
def test_every_key_of_a_site_is_explained(model: type[Model], others: list[str]) -> None:
    limits = {*chain(*_LIMITS.values()), *_LIMITS_WITHOUT_RUN.values()}
    explained_keys = {*limits, *others, *_SUPPLIED.values(), *_ADDED.values()}
    names = {str(name).partition(".")[0] for name in explained_keys}
    missing = keys_of(model).keys() - names
    assert missing == set(OF_NO_PROFILE[model.__name__.lower()])
