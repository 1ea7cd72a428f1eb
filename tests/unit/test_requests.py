"""The numbers that a job requests are those that `plan` prints and the workers get."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from gpujobs.cli.plan_text import plan_text
from gpujobs.config import placeholders
from gpujobs.planning.hostmemory import MemoryRequest
from gpujobs.planning.render import JobRoles, commands
from gpujobs.planning.shape import JobShape
from gpujobs.text import number_text, size_text

from .support import error_of, made_plan

GIB, MIB = 2**30, 2**20
SGE = """\
description: test
scheduler: sge
request: ["-pe smp {{cpus_per_job}}", "-l gpu={{gpus_per_job}}", "-l {memory}"]
cpu_request: ["-pe smp {{cpus_per_job}}", "-l {memory}"]
visible_devices: scheduler
queues: {{gpu: {{gpus_per_node: 4, cpus_per_node: 64, memory_per_node: 124GiB}}}}
defaults: {{walltime: 1h, queue: gpu}}
"""
PER_SLOT = "h_vmem={memory_per_cpu:G}G"


def site(home: Path, memory: str, *changes: str) -> None:
    text = SGE.format(memory=memory)
    for change in changes:
        text = text.replace(*change.split(" -> "))
    (home / "s.yaml").write_text(text)


def shape(gpus: int, cpus: int) -> JobShape:
    return JobShape(
        jobs=1,
        nodes=1,
        gpus=gpus,
        cpus=cpus,
        memory=None,
        workers=gpus,
        worker_threads=1,
        worker_memory=None,
    )


def test_all_slots_together_request_at_most_the_gpus() -> None:
    from hypothesis import given, settings  # half a second, in each test process if it stood above
    from hypothesis import strategies as st

    @settings(deadline=None)  # the machine may be busy
    @given(st.integers(1, 64), st.integers(1, 4096))
    def check(gpus: int, cpus: int) -> None:
        text = placeholders.expand("{gpus_per_cpu}", shape(gpus, cpus).values())
        assert re.fullmatch(r"\d+(\.\d{1,6})?", text)
        total = Fraction(text) * cpus
        assert total <= gpus
        assert total > gpus - Fraction(cpus, 10**6) > gpus - 1

    check()


def test_the_memory_of_a_job_is_the_memory_that_is_written() -> None:
    from hypothesis import given
    from hypothesis import strategies as st

    names, units = st.sampled_from(["node", "job", "cpu", "gpu"]), st.sampled_from("KMG")

    @given(st.integers(2**20, 2**42), st.integers(1, 8), st.integers(1, 128), names, units)
    def check(memory: int, nodes: int, per_node: int, name: str, unit: str) -> None:
        text = f"mem={{memory_per_{name}:{unit}}}"
        parts = {"node": nodes, "job": 1, "cpu": nodes * per_node, "gpu": nodes * 4}[name]
        request = MemoryRequest((text,), nodes=nodes, cpus=nodes * per_node, gpus=nodes * 4)
        step = {"K": 2**10, "M": 2**20, "G": 2**30}[unit] * parts
        for n_bytes in (request.at_most(memory), request.at_least(memory)):
            if n_bytes < step:
                continue  # refused when it is written
            values = JobShape(
                jobs=1, nodes=nodes, gpus=nodes * 4, cpus=nodes * per_node, memory=n_bytes,
                workers=nodes * 4, worker_threads=1, worker_memory=None,
            ).values()  # fmt: skip
            written = int(placeholders.expand(text, values)[4:])
            assert written * step == n_bytes
            assert abs(n_bytes - memory) < step
        assert request.at_most(memory) <= memory <= request.at_least(memory)

    check()


def test_memory_of_each_slot_is_rounded_once(home: Path) -> None:
    site(home, PER_SLOT)
    made = made_plan(home, "gpus: 4\n")
    assert "-l h_vmem=1G" in made.groups[0].lines  # 124 GiB of 64 slots
    assert made.groups[0].shape.memory == 64 * GIB
    assert made.groups[0].shape.worker_memory == 16 * GIB
    workers = commands(made, made.groups[0], JobRoles())["workers"]
    assert "--memory-limit=16GiB" in workers
    text = plan_text(made, "x-0000")
    assert "64GiB" in text and "memory limit 16GiB" in text and "124GiB" not in text


def test_several_units_agree_on_one_number(home: Path) -> None:
    site(home, "h_vmem={memory_per_cpu:M}M,tmp={memory_per_job:G}G")
    made = made_plan(home, "gpus: 3\n")  # 93 GiB and 48 slots
    assert "-l h_vmem=1984M,tmp=93G" in made.groups[0].lines
    site(home, "h_vmem={memory_per_cpu:M}M,tmp={memory_per_job:G}G", "124GiB -> 125GiB")
    made = made_plan(home, "gpus: 3\n")  # 93.75 GiB
    assert "-l h_vmem=1984M,tmp=93G" in made.groups[0].lines
    assert made.groups[0].shape.memory == 93 * GIB


def test_wanted_memory_of_cpu_workers_is_rounded_up(home: Path) -> None:
    site(home, PER_SLOT)
    made = made_plan(home, "gpus: 0\nworkers: {threads: 8, memory: 30GiB}\n")
    assert "-l h_vmem=4G" in made.groups[0].lines
    assert (made.groups[0].shape.memory, made.groups[0].shape.worker_memory) == (32 * GIB, 30 * GIB)
    message = error_of(home, "gpus: 0\nworkers: {threads: 60, memory: 122GiB}\n")
    assert "1 worker of 122GiB; the job has 120GiB on a node" in message


def test_a_head_of_its_own_requests_its_own_memory(home: Path) -> None:
    site(home, PER_SLOT, "}} -> }, cpu: {cpus_per_node: 64, memory_per_node: 124GiB}}")
    made = made_plan(home, "gpus: 4\nhead: {queue: cpu, cpus: 3}\n")
    assert made.head and made.head.shape.memory == 3 * GIB and "-l h_vmem=1G" in made.head.lines


def test_stated_memory_of_a_job_is_rounded_up(home: Path) -> None:
    site(home, PER_SLOT)
    made = made_plan(home, "gpus: 4\nmemory_per_job: 33GiB\n")
    assert "-l h_vmem=1G" in made.groups[0].lines
    assert made.groups[0].shape.memory == 64 * GIB
    assert made.groups[0].shape.worker_memory == 16 * GIB


def test_wanted_memory_must_fit_the_memory_that_is_written(home: Path) -> None:
    site(home, PER_SLOT)
    message = error_of(home, "gpus: 4\nworkers: {memory: 20GiB}\n")
    assert "the job has 64GiB on a node" in message and "at most 16GiB" in message


def test_less_than_one_unit_is_refused(home: Path) -> None:
    site(home, PER_SLOT, "124GiB -> 32GiB")
    assert "memory_per_cpu is less than 1 G" in error_of(home, "gpus: 4\n")


def test_a_worker_limit_is_in_whole_mib(home: Path) -> None:
    site(home, "h_vmem={memory_per_job:K}K", "124GiB -> 1000001KiB")
    made = made_plan(home, "gpus: 3\n")
    limit = made.groups[0].shape.worker_memory
    assert limit == 244 * MIB
    assert (
        f"--memory-limit={size_text(limit)}"
        in commands(made, made.groups[0], JobRoles())["workers"]
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.0, "1"), (0.5, "0.5"), (1234567.0, "1234567"), (0.000001, "0.000001"), (1234567.25, "1234567.25")],
)  # fmt: skip
def test_numbers_keep_their_digits(number: float, text: str) -> None:
    assert number_text(number) == text


def test_resources_keep_their_digits(home: Path) -> None:
    site(home, PER_SLOT)
    made = made_plan(home, "gpus: 1\nworkers: {resources: {MEMORY: 1234567, X: 0.25}}\n")
    workers = commands(made, made.groups[0], JobRoles())["workers"]
    assert "'--resources=MEMORY=1234567 X=0.25'" in workers
