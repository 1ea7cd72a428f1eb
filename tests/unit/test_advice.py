"""What jobs requested and used, and the sizes that were enough."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpujobs.cli.plan_text import plan_json, plan_text
from gpujobs.cli.usage_text import advice_lines, page, usage_json, usage_text
from gpujobs.clusters.folderstate import read_state
from gpujobs.clusters.history import HostSample, HostSamples, read_history
from gpujobs.clusters.submit import new_record
from gpujobs.clusters.usage import UsageReport
from gpujobs.injob.archive import build
from gpujobs.injob.folder import Ended, EndKind
from gpujobs.injob.names import ARCHIVE

from ..support.processes import stop, until
from .report_data import HOUR, RECORD, START, history, usage
from .support import SLURM, made_plan

GIB = 2**30
RUNS = {0: (0.2, 3.0), 1: (0.2, 1.25), 2: (1.75, 3.0)}


def host(job: int, cores: float, memory: int, node: str = "node1") -> HostSamples:
    """Return samples of every six minutes of a job."""
    start, end = RUNS[job]
    times = [start + n / 10 for n in range(1, round((end - start) * 10) + 1)]
    samples = [HostSample(START + t * HOUR, 360, cores * 360, memory) for t in times]
    return HostSamples(job, node, tuple(samples))


def sized(*hosts: HostSamples, **sizes: Any) -> UsageReport:
    group = replace(RECORD.groups[0], cpus_per_job=16, memory_per_job=64 * GIB, **sizes)
    return usage(replace(history(), hosts=hosts), replace(RECORD, groups=(group,)))


def keys(found: UsageReport) -> dict[str, float]:
    sizes: Any = usage_json(found)["sizes"]
    return {size["key"]: size["enough"] for size in sizes if size["enough"] is not None}


def test_the_largest_job_decides() -> None:
    found = sized(host(0, 2.0, 10 * GIB), host(1, 5.9, 8 * GIB), host(2, 1.0, 20 * GIB))
    assert keys(found) == {"gpu_memory": 10 * GIB, "cpus_per_job": 6, "memory_per_job": 30 * GIB}
    text, html = usage_text(found), page(found)
    assert "less would have been enough: cpus_per_job: 6, memory_per_job: 30GiB\n" in text
    assert "GPUs with 10GiB are enough: another `queue`" in text
    assert "memory: 1.5 times the peak" in text
    for cell in ("CPUs of a job", "16", "2.5 on average, up to 5.9", "up to 20GiB"):
        assert f"<td>{cell}</td>" in html


def test_nodes_of_a_job_are_equal_and_the_largest_counts() -> None:
    jobs = [host(job, 1.0, 2 * GIB, node) for job in RUNS for node in ("a", "b")]
    busy = [host(0, 3.0, 4 * GIB, "a"), *jobs[1:]]
    found = sized(*busy, nodes_per_job=2)
    assert keys(found)["cpus_per_job"] == 6 and keys(found)["memory_per_job"] == 12 * GIB
    assert keys(sized(*busy[1:], nodes_per_job=2)) == {}  # a node without samples


def test_a_job_without_samples_gets_no_advice() -> None:
    found = sized(host(0, 1.0, GIB), host(1, 1.0, GIB))
    assert keys(found) == {}
    assert advice_lines(found) == ["no advice about the size: too few samples of job 2"]
    assert "not sampled" in usage_text(found)
    few = replace(host(2, 1.0, GIB), samples=host(2, 1.0, GIB).samples[:3])
    assert keys(sized(host(0, 1.0, GIB), host(1, 1.0, GIB), few)) == {}


def test_a_cluster_whose_workers_never_connected_gets_no_advice() -> None:
    found = usage(replace(history(), connections=()), sized().cluster.record)
    assert "CPUs of a job" in usage_text(found) and advice_lines(found) == []


def test_a_size_that_fits_gets_no_other_advice() -> None:
    hosts = [host(job, 15.8, 50 * GIB) for job in RUNS]
    found = sized(*hosts)
    assert keys(found) == {"gpu_memory": 10 * GIB}
    full = replace(history(), hosts=tuple(hosts), gpus=())
    fits = usage(full, replace(RECORD, groups=found.cluster.record.groups))
    assert advice_lines(fits) == ["the size fits"]


def test_a_pool_says_nothing_about_the_memory_that_was_needed() -> None:
    hosts = [host(job, 15.8, 50 * GIB) for job in RUNS]
    found = sized(*hosts, gpu_pool=True)
    assert keys(found) == {}
    assert "workers take GPU memory in advance" in advice_lines(found)[0]
    assert "up to 8GiB" in usage_text(found) and "GPUs with" not in usage_text(found)


def test_gpus_without_work_are_not_needed() -> None:
    past, hosts = history(), tuple(host(job, 1.0, GIB) for job in RUNS)

    def idle(gpus: slice, used: int = 2**28) -> UsageReport:
        devices = list(past.gpus)
        devices[gpus] = [
            replace(gpu, samples=tuple(replace(one, busy=0, used=used) for one in gpu.samples))
            for gpu in devices[gpus]
        ]
        return usage(replace(past, gpus=tuple(devices), hosts=hosts))

    none = keys(idle(slice(0, 6)))
    assert none["gpus"] == 0 and "gpu_memory" not in none
    assert keys(idle(slice(1, 6)))["gpus"] == 1
    assert "gpus" not in keys(idle(slice(0, 0)))
    assert "gpus" not in keys(idle(slice(0, 6), used=2**31))  # allocated from the first sample on


def test_a_gpu_on_which_a_process_allocated_memory_is_used() -> None:
    """Short computations are in no sample: NVML says 0 % then."""
    past, hosts = history(), tuple(host(job, 1.0, GIB) for job in RUNS)

    def growing(growth: int) -> UsageReport:
        devices = []
        for gpu in past.gpus:
            numbered = enumerate(gpu.samples)
            samples = [replace(one, busy=0, used=2**28 + n * growth) for n, one in numbered]
            devices.append(replace(gpu, samples=tuple(samples)))
        return usage(replace(past, gpus=tuple(devices), hosts=hosts))

    assert "gpus" not in keys(growing(2**24)) and keys(growing(1))["gpus"] == 0


@pytest.mark.parametrize(
    ("kind", "run", "advised"),
    [
        (EndKind.DONE, ("python", "a.py"), True),
        (EndKind.FAILED, ("python", "a.py"), False),
        (EndKind.WALLTIME, ("python", "a.py"), False),
        (EndKind.CANCELLED, ("python", "a.py"), False),
        (EndKind.CANCELLED, (), True),  # as interactive work ends
        (EndKind.FAILED, (), False),
    ],
)
def test_only_a_cluster_that_has_succeeded_gets_advice(
    kind: EndKind, run: tuple[str, ...], advised: bool
) -> None:
    hosts = tuple(host(job, 1.0, GIB) for job in RUNS)
    ended = Ended(kind, 0 if kind is EndKind.DONE else 1, time=START + 3 * HOUR)
    found = usage(replace(history(), hosts=hosts), replace(RECORD, run=run), ended)
    assert bool(advice_lines(found)) is advised and bool(keys(found)) is advised


def test_the_keys_of_the_json_are_documented() -> None:
    text = Path(__file__).parents[2].joinpath("docs/json.md").read_text()
    _, _, text = text.partition("## report")
    of_report, _, text = text.partition("Keys of a job:")
    of_job, _, _ = text.partition("\n#")
    found: Any = usage_json(sized())
    assert first_column(of_report) == set(found)
    assert first_column(of_job) >= set(found["jobs"][0])
    (sizes,) = (row for row in of_report.splitlines() if row.startswith("| `sizes`"))
    assert set(found["sizes"][0]) <= set(re.findall(r"`(\w+)`", sizes))


def first_column(table: str) -> set[str]:
    rows = (row.split("|")[1] for row in table.splitlines() if row.startswith("| `"))
    return set(re.findall(r"`(\w+)`", " ".join(rows)))


CHARGED = SLURM.replace(
    "gpus_per_node: 4", "charge: {per_gpu_hour: 1.5, unit: SU}, gpus_per_node: 4"
)


def test_a_plan_prints_the_most_that_its_jobs_cost(home: Path) -> None:
    (home / "s.yaml").write_text(CHARGED)
    plan = made_plan(home, "gpus: 8\nwalltime: 90m\n")
    assert re.search(r"\ncharge +at most 18 SU\n", plan_text(plan, "svd-0000"))
    assert plan_json(plan, "svd-0000")["charges"] == {"SU": 18.0}
    twice = made_plan(home, "gpus: 8\nwalltime: 90m\nrun: [a]\nrequeue: 1\n")
    assert twice.charges == {"SU": 36.0}
    record = new_record(plan, "svd-0000")
    assert (record.groups[0].charge, record.groups[0].charge_unit) == (1.5, "SU")


def test_a_report_prints_the_cost_of_the_granted_hours() -> None:
    found = sized(charge=1.5, charge_unit="SU")
    assert usage_json(found)["charges"] == {"SU": pytest.approx(1.5 * found.hours.granted)}
    cost = f"{round(1.5 * found.hours.granted, 2):g} SU"
    assert re.search(rf"\n  charge +{cost} for the granted GPU hours\n", usage_text(found))
    assert f"{cost}" in page(found)
    assert usage_json(sized())["charges"] == {} and "charge" not in usage_text(sized())


def test_a_charge_below_a_hundredth_is_not_free(home: Path) -> None:
    (home / "s.yaml").write_text(CHARGED.replace("1.5", "0.001"))
    plan = made_plan(home, "gpus: 1\nwalltime: 30m\n")
    assert re.search(r"\ncharge +at most 0.01 SU\n", plan_text(plan, "svd-0000"))


def test_queues_with_different_charges_are_not_equal(home: Path) -> None:
    other = "  other: {gpus_per_node: 4, charge: {per_gpu_hour: 2, unit: SU}, like: gpu}\n"
    (home / "s.yaml").write_text(CHARGED.replace("queues:\n", f"queues:\n{other}"))
    plan = made_plan(home, "gpus: 1\nwalltime: 1h\nqueue: [gpu, other]\n")
    assert any("differs from gpu: charge" in note for note in plan.notes), plan.notes


LOAD = """
import sys, time
kept = bytearray(300 * 2**20) if "memory" in sys.argv else b""
open("loaded", "x").close()
end = time.monotonic() + 60
while time.monotonic() < end:
    if "cpu" not in sys.argv:
        time.sleep(0.1)
    else:
        print(time.process_time(), flush=True)
"""


@pytest.mark.parametrize("kind", ["cpu", "memory", "idle"])
def test_known_loads_are_measured_within_ten_percent(tmp_path: Path, kind: str) -> None:
    """Of all processes with the environment of the job, and of no other job."""
    (tmp_path / ARCHIVE).write_bytes(build())
    own = {"GPUJOBS_FOLDER": str(tmp_path), "GPUJOBS_JOB": "3"}
    sampler = [sys.executable, str(tmp_path / ARCHIVE), "usage", "--devices="]
    output = tmp_path / "cpu"
    with output.open("wb") as file:
        command = [sys.executable, "-c", LOAD, kind]
        load = subprocess.Popen(command, env=os.environ | own, stdout=file, cwd=tmp_path)
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    others = os.environ | own | {"GPUJOBS_JOB": "4"}
    other = subprocess.Popen(command, env=others, stdout=subprocess.DEVNULL, cwd=elsewhere)
    process = subprocess.Popen(sampler, env={**os.environ, **own})
    try:
        until((tmp_path / "loaded").exists, 60, "the load")
        until(lambda: len(samples(tmp_path)) >= 1, 60, "a sample")
        spent, first = cpu_time(load.pid), len(samples(tmp_path))
        until(lambda: len(samples(tmp_path)) >= first + 4, 60, "more samples")
        spent = cpu_time(load.pid) - spent
        found = samples(tmp_path)[first : first + 4]
        own_time = cpu_time(process.pid)
    finally:
        for one in (process, load, other):
            stop(one)
    measured = sum(sample.cpu for sample in found)
    seconds = sum(sample.seconds for sample in found)
    memory = found[-1].memory
    if kind == "cpu":
        assert measured == pytest.approx(spent, rel=0.1, abs=0.05)
    else:
        assert measured < 0.1 * seconds + own_time
    if kind == "memory":
        assert 300 * 2**20 < memory < 360 * 2**20
    else:
        assert 0 < memory < 60 * 2**20


def samples(folder: Path) -> tuple[HostSample, ...]:
    return next((one.samples for one in read_history(folder, read_state(folder).jobs).hosts), ())


def cpu_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
