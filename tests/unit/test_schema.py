"""`gpujobs schema`: editors accept what gpujobs accepts, and refuse the same mistakes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from gpujobs.config.document import parse
from gpujobs.config.model import Key, Model, build, json_schema, key_names, keys_of
from gpujobs.config.profile import Profile, Workers
from gpujobs.config.site import Site
from gpujobs.errors import InputError

from ..support.cli import ROOT
from ..support.each import each

if TYPE_CHECKING:
    import jsonschema

SITES = [
    *(ROOT / "site_configs").glob("*.yaml"),
    *(ROOT / "tests" / "data" / "sites").glob("*.yaml"),
]
SITE = "description: x\nscheduler: slurm\nqueues: {gpu: {gpus_per_node: 4}}\n"


@functools.cache  # the check of the schema takes a while
def validator(model: type[Model]) -> jsonschema.Draft202012Validator:
    import jsonschema  # takes a second, in each test process if it stood above

    schema = json_schema(model)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@each("path", SITES, ids=lambda path: path.stem)
def test_site_files_match_the_schema(path: Path) -> None:
    value = YAML(typ="safe", pure=True).load(path.read_text())
    validator(Site).validate(value)


@each(
    "text",
    [
        "gpus: auto\nwalltime: 1h30m\nrun: python x.py\n",
        "gpus: 8\nrun: [python, x.py]\nworkers: {rmm_pool_size: 0.8, preload: 'a,b'}\n",
        "env: {A: x}\nhead: null\nenvironment: {container: {runtime: pyxis, image: x.sqsh}}\n",
        "groups: {big: {gpus: 2, workers: {memory: 8GiB}}}\nworkers: {options: {a-b: [1, x]}}\n",
        "workers: {worker_port: 8000, resources: {GPU: 1, X: 0.5}}\n",
    ],
)
def test_the_schema_and_gpujobs_accept_the_same_profiles(text: str) -> None:
    validator(Profile).validate(YAML(typ="safe", pure=True).load(text))
    build(Profile, parse(text, "p.yaml"))


@each(
    ("model", "text"),
    [
        (Profile, "gpuss: 8\n"),
        (Profile, "gpus: -1\n"),
        (Profile, "gpus_per_job: 0\n"),
        (Profile, "layout: mpj\n"),
        (Profile, "name: a b\n"),
        (Profile, "env: {A-B: x}\n"),
        (Profile, "workers: {memory: 16}\n"),
        (Profile, "environment: {container: {runtime: apptainer}}\n"),
        (Profile, "environment: {container: {runtime: docker, image: x.sif}}\n"),
        (Site, SITE.replace("description: x\n", "")),
        (Site, SITE.replace("slurm", "slurn")),
        (Site, SITE.replace("gpus_per_node", "gpus_pernode")),
        (Site, SITE + "directives: [qos=high]\n"),
        (Site, SITE + "visible_devices: {variable: X, file: Y}\n"),
        (Site, SITE + "network: {protocols: [udp]}\n"),
    ],
)
def test_the_schema_and_gpujobs_refuse_the_same_mistakes(model: type[Model], text: str) -> None:
    assert not validator(model).is_valid(YAML(typ="safe", pure=True).load(text))
    with pytest.raises(InputError):
        build(model, parse(text, "x.yaml"))


@each(
    "text",
    [
        "extends: example-slurm\ndirectory: /scratch\n",
        "extends: x\nqueues: {old: null, a: {like: b}}\ndirectives: {append: [--x]}\n",
        f"{SITE}queue_defaults: {{resources: {{nvme: 1TB}}, gpu_types: {{a: b}}, auto: false}}\n",
        f"{SITE}poll: 10s\ndefaults: {{walltime: 1h, workers: {{threads: 2}}}}\n",
        f"{SITE}commands: {{sbatch: /opt/sbatch}}\ncluster: 2\n",
    ],
)
def test_the_schema_and_gpujobs_accept_the_same_sites(text: str) -> None:
    validator(Site).validate(YAML(typ="safe", pure=True).load(text))
    if "extends" not in text:
        build(Site, parse(text, "s.yaml"))


@each(
    "text",
    [
        "env: {OMP_NUM_THREADS: 4, DEBUG: true}\nrun: [python, x.py, --size, 1000, --rate, 0.5]\n",
        "name: 2024\naccount: 123\nqueue: 1\n",
    ],
)
def test_plain_scalars_are_text(text: str) -> None:
    validator(Profile).validate(YAML(typ="safe", pure=True).load(text))
    build(Profile, parse(text, "p.yaml"))


@each("text", ["defaults: {waltime: 1h}\n", "poll: 10\n", "defaults: []\n", "queues: {}\n"])
def test_the_schema_refuses_what_every_plan_would(text: str) -> None:
    value = YAML(typ="safe", pure=True).load(f"description: x\nscheduler: slurm\n{text}")
    assert not validator(Site).is_valid({"queues": {"gpu": {}}, **value})


def test_every_key_has_a_description() -> None:
    def descriptions(schema: Any) -> list[str]:
        return [part["description"] for part in schema["properties"].values()]

    for model in (Profile, Site):
        schema: Any = json_schema(model)
        for part in (schema, *schema["$defs"].values()):
            assert all(descriptions(part)) and part["description"]


def test_defaults_are_valid() -> None:
    for model in (Profile, Site):
        whole = validator(model)
        for part in (whole.schema, *whole.schema["$defs"].values()):
            for key in part["properties"].values():
                if "default" in key:
                    key_schema = {**key, "$defs": whole.schema["$defs"]}
                    whole.evolve(schema=key_schema).validate(key["default"])


def test_given_has_the_keys_that_were_written() -> None:
    profile = build(Profile, parse("gpus: 8\naccount:\nworkers: {threads: 1}\n", "p.yaml"))
    assert profile.given == {"gpus", "account", "workers"}
    assert profile.workers.given == {"threads"}
    assert profile.network.given == set() and profile.account is None


def test_nested_keys_have_dotted_names() -> None:
    names = list(key_names(Profile))
    assert {"gpus", "workers.memory", "environment.container.image", "groups.workers.memory"} <= {
        *names
    }
    assert isinstance(keys_of(Workers)["threads"], Key)
