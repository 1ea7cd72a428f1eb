"""`gpujobs queues`: nodes and free GPUs from recorded output of batch schedulers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gpujobs
from gpujobs.cli.main import main
from gpujobs.clusters.freequeues import FreeQueue, soonest_first
from gpujobs.config.spec import read_spec, write_spec
from gpujobs.errors import InputError
from gpujobs.schedulers import CommandResult, get_scheduler
from gpujobs.schedulers.formats import clock_seconds, memory_bytes
from gpujobs.schedulers.inventory import LiveNode
from gpujobs.schedulers.lsf_inventory import LSFInventory
from gpujobs.schedulers.slurm_inventory import gpus_in

from ..support.transcripts import recorded
from .support import make_spec

RECORDED = {
    "slurm": ("sinfo.txt", "nodes and partitions"),
    "sge": ("qstat-F.txt", "queue instances"),
    "pbs": ("03-status.txt", "nodes, json"),
    "torque": ("03-status.txt", "nodes, xml"),
    "lsf": ("hosts.txt", "hosts"),
}
SITES = {
    "slurm": "queues: {main: {gpus_per_node: 4}, short: {gpus_per_node: 4}, cpu: {name: main}}",
    "sge": "visible_devices: scheduler\nqueues: {main: {gpus_per_node: 4}, short: {gpus_per_node: 4}}",
    "pbs": "visible_devices: scheduler\nqueues: {gpuq: {gpus_per_node: 4, gpu_type: a100}, other: {gpus_per_node: 4, gpu_type: v100}}",
    "torque": "queues: {batch: {gpus_per_node: 4}}",
    "lsf": "queues: {normal: {gpus_per_node: 4}}",
}


def nodes(name: str) -> list[LiveNode]:
    inventory = get_scheduler(name).inventory
    assert inventory
    return inventory().parse_nodes(recorded(name, *RECORDED[name]))


def free(name: str) -> list[tuple[str, str, bool, int, int | None, int | None]]:
    """Return name, queue, usable, free CPUs, GPUs and free GPUs of each node."""
    return [(n.name, n.queue, n.usable, n.free_cpus, n.gpus, n.free_gpus) for n in nodes(name)]


def test_free_cpus_and_gpus_of_slurm_are_read() -> None:
    found = free("slurm")
    assert found[:2] == [("node1", "main", True, 15, 4, 1), ("node1", "short", True, 15, 4, 1)]
    assert found[-1] == ("node4", "short", False, 0, 4, 0)  # drained
    assert len(found) == 8 and nodes("slurm")[0].memory == 64 * 2**30


@pytest.mark.parametrize(
    ("shown", "free_gpus"),
    [("shard:h100:1(IDX:0)    ", 3), ("shard:h100:7(4/4,3/4,0/4,0/4)", 2)],
)  # fmt: skip
def test_gpus_with_shards_in_use_are_not_free_on_slurm(shown: str, free_gpus: int) -> None:
    """Slurm does not count them as used, and starts no job with whole GPUs on them."""
    stdout = recorded("slurm", "shards.txt", "22.05").stdout
    text = stdout.replace("shard:h100:1(IDX:0)".ljust(len(shown)), shown)
    inventory = get_scheduler("slurm").inventory
    assert inventory
    first, second = inventory().parse_nodes(CommandResult(("sinfo",), 0, text))
    assert (first.gpu_type, first.gpus, first.free_gpus) == ("h100", 4, free_gpus)
    assert (second.gpus, second.free_gpus) == (4, 3), "a job has one of its GPUs"


def test_types_and_numbers_of_gpus_of_slurm_are_read() -> None:
    text = "gpu:a100:4(S:0-1),shard:8,gpu:nvidia_a100_1g.5gb:7(IDX:0,2-5),gpu:2"
    assert gpus_in(text) == [("a100", 4), ("nvidia_a100_1g.5gb", 7), ("", 2)]
    assert gpus_in("(null)") == gpus_in("craynetwork:4") == []


def test_free_cpus_and_gpus_of_grid_engine_are_read() -> None:
    assert free("sge") == [
        ("node1", "main", True, 16, None, 4), ("node2", "main", True, 14, None, 1),
        ("node1", "short", True, 16, None, 4), ("node2", "short", True, 16, None, 1),
    ]  # fmt: skip


def test_free_cpus_and_gpus_of_pbs_are_read() -> None:
    assert free("pbs") == [("node1", "", True, 1, 4, 3), ("node2", "", True, 5, 4, 4)]
    assert {(n.gpu_type, n.memory, n.cpus) for n in nodes("pbs")} == {("a100", 32 * 2**30, 8)}


def test_free_cpus_and_gpus_of_torque_are_read() -> None:
    assert free("torque") == [("node1", "", True, 5, 4, 4), ("node2", "", True, 8, 4, 4)]


def test_gpus_of_jobs_on_torque_are_not_free() -> None:
    """pbsnodes has no GPUs in use, unless pbs_mom uses NVML. In 6.1.3 the slots of a job are a range."""
    inventory = get_scheduler("torque").inventory
    assert inventory
    nodes = recorded("torque", "queues.txt", "nodes, xml").stdout
    jobs = recorded("torque", "queues.txt", "jobs").stdout
    answers = {"pbsnodes -x": nodes, "qstat -t -f1": jobs}
    found = inventory().nodes(lambda argv: answers[" ".join(argv)])
    assert [(n.name, n.cpus, n.free_cpus, n.gpus, n.free_gpus) for n in found] == [
        ("node1", 8, 2, 4, 1), ("node2", 8, 8, 4, 4),
    ]  # fmt: skip


def free_on_lsf(**answers: str) -> list[tuple[str, int, int | None, int | None]]:
    """Return name, free CPUs, GPUs and free GPUs of each host; ``answers``: by option of bhosts."""
    own = {"w": recorded("lsf", "hosts.txt", "hosts").stdout, **answers}
    found = LSFInventory().nodes(lambda argv: own.get(argv[1].strip("-"), ""))
    return [(node.name, node.free_cpus, node.gpus, node.free_gpus) for node in found]


def test_free_cpus_and_gpus_of_lsf_are_read() -> None:
    assert free("lsf") == [("node1", "", True, 3, None, None), ("node2", "", True, 8, None, None)]
    assert free_on_lsf() == [("node1", 3, None, None), ("node2", 8, None, None)]
    ibm = recorded("lsf", "gpus.txt", "several hosts").stdout
    assert free_on_lsf(o=ibm) == [("node1", 3, 4, 1), ("node2", 8, 4, 4)]
    hosts = recorded("lsf", "hosts.txt", "hosts").stdout
    closed = hosts.replace("node2              ok    ", "node2              closed")
    assert free_on_lsf(w=closed, o=ibm)[1] == ("node2", 0, 4, 0)


def test_an_lsf_without_gpus_of_its_own_counts_the_shared_resource() -> None:
    """There, or if the first answer has no GPUs, the shared resource counts."""
    shared, ibm = (recorded("lsf", "hosts.txt", "hosts").stdout,
                   recorded("lsf", "gpus.txt", "one host").stdout)  # fmt: skip
    expected = [("node1", 3, 4, 3), ("node2", 8, 4, 4)]
    assert free_on_lsf(s=shared) == expected
    assert free_on_lsf(s=shared, o=ibm.replace("|1", "|0")) == expected
    assert free_on_lsf(s=shared, o=ibm) == [("node1", 3, 0, 0), ("node2", 8, 0, 0)]


def test_units_of_memory_and_times_are_read() -> None:
    assert [memory_bytes(text) for text in ("32gb", "1.5G", "2048kb", "512", "x")] == [
        32 * 2**30, 3 * 2**29, 2**21, 512, None,
    ]  # fmt: skip
    clocks = ("1-00:00:00", "24:00:00", "10:00", "00:30:00", "2-12", "infinite", "--")
    assert [clock_seconds(text) for text in clocks] == [
        86400, 86400, 600, 1800, 216000, None, None,
    ]  # fmt: skip


# -- the command, with programs that print the recorded output -------------------------------------
@pytest.fixture
def programs(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that is first on PATH; each call is written to `calls`."""
    folder = home / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def queues(home: Path, programs: Path, name: str, *arguments: str) -> tuple[dict[str, Any], str]:
    inventory = get_scheduler(name).inventory
    assert inventory
    command = inventory().nodes_command()[0]
    (home / "output").write_text(recorded(name, *RECORDED[name]).stdout)
    program = programs / command
    program.write_text(f"#!/bin/sh\necho {command} >> {home}/calls\ncat {home}/output\n")
    program.chmod(0o755)
    (home / "q.yaml").write_text(f"description: x\nscheduler: {name}\n{SITES[name]}\n")
    words = ["queues", "--site", "./q.yaml", *arguments]
    value = CliRunner().invoke(main, [*words, "--json"])
    assert value.exit_code == 0, value.output
    commands = 3 if name == "lsf" else 1
    assert (home / "calls").read_text().split() == [command] * commands
    return json.loads(value.stdout), CliRunner().invoke(main, words).stdout


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("slurm", {"main": (4, 3, 16, 9, 4), "short": (4, 3, 16, 9, 4), "cpu": (4, 3, 16, 9, 4)}),
        ("sge", {"main": (2, 2, None, 5, 4), "short": (2, 2, None, 5, 4)}),
        ("pbs", {"gpuq": (2, 2, 8, 7, 4), "other": (0, 0, 0, 0, 0)}),
        ("torque", {"batch": (2, 2, 8, 8, 4)}),
        ("lsf", {"normal": (2, 2, 8, 7, 4)}),
    ],
)
def test_queues_prints_what_is_free_in_each_queue(
    home: Path, programs: Path, name: str, expected: dict[str, tuple[int | None, ...]]
) -> None:
    value, text = queues(home, programs, name)
    keys = ("nodes", "usable_nodes", "gpus", "free_gpus", "most_free_gpus")
    assert {q["queue"]: tuple(q[key] for key in keys) for q in value["queues"]} == expected
    assert value["version"] == 1 and value["site"] == "q"
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines[1:]] == list(expected)


MIXED = """description: x
scheduler: slurm
defaults: {walltime: 5m}
queues:
  mixed: {name: short, gpus_per_node: 4, cpus_per_node: 16, memory_per_node: 64GiB, gpu_types: {big: h100, small: a100}}
  small: {name: main, gpus_per_node: 4, cpus_per_node: 16, memory_per_node: 64GiB, gpu_type: a100}
"""


@pytest.fixture
def mixed(home: Path, programs: Path) -> Path:
    """A folder with a site, a profile, and a Slurm: node1 and node2 have A100s, the others H100s."""
    found = recorded("slurm", *RECORDED["slurm"]).stdout
    types = ("a100", "a100", "a100", "a100", "h100", "h100", "h100", "h100")
    lines = [
        line.replace("gpu:4     ", f"gpu:{kind}:4", 1).replace(f"gpu:{used}     ", f"gpu:{kind}:{used}", 1)
        for line, kind in zip(found.splitlines(), types, strict=True)
        for used in [3 if line.startswith("node1") else 0]
    ]  # fmt: skip
    (home / "output").write_text("\n".join(lines) + "\n")
    for name, text in (("sinfo", f"cat {home}/output"), ("sbatch", ESTIMATE)):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (home / "q.yaml").write_text(MIXED)
    (home / "p.yaml").write_text("gpus: 4\nrun: ls\n")
    return home


ESTIMATE = """
day=01
while read -r line; do
    case $line in *gres=gpu:h100:*) day=02 ;; *partition=main*) day=03 ;; esac
done
echo "sbatch: Job 7 to start at 2026-11-${day}T10:00:00 using 1 processors on nodes node1" >&2
"""
"""A program: later for H100s, and later still for the queue `main`."""


def test_each_gpu_type_of_a_queue_has_a_line(mixed: Path) -> None:
    done = CliRunner().invoke(main, ["queues", "--site", "./q.yaml", "--json"])
    keys = ("queue", "gpu_type", "nodes", "usable_nodes", "gpus", "free_gpus", "most_free_gpus")
    assert [tuple(one[key] for key in keys) for one in json.loads(done.stdout)["queues"]] == [
        ("mixed", "big", 2, 1, 8, 4, 4),
        ("mixed", "small", 2, 2, 8, 5, 4),
        ("small", "a100", 2, 2, 8, 5, 4),
    ]
    text = CliRunner().invoke(main, ["queues", "--site", "./q.yaml"]).stdout
    rows = [line.split()[:2] for line in text.splitlines()[1:]]
    assert rows == [["mixed", "big"], ["mixed", "small"], ["small", "a100"]]


def test_each_gpu_type_of_a_queue_has_its_estimated_start(mixed: Path) -> None:
    done = CliRunner().invoke(main, ["queues", "--site", "./q.yaml", "--estimate"])
    assert done.exit_code == 0, done.output
    header, *rows = [line.split() for line in done.stdout.splitlines()]
    assert header[-1] == "START"
    starts = [(row[0], row[-1][:10]) for row in rows]
    assert starts == [("mixed", "2026-11-02"), ("mixed", "2026-11-01"), ("small", "2026-11-03")]


def test_types_that_are_not_reported_are_one_line(mixed: Path) -> None:
    (mixed / "output").write_text(recorded("slurm", *RECORDED["slurm"]).stdout)
    done = CliRunner().invoke(main, ["queues", "--site", "./q.yaml", "--json"])
    found = [(one["queue"], one["gpu_type"]) for one in json.loads(done.stdout)["queues"]]
    assert found == [("mixed", "big, small"), ("small", "a100")]


def free_queue(queue: str, gpu_type: str, free_gpus: int) -> FreeQueue:
    most = min(free_gpus, 4)
    return FreeQueue(queue, queue, gpu_type, 4, 2, 2, 8, free_gpus, most, 8, None)


@pytest.mark.parametrize(
    ("wanted", "first"), [("gpu_type: h100", "small"), ("gpu_type: small", "mixed"), ("", "mixed")]
)
def test_the_gpus_of_the_wanted_type_count(mixed: Path, wanted: str, first: str) -> None:
    (mixed / "s.yaml").write_text(MIXED.replace("gpu_type: a100", "gpu_type: h100"))
    queues = [
        free_queue("mixed", "h100", 0),
        free_queue("mixed", "small", 8),
        free_queue("small", "h100", 4),
    ]
    spec = make_spec(mixed, f"gpus: 4\n{wanted}\n", "./s.yaml")
    found = soonest_first(spec, queues, lambda queue: None)
    assert found.queue_order[0] == first and len(found.queue_order) == 2


@pytest.mark.parametrize(
    ("gpus", "starts", "order"),
    [
        (8, {"mixed": "2030-01-01T10:00:00", "small": "2030-01-01T10:00:01"}, ("mixed", "small")),
        (8, {"mixed": "2030-01-01T10:00:00"}, ("mixed", "small")),
        (8, {}, ("small", "mixed")),
        (2, {"mixed": "2030-01-01T10:00:00"}, ("small", "mixed")),  # enough are free: not asked for
    ],
)
def test_the_estimated_start_decides_if_no_queue_has_enough_free_gpus(
    mixed: Path, gpus: int, starts: dict[str, str], order: tuple[str, ...]
) -> None:
    queues = [free_queue("mixed", "h100", 0), free_queue("small", "a100", 2)]
    spec = make_spec(mixed, {"gpus": gpus}, "./s.yaml")
    assert soonest_first(spec, queues, starts.get).queue_order == order


@pytest.fixture
def two_queues(home: Path, programs: Path) -> Path:
    """A folder with a site of two queues, of which the first has no free GPUs, and a profile."""
    queues(home, programs, "pbs")  # the programs
    node = "gpus_per_node: 4, cpus_per_node: 4"
    (home / "q.yaml").write_text(
        "description: x\nscheduler: pbs\nvisible_devices: scheduler\ndefaults: {walltime: 1h}\n"
        f"queues: {{none: {{{node}, gpu_type: v100}}, gpuq: {{{node}, gpu_type: a100}}}}\n"
    )
    (home / "p.yaml").write_text("gpus: 4\nrun: ls\n")
    return home


def test_the_queue_with_free_gpus_is_chosen_first(two_queues: Path) -> None:
    def queue(*arguments: str) -> str:
        words = ["plan", "p.yaml", "--site", "./q.yaml", "--json", *arguments]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        return str(json.loads(result.stdout)["jobs"][0]["queue"])

    assert queue() == "none"
    assert queue("--soonest") == "gpuq"
    (two_queues / "p.yaml").write_text("gpus: 4\nrun: ls\nqueue: none\n")
    assert queue("--soonest") == "none"


def test_the_queue_with_free_gpus_is_chosen_first_in_python(two_queues: Path) -> None:
    def queue(**keywords: bool) -> str:
        return gpujobs.plan("p.yaml", site="./q.yaml", **keywords).groups[0].queue

    assert (queue(), queue(soonest=True)) == ("none", "gpuq")
    quiet = {"scheduler_options": {"dashboard_address": ":0"}}
    with gpujobs.GPUPBSCluster("./q.yaml", soonest=True, **quiet) as cluster:
        assert "#PBS -q gpuq\n" in cluster.job_script()


def test_the_former_options_name_the_new_ones(two_queues: Path) -> None:
    with pytest.raises(InputError, match=r"prefer: has no meaning here\n.*use soonest=True"):
        gpujobs.GPUPBSCluster("./q.yaml", prefer="soonest")
    words = ["submit", "p.yaml", "--site", "./q.yaml"]
    for option, hint in {
        "--prefer=soonest": "use --soonest",
        "--dry-run": "use `gpujobs render PROFILE`",
    }.items():
        done = CliRunner().invoke(main, [*words, option])
        assert done.exit_code == 2 and hint in done.stderr and done.stdout == ""
    done = CliRunner().invoke(main, ["explain", "p.yaml", "walltime", "--site", "./q.yaml"])
    assert done.exit_code == 2 and "use `gpujobs plan PROFILE --verbose`" in done.stderr


def test_the_order_of_queues_is_stored(home: Path) -> None:
    spec = replace(make_spec(home, "gpus: 4\n", "./s.yaml"), queue_order=("b", "a"))
    write_spec(spec, home / "spec.json")
    assert read_spec(home / "spec.json").queue_order == ("b", "a")


def test_a_missing_batch_scheduler_exits_with_3(home: Path) -> None:
    (home / "q.yaml").write_text(
        f"description: x\nscheduler: slurm\ncommands: {{sinfo: /nosuch/sinfo}}\n{SITES['slurm']}\n"
    )
    done = CliRunner().invoke(main, ["queues", "--site", "./q.yaml"])
    assert done.exit_code == 3 and "/nosuch/sinfo was not found" in done.stderr


def test_this_machine_is_one_queue_of_one_node(home: Path) -> None:
    done = CliRunner().invoke(main, ["queues", "--site", "local", "--json"])
    (found,) = json.loads(done.stdout)["queues"]
    assert found["queue"] == "local" and found["usable_nodes"] == 1 and found["free_cpus"] > 0
