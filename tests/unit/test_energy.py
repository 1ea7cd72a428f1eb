"""The energy of GPUs: from NVML's counter to the report and its charges."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpujobs.cli.plan_text import plan_text
from gpujobs.cli.usage_text import page, usage_json, usage_text
from gpujobs.clusters.history import GpuSamples, History, gpu_samples
from gpujobs.clusters.submit import new_record
from gpujobs.injob.archive import build
from gpujobs.injob.names import ARCHIVE
from gpujobs.injob.sampler import EnergyMeter

from ..support.cli import NVML
from ..support.processes import stop, until
from .report_data import GROUPED, RECORD, grouped_history, history, usage
from .support import SLURM, error_of, made_plan

WATTS = {"GPU-a-0": 700.0, "GPU-a-1": 300.0}


def powered(past: History, watts: dict[str, float]) -> History:
    """Return a history in which these GPUs have this power."""

    def with_energy(gpu: GpuSamples) -> GpuSamples:
        if gpu.uuid not in watts:
            return gpu
        own = (replace(one, energy=watts[gpu.uuid] * one.seconds) for one in gpu.samples)
        return replace(gpu, samples=tuple(own))

    return replace(past, gpus=tuple(map(with_energy, past.gpus)))


# -- counted -----------------------------------------------------------------------------------------
def lines_of(folder: Path) -> list[dict[str, Any]]:
    files = (folder / "usage").glob("*.jsonl")
    lines = (line for file in files for line in file.read_text().splitlines() if line)
    return [found for line in lines if "seconds" in (found := json.loads(line))]


@pytest.mark.parametrize("mig", ["", "-,2"])
def test_the_sampler_counts_joules_of_gpus_that_have_a_counter(tmp_path: Path, mig: str) -> None:
    (tmp_path / ARCHIVE).write_bytes(build())
    own = {"GPUJOBS_FOLDER": str(tmp_path), "GPUJOBS_JOB": "0", "PYTHONPATH": str(NVML)}
    own |= {"FAKE_NVML_WATTS": "400,-" if not mig else "400,400"}
    if mig:
        own["FAKE_NVML_MIG"] = mig
    words = [sys.executable, str(tmp_path / ARCHIVE), "usage", "--devices=0,1"]
    process = subprocess.Popen(words, env={**os.environ, **own})
    try:
        until(lambda: len(lines_of(tmp_path)) >= 3, 60, "samples")
    finally:
        stop(process)
    for line in lines_of(tmp_path):
        joules, nothing = line["energy"]
        assert joules == pytest.approx(400 * line["seconds"], rel=0.15) and nothing is None


def test_a_gpu_is_never_more_than_busy() -> None:
    """Else its idle energy would be negative."""
    header = {"gpus": [{"uuid": "GPU-1", "memory": 80}]}
    lines = [
        {"time": 9.0, "seconds": 1.0, "busy": [busy], "used": [1], "energy": [400.0]}
        for busy in (101, -1, float("nan"), 100, 0)
    ]
    (gpu,) = gpu_samples(0, "n", [header, *lines])  # type: ignore[list-item]
    assert [sample.busy for sample in gpu.samples] == [None, None, None, 100, 0]


def test_a_counter_that_starts_again_counts_nothing_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(NVML))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("FAKE_NVML_WATTS", "1000")
    monkeypatch.setenv("FAKE_NVML_RELOADED", str(tmp_path / "reloaded"))
    meter = EnergyMeter(0)
    assert (meter.measure() or -1) >= 0
    (tmp_path / "reloaded").write_text(str(time.monotonic()))
    assert meter.measure() is None
    found = meter.measure()
    assert found is not None and 0 <= found < 60_000


def test_lines_of_an_older_gpujobs_have_no_energy() -> None:
    header = {"gpus": [{"uuid": "GPU-a", "memory": 8}]}
    old = {"time": 7.0, "seconds": 1.0, "busy": [50], "used": [3]}
    (gpu,) = gpu_samples(0, "n", [header, old, {**old, "energy": [9.5]}, {**old, "energy": [None]}])  # type: ignore[list-item]
    assert [one.energy for one in gpu.samples] == [None, 9.5, None]


# -- reported ----------------------------------------------------------------------------------------
def test_a_report_has_energy_idle_energy_and_mean_power() -> None:
    found = usage(powered(history(), WATTS))
    json_of: Any = usage_json(found)
    expected = {"kwh": 2.8, "idle_kwh": 0.3 * 2.8 / 2, "mean_power": 500}
    assert json_of["energy"] == pytest.approx(expected)
    assert [job["energy"] for job in json_of["jobs"]] == [pytest.approx(expected), None, None]
    assert json_of["jobs"][0]["devices"][0]["energy"]["mean_power"] == pytest.approx(700)
    text = usage_text(found)
    meaning = "0.42 kWh of it idle, 500 W a GPU; 4 GPUs without a counter"
    assert f"\n  energy     2.80 kWh {meaning}\n" in text
    assert re.search(r"^JOB .*ENERGY", text, re.M) and re.search(r"^0 .* 2.80 kWh", text, re.M)
    assert "2.80 kWh" in page(found)


def test_workers_that_share_a_gpu_have_its_energy_once() -> None:
    past = powered(history(), WATTS)
    twice = tuple(replace(one, worker=f"{one.worker}-b") for one in past.connections)
    found = usage(replace(past, connections=(*past.connections, *twice)))
    assert found.energy and found.energy.kwh == pytest.approx(2.8)


def test_each_group_has_its_energy() -> None:
    found = usage(powered(grouped_history(), WATTS), GROUPED)
    fit, prep = found.group_energy["fit"], found.group_energy["prep"]
    assert fit and fit.kwh == pytest.approx(2.8) and prep is None
    assert re.search(r"^fit .* 2.80 kWh$", usage_text(found), re.M)
    groups: Any = usage_json(found)["groups"]
    assert groups[0]["energy"]["kwh"] == pytest.approx(2.8) and groups[1]["energy"] is None


def test_gpus_without_a_counter_say_so() -> None:
    text = usage_text(usage())
    assert "energy     unknown the GPUs have no counter" in text and "kWh" not in text
    sliced = tuple(replace(gpu, uuid=f"MIG-{gpu.uuid}") for gpu in history().gpus)
    text = usage_text(usage(replace(history(), gpus=sliced)))
    assert "energy     unknown not available for MIG" in text
    assert usage_json(usage())["energy"] is None


# -- charged -----------------------------------------------------------------------------------------
CHARGED = SLURM.replace("gpus_per_node: 4", "charge: {per_kwh: 0.5, unit: EUR}, gpus_per_node: 4")


def test_a_plan_prints_no_price_of_energy_and_the_report_does(home: Path) -> None:
    (home / "s.yaml").write_text(CHARGED)
    plan = made_plan(home, "gpus: 8\nwalltime: 90m\n")
    assert plan.charges == {} and "charge" not in plan_text(plan, "svd-0000")
    (group,) = new_record(plan, "svd-0000").groups
    assert (group.charge, group.energy_charge, group.charge_unit) == (0, 0.5, "EUR")
    own = {"energy_charge": 0.5, "charge_unit": "EUR"}
    record = replace(RECORD, groups=tuple(replace(one, **own) for one in RECORD.groups))  # type: ignore[arg-type]
    found = usage(powered(history(), WATTS), record)
    assert usage_json(found)["charges"] == {"EUR": pytest.approx(1.4)}
    assert "\n  charge     1.4 EUR for the sampled energy\n" in usage_text(found)
    assert usage_json(usage(history(), record))["charges"] == {}


def test_a_charge_has_one_amount(home: Path) -> None:
    for charge in ("{unit: EUR}", "{unit: EUR, per_kwh: 1, per_gpu_hour: 1}"):
        (home / "s.yaml").write_text(CHARGED.replace("{per_kwh: 0.5, unit: EUR}", charge))
        assert "needs one of `per_gpu_hour` and `per_kwh`" in error_of(home, {"gpus": 1})
