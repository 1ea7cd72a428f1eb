"""Inheritance in site files: `extends`, `like`, `queue_defaults`, `{append: [...]}`, null."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpujobs.config.model import build
from gpujobs.config.site import Site
from gpujobs.config.sitefiles import SiteFile, load_site
from gpujobs.errors import InputError

from ..support.each import each
from .support import error_of, made_plan

BASE = """\
description: base
scheduler: slurm
directives: [--qos=a, --mail-type=END]
hostnames: [login1]
network: {protocols: [tcp]}
defaults: {walltime: 1h, directives: [--nice=1]}
queues:
  old: {gpus_per_node: 8}
  main: {gpus_per_node: 4, gpu_type: a100, max_walltime: 2h, directives: [--constraint=a]}
  cpu: {}
"""


def site(home: Path, text: str, base: str = BASE) -> SiteFile:
    (home / "base.yaml").write_text(base)
    (home / "s.yaml").write_text(f"extends: ./base.yaml\n{text}")
    return load_site(str(home / "s.yaml"))


def test_lists_are_extended(home: Path) -> None:
    text = "directives: {append: [--x=1]}\nqueues: {main: {directives: {append: [--y=2, --z=3]}}}\n"
    loaded = site(home, text + "network: {protocols: {append: [ws]}}\nhostnames: [login2]\n")
    assert loaded.site.directives == ("--qos=a", "--mail-type=END", "--x=1")
    assert loaded.site.queues["main"].directives == ("--constraint=a", "--y=2", "--z=3")
    assert loaded.site.network.protocols == ("tcp", "ws")
    assert loaded.site.hostnames == ("login2",)
    places = [str(loaded.document.position(("directives", n))) for n in range(3)]
    assert [re.sub(".*/", "", place) for place in places] == [
        "base.yaml:3:14", "base.yaml:3:23", "s.yaml:2:23",
    ]  # fmt: skip


def test_a_list_is_extended_twice(home: Path) -> None:
    (home / "top.yaml").write_text("extends: ./s.yaml\ndirectives: {append: [--top]}\n")
    site(home, "directives: {append: [--middle]}\n")
    found = load_site(str(home / "top.yaml")).site.directives
    assert found == ("--qos=a", "--mail-type=END", "--middle", "--top")
    site(home, "directives: {append: [--middle]}\n", re.sub("directives: .*\n", "", BASE, count=1))
    assert load_site(str(home / "top.yaml")).site.directives == ("--middle", "--top")


def test_a_queue_extends_the_list_of_its_site(home: Path) -> None:
    loaded = site(home, "queues: {cpu: {directives: {append: [--x]}}}\n")
    assert loaded.site.queues["cpu"].directives == ("--qos=a", "--mail-type=END", "--x")


def test_lists_in_defaults_of_profiles_are_extended(home: Path) -> None:
    site(home, "defaults: {directives: {append: [--comment=x]}}\n")
    lines = made_plan(home, "gpus: 4\nqueue: main\n").groups[0].lines
    assert lines[-2:] == ("--nice=1", "--comment=x")


def test_errors_in_extended_lists_have_their_position(home: Path) -> None:
    site(home, "directives: {append: [--x=1, --job-name=x]}\n")
    message = error_of(home, "gpus: 4\n")
    assert "s.yaml:2:30: `--job-name=x`: job-name is written by gpujobs" in message


def test_the_built_in_request_cannot_be_extended(home: Path) -> None:
    for text, place in (
        ("request: {append: [--x]}\n", "s.yaml:2:10"),
        ("queues: {cpu: {request: {append: [--x]}}}\n", "s.yaml:2:25"),
    ):
        with pytest.raises(InputError) as caught:
            site(home, text)
        message = f"{place}: `request` has nothing to extend: the site has no `request`"
        assert message in str(caught.value)


def test_queues_are_removed(home: Path) -> None:
    loaded = site(home, "queues: {old: null, new: {gpus_per_node: 2}}\n")
    assert list(loaded.site.queues) == ["main", "cpu", "new"]
    with pytest.raises(InputError, match=r"s\.yaml:2:10: there is no queue `odl` that can be rem"):
        site(home, "queues: {odl: null}\n")
    with pytest.raises(InputError, match=r"needs at least one queue"):
        site(home, "queues: {old: null, main: null, cpu: null}\n")
    (home / "s.yaml").write_text(BASE.replace("cpu: {}", "cpu: null"))
    with pytest.raises(InputError, match=r"`queues\.cpu` must be a mapping"):
        load_site("./s.yaml")


def test_a_queue_takes_the_values_of_one_that_it_is_like(home: Path) -> None:
    loaded = site(
        home,
        "queues:\n"
        "  big: {like: main, min_nodes: 2, max_walltime: null, directives: {append: [--x]}}\n"
        "  huge: {like: big, gpu_type: h100, directives: [--y]}\n",
    )
    big, huge = loaded.site.queues["big"], loaded.site.queues["huge"]
    assert (big.gpus_per_node, big.gpu_type, big.min_nodes) == (4, "a100", 2)
    assert big.max_walltime is None and big.directives == ("--constraint=a", "--x")
    assert (huge.gpus_per_node, huge.gpu_type, huge.min_nodes) == (4, "h100", 2)
    assert huge.directives == ("--y",)
    assert loaded.site.queue_name("huge") == "huge"
    position = str(loaded.document.position(("queues", "huge", "gpus_per_node")))
    assert position.endswith("base.yaml:9:25")


def test_an_override_reaches_the_queues_that_are_like_it(home: Path) -> None:
    base = BASE.replace("cpu: {}", "long: {like: main, max_walltime: 9h}")
    loaded = site(home, "queues: {main: {gpus_per_node: 2}}\n", base)
    assert loaded.site.queues["long"].gpus_per_node == 2


def test_defaults_of_queues_count_where_a_queue_says_nothing(home: Path) -> None:
    loaded = site(
        home,
        "queue_defaults: {gpus_per_node: 2, max_nodes: 3, notes: [a]}\n"
        "queues: {b: {like: cpu, notes: {append: [b]}}}\n",
    )
    found = {name: (q.gpus_per_node, q.max_nodes) for name, q in loaded.site.queues.items()}
    assert found == {"old": (8, 3), "main": (4, 3), "cpu": (2, 3), "b": (2, 3)}
    assert loaded.site.queues["b"].notes == ("a", "b")


@each(
    ("text", "message"),
    [
        ("queues: {a: {like: nosuch}}", "s.yaml:2:20: there is no queue `nosuch` in this site; it has old, main, cpu, a"),
        ("queues: {a: {like: b}, b: {like: a}}", "`like` forms a cycle: a → b → a"),
        ("queues: {a: {like: a}}", "`like` forms a cycle: a → a"),
        ("queues: {a: {like: old}, old: null}", "there is no queue `old` in this site"),
        ("queue_defaults: {like: main}", "s.yaml:2:18: `like` is a key of a queue"),
        ("queue_defaults: {gpu: 1}", "unknown key `queue_defaults.gpu`"),
        ("queues: {a: {like: [main]}}", "`queues.a.like` must be text"),
        ("directives: {append: --x}", "`directives` must be a list"),
        ("directives: {append: [x]}", "s.yaml:2:23: `directives[2]`: 'x' does not start with '-'"),
    ],
)  # fmt: skip
def test_a_wrong_layer_is_refused(home: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        site(home, text + "\n")
    assert message in str(caught.value)


def test_a_resolved_site_is_read_again(home: Path) -> None:
    loaded = site(home, "queues: {big: {like: main, directives: {append: [--x]}}, old: null}\n")
    assert build(Site, loaded.document) == loaded.site
