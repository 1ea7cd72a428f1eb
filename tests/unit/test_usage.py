"""Where GPU hours went: samples, history and the numbers of `gpujobs report`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.cli.report_page import page
from gpujobs.cli.usage_text import hours_text, usage_line, usage_text
from gpujobs.clusters.gpuhours import make_usage
from gpujobs.clusters.history import (
    Connection,
    History,
    connections,
    read_history,
    read_latest,
)
from gpujobs.clusters.ledger import Ledger
from gpujobs.clusters.records import Target
from gpujobs.clusters.report import JobPhase
from gpujobs.clusters.usage import usage_json
from gpujobs.injob.archive import build
from gpujobs.injob.names import ARCHIVE
from gpujobs.injob.usage import interval
from gpujobs.schedulers import JobState

from ..support.cli import NVML
from ..support.processes import stop, until
from .report_data import HOUR, NAME, REASON, RECORD, START, history, usage


# -- numbers ---------------------------------------------------------------------------------------
def test_gpu_hours() -> None:
    hours = usage().hours
    assert hours.asked == 3 * 2 * 4
    assert hours.granted == pytest.approx(2 * (2.8 + 1.05 + 1.25))
    assert hours.connected == pytest.approx(2 * (2.75 + 1.0 + 1.0))
    assert hours.sampled == pytest.approx(2 * (2.8 + 1.0 + 1.2))
    assert hours.busy == pytest.approx(2.8 * 1.5 + 1.0 * 1.0 + 1.2 * 2)
    assert hours.idle == pytest.approx(hours.sampled - hours.busy)


def test_a_job_that_failed_and_its_replacement() -> None:
    found = usage()
    (failed,) = found.failures
    assert (failed.report.number, failed.replaced_by) == (1, 2)
    assert failed.report.reason == REASON
    lost = [(START + 0.25 * HOUR, START + 1.25 * HOUR)] * 2
    assert [(one.since, one.until) for one in failed.connections] == lost
    assert found.jobs[2].submitted == START + 1.5 * HOUR
    assert found.jobs[2].served == START + 2 * HOUR


def test_a_job_that_still_exits_after_the_end_of_its_cluster_has_not_failed() -> None:
    found = usage().cluster
    closing = replace(found.jobs[2], phase=JobPhase.LOST, state=JobState.RUNNING)
    jobs = (*found.jobs[:2], closing)
    past = history()
    del past.ended[2]  # type: ignore[attr-defined]
    failures = make_usage(replace(found, jobs=jobs), past, START + 3 * HOUR).failures
    assert [job.report.number for job in failures] == [1]
    running = replace(found, jobs=jobs, folder=replace(found.folder, ended=None))
    failures = make_usage(running, past, START + 3 * HOUR).failures
    assert [job.report.number for job in failures] == [1, 2]


def test_workers_against_the_target() -> None:
    found = usage()
    assert found.targets == [(START, 2), (START + 60, 4)]
    times = [(round((time - START) / HOUR, 2), number) for time, number in found.workers]
    assert times == [(0.25, 4), (1.25, 2), (2.0, 4), (3.0, 0)]
    unchanged = replace(RECORD, targets=())
    assert usage(record=unchanged).targets == [(START, 4)]


def test_the_line_of_submit() -> None:
    assert usage_line(usage()) == "4 GPUs x 2.5 h = 10.2 GPU h, 76 % busy"
    without = replace(history(), gpus=())
    assert usage_line(usage(without)) == "4 GPUs x 2.5 h = 10.2 GPU h"
    assert usage_line(usage(History())) == ""
    cpus = replace(RECORD, groups=(replace(RECORD.groups[0], gpus_per_job=0),))
    assert usage_line(usage(record=cpus)) == ""


def test_short_times() -> None:
    hours = {0.002: "7 GPU s", 0.5: "30 GPU min", 1.99: "119 GPU min", 2.04: "2.0 GPU h"}
    assert {number: hours_text(number) for number in hours} == hours


def test_a_job_without_an_exit_record_ends_with_its_last_sign() -> None:
    past = history()
    ends = {number: end for number, end in past.ended.items() if number != 1}
    assert usage(replace(past, ended=ends)).jobs[1].ended == START + 1.25 * HOUR


def test_json_has_the_numbers() -> None:
    found = json.loads(json.dumps(usage_json(usage())))
    assert found["version"] == 1 and found["id"] == NAME
    assert found["busy"] == pytest.approx(0.76)
    assert found["failures"] == [1]
    assert [job["replaced_by"] for job in found["jobs"]] == [None, 2, None]
    assert [gpu["busy"] for gpu in found["jobs"][0]["devices"]] == [pytest.approx(1), 0.5]


def test_text_names_the_replacement() -> None:
    text = usage_text(usage(replace(history(), problems={0: "NVMLError: no driver"})))
    assert "replaced by job 2" in text and "GPUs were not sampled: NVMLError" in text


# -- history ---------------------------------------------------------------------------------------
def test_connections_of_a_worker_that_comes_again() -> None:
    events = [
        {"time": 1, "event": "connected", "worker": "a"},
        {"time": 2, "event": "disconnected", "worker": "a"},
        {"time": 3, "event": "connected", "worker": "a"},
        {"time": 4, "event": "disconnected", "worker": "b"},
    ]
    assert list(connections(events)) == [Connection("a", 1, 2), Connection("a", 3, None)]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    assert read_history(tmp_path) == History()
    (tmp_path / "usage").mkdir()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "0.started").write_text('{"started": 5.0}')
    (tmp_path / "jobs" / "0.json").write_text('{"exit_code": 0, "started": 5, "ended": 9}')
    (tmp_path / "jobs" / "1.json").write_text('{"exit_')
    sample = {"time": 7, "seconds": 1, "busy": [None], "used": [3]}
    lines = ['{"gpus": [{"uuid": "GPU-a", "memory": 8}]}', json.dumps(sample), '{"time": 8, "bu']
    (tmp_path / "usage" / "0-node-1.example.jsonl").write_text("\n".join(lines))
    found = read_history(tmp_path)
    assert (found.started, found.ended) == ({0: 5.0}, {0: 10.0})  # rounded up
    (gpu,) = found.gpus
    assert (gpu.job, gpu.node, gpu.uuid, len(gpu.samples)) == (0, "node-1.example", "GPU-a", 1)


def test_the_ledger_remembers_targets(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    record = replace(RECORD, targets=())
    ledger.add(record)
    ledger.update(record.id, notes=("a note",))
    assert ledger.get(record.id).targets == ()
    ledger.update(record.id, groups=record.with_target("", 8))
    first, second = ledger.get(record.id).targets
    assert first == Target(START, 4) and second.workers == 8


# -- samples ---------------------------------------------------------------------------------------
def test_a_long_job_has_few_samples() -> None:
    assert interval(0) == 1 and interval(3600) == interval(86400) == 15
    assert interval(2 * 86400) == 30
    age, lines = 0.0, 0
    while age < 30 * 86400:
        age += interval(age)
        lines += 1
    assert lines < 30_000


def test_sampler_and_its_file(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(build())
    environ = {**os.environ, "PYTHONPATH": str(NVML), "FAKE_NVML_UTILIZATION": "75,25"}
    environ |= {"GPUJOBS_FOLDER": str(tmp_path), "GPUJOBS_JOB": "3", "SLURMD_NODENAME": "node1"}
    argv = [sys.executable, str(tmp_path / ARCHIVE), "usage", "--devices=0,1"]
    process = subprocess.Popen(argv, env=environ)
    try:
        until(lambda: len(read_latest(tmp_path, 3)) == 2, 20, "a sample of both GPUs")
    finally:
        stop(process)
    first, second = read_history(tmp_path).gpus
    assert (first.uuid, first.node) == ("GPU-node1-0000-0000-0000-000000000000", "node1")
    assert (first.samples[0].busy, second.samples[0].busy) == (75, 25)
    assert first.samples[0].used == 0.75 * first.memory
    assert read_latest(tmp_path, 4) == {}


def test_no_driver_is_a_note(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(build())
    environ = {**os.environ, "PYTHONPATH": str(NVML), "FAKE_NVML_GPUS": "0"}
    argv = [sys.executable, str(tmp_path / ARCHIVE), "usage", f"--folder={tmp_path}", "--job=0"]
    done = subprocess.run([*argv, "--devices=0"], env=environ, check=False, capture_output=True)
    assert done.returncode == 1 and not done.stdout + done.stderr
    assert "LibraryNotFound" in read_history(tmp_path).problems[0]


# -- page ------------------------------------------------------------------------------------------
def test_the_page_is_escaped_and_complete() -> None:
    text = page(usage())
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text
    assert text.count('<figure class="gpu">') == 6
    assert not [word for word in ("http:", "https:", "url(", "@import") if word in text]


def test_a_page_of_a_cluster_that_has_not_started() -> None:
    text = page(usage(History()))
    assert f"<h1>{NAME}" in text and '<figure class="gpu">' not in text


def test_a_long_job_has_lines_of_few_points() -> None:
    past = history()
    many = replace(past.gpus[0], samples=past.gpus[0].samples * 200)
    text = page(usage(replace(past, gpus=(many,))))
    assert len(text) < 50_000
