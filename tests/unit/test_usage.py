"""Where GPU hours went: samples, history and the numbers of `gpujobs report`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpujobs.cli.usage_text import Axis, hours_text, page, usage_json, usage_line, usage_text
from gpujobs.clusters.folderstate import read_state
from gpujobs.clusters.history import (
    Connection,
    History,
    HostSample,
    Sample,
    connections,
    read_history,
    read_latest,
)
from gpujobs.clusters.report import JobPhase
from gpujobs.clusters.usage import (
    UsageReport,
    make_usage,
    shorter_samples,
    timeline,
)
from gpujobs.injob.archive import build
from gpujobs.injob.names import ARCHIVE
from gpujobs.injob.sampler import SamplingThread, interval
from gpujobs.schedulers import JobState

from ..support.cli import NVML, ROOT
from ..support.jobevents import write_job
from ..support.processes import stop, until
from .report_data import (
    GROUPED,
    HOUR,
    NAME,
    REASON,
    RECORD,
    START,
    TARGETS,
    grouped_history,
    history,
    usage,
)


# -- numbers ---------------------------------------------------------------------------------------
def test_gpu_hours_are_asked_granted_connected_and_busy() -> None:
    hours = usage().hours
    assert hours.asked == 3 * 2 * 4
    assert hours.granted == pytest.approx(2 * (2.8 + 1.05 + 1.25))
    assert hours.connected == pytest.approx(2 * (2.75 + 1.0) + 0.75 + 1.0)
    assert hours.sampled == pytest.approx(2 * (2.8 + 1.0 + 1.2))
    assert hours.busy == pytest.approx(2.8 * 1.5 + 1.0 * 1.0 + 1.2 * 2)
    assert hours.idle == pytest.approx(hours.sampled - hours.busy)


def test_worker_hours_are_those_of_connected_workers() -> None:
    """Each of them has one GPU."""
    found = usage()
    assert found.worker_hours == pytest.approx(found.hours.connected)


def test_a_report_ends_with_the_last_job_or_now_without_any() -> None:
    found = replace(usage(), now=START + 5 * HOUR)
    assert found.end == START + 3 * HOUR  # when it was closed
    assert replace(found, jobs=()).end == START + 5 * HOUR


def test_a_job_that_failed_knows_its_replacement() -> None:
    found = usage()
    (failed,) = found.failures
    assert (failed.report.number, failed.replaced_by) == (1, 2)
    assert failed.report.reason == REASON
    lost = [(START + 0.25 * HOUR, START + end * HOUR) for end in (1.0, 1.25)]
    assert [(one.since, one.until) for one in failed.connections] == lost
    assert found.jobs[2].submitted == START + 1.5 * HOUR
    assert found.jobs[2].served == START + 2 * HOUR


def test_a_job_that_fails_at_once_is_not_replaced_by_one_of_its_submission() -> None:
    past = history()
    started, ended = {**past.started, 1: START}, {**past.ended, 1: START + 0.5}
    found = usage(replace(past, started=started, ended=ended))
    assert [job.replaced_by for job in found.jobs] == [None, 2, None]


def test_a_job_that_still_exits_after_the_end_of_its_cluster_has_not_failed() -> None:
    found = usage().cluster
    closing = replace(found.jobs[2], phase=JobPhase.AWAY, state=JobState.RUNNING)
    jobs = (*found.jobs[:2], closing)
    past = history()
    del past.ended[2]  # type: ignore[attr-defined]
    failures = make_usage(replace(found, jobs=jobs), past, TARGETS, START + 3 * HOUR).failures
    assert [job.report.number for job in failures] == [1]
    running = replace(found, jobs=jobs, folder=replace(found.folder, ended=None))
    failures = make_usage(running, past, TARGETS, START + 3 * HOUR).failures
    assert [job.report.number for job in failures] == [1, 2]


def test_workers_are_counted_against_the_target() -> None:
    found = usage()
    assert found.targets == [(START, 2), (START + 60, 4)]
    times = [(round((time - START) / HOUR, 2), number) for time, number in found.workers]
    assert times == [(0.25, 4), (1.0, 3), (1.25, 2), (2.0, 4), (3.0, 0)]
    unchanged = replace(RECORD, notes=("a note",))
    assert usage(record=unchanged).targets == [(START, 4)]


def test_workers_of_a_running_cluster_stay_connected() -> None:
    past = history()
    events = replace(past, ended={1: past.ended[1]})
    cluster = usage().cluster
    jobs = (
        replace(cluster.jobs[0], phase=JobPhase.RUNNING, state=JobState.RUNNING),
        *cluster.jobs[1:],
    )
    running = replace(cluster, jobs=jobs, folder=replace(cluster.folder, ended=None))
    found = make_usage(running, events, TARGETS, START + 3 * HOUR)
    assert found.workers[:3] == usage().workers[:3] and found.workers[-1][1] == 2
    first, *_ = usage_json(found)["jobs"]
    assert [one["until"] for one in first["workers"]] == [None, None]
    assert phases(found, 0)[-1] == ("running", 0.25, 3)
    assert found.jobs[0].connected_seconds == pytest.approx(2 * 2.75 * HOUR)


def keys(value: object) -> set[str]:
    """Return all keys of a JSON object and of those in it."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set()


def test_all_keys_of_the_json_are_documented() -> None:
    text = (ROOT / "docs" / "json.md").read_text()
    section = text.split("\n## report\n")[1].split("\n## ")[0]
    found = keys(usage_json(usage(grouped_history(), GROUPED)))
    assert found and not {key for key in found if f"`{key}`" not in section}


def test_the_line_of_submit_has_the_gpu_hours() -> None:
    assert usage_line(usage()) == "4 GPUs x 2.5 h = 10.2 GPU h, 76 % busy"
    without = replace(history(), gpus=())
    assert usage_line(usage(without)) == "4 GPUs x 2.5 h = 10.2 GPU h"
    assert usage_line(usage(History())) == ""
    cpus = replace(RECORD, groups=(replace(RECORD.groups[0], gpus_per_job=0),))
    assert usage_line(usage(record=cpus)) == ""


def test_short_times_have_smaller_units() -> None:
    hours = {0.002: "7 GPU s", 0.5: "30 GPU min", 1.99: "119 GPU min", 2.04: "2.0 GPU h"}
    assert {number: hours_text(number) for number in hours} == hours


def test_a_job_without_an_exit_record_ends_with_its_last_sign() -> None:
    past = history()
    ends = {number: end for number, end in past.ended.items() if number != 1}
    assert usage(replace(past, ended=ends)).jobs[1].ended == START + 1.25 * HOUR


def phases(found: UsageReport, number: int) -> list[tuple[str, float, float]]:
    """Return the time line of a job, in hours since the submission."""
    return [
        (one.kind.value, round((one.since - START) / HOUR, 3), round((one.until - START) / HOUR, 3))
        for one in timeline(found, found.jobs[number])
    ]


def test_the_time_line_shows_a_lost_and_replaced_job() -> None:
    found = usage()
    assert phases(found, 0) == [
        ("pending", 0, 0.2),
        ("starting", 0.2, 0.25),
        ("running", 0.25, 3),
    ]
    assert phases(found, 1) == [
        ("pending", 0, 0.2),
        ("starting", 0.2, 0.25),
        ("running", 0.25, 1.0),
        ("lost", 1.0, 1.25),
        ("failed", 1.25, 1.25),
        ("replaced", 1.25, 2.0),
    ]
    never = usage(replace(history(), connections=()))
    assert phases(never, 1)[1:3] == [("starting", 0.2, 1.25), ("failed", 1.25, 1.25)]
    assert usage(History()).jobs and phases(usage(History()), 0) == [("pending", 0, 3)]


def test_the_time_line_shows_a_worker_that_connects_again_or_leaves() -> None:
    past = history()
    again = [
        Connection(f"{NAME}-0-0", START + HOUR / 4, START + HOUR),
        Connection(f"{NAME}-0-0", START + 2 * HOUR, START + 2.9 * HOUR),
        Connection(f"{NAME}-0-1", START + HOUR / 4),
    ]
    assert phases(usage(replace(past, connections=tuple(again))), 0)[2:] == [
        ("running", 0.25, 1),
        ("lost", 1, 2),
        ("running", 2, 3),  # it leaves at 2.9 h, before its job
    ]


def test_long_series_become_short() -> None:
    samples = [Sample(float(n), 1.0, n % 4 * 10, None) for n in range(1, 1001)]
    assert shorter_samples(samples)[0] == Sample(4.0, 4.0, 15, None)
    assert len(shorter_samples(samples[:251])) <= 250
    assert shorter_samples(samples[:250]) == samples[:250]


def test_each_group_has_its_gpu_hours() -> None:
    found = usage(grouped_history(), GROUPED)
    assert {name: round(hours.granted, 2) for name, hours in found.group_hours.items()} == {
        "fit": 10.2,
        "prep": 0,
    }
    fit, prep = usage_json(found)["groups"]
    assert fit["name"] == "fit" and fit["busy"] == pytest.approx(0.76)
    assert fit["gpu_hours"]["granted"] == pytest.approx(10.2)
    assert prep["name"] == "prep" and prep["busy"] is None
    text = usage_text(found)
    assert re.search(r"^JOB +ID +GROUP +STATE", text, re.M)
    assert re.search(r"^3 +9 +prep +COMPLETED", text, re.M)
    assert re.search(r"^fit +10.2 GPU h +.* 76 %", text, re.M)
    assert re.search(r"^prep +- +- +- +-$", text, re.M)
    html = page(found)
    assert "3: 9, group prep" in html and '<table id="groups">' in html
    assert "GROUP" not in usage_text(usage()) and '<table id="groups">' not in page(usage())


def test_gpus_have_their_workers() -> None:
    jobs = usage_json(usage())["jobs"]
    assert [gpu["workers"] for gpu in jobs[1]["devices"]] == [[f"{NAME}-1-0"], [f"{NAME}-1-1"]]
    assert f"{NAME}-1-1, node2, GPU-b-1: 50 % busy" in page(usage())
    old = replace(history(), connections=tuple(replace(c, gpus=()) for c in history().connections))
    jobs = usage_json(usage(old))["jobs"]
    assert [gpu["workers"] for gpu in jobs[1]["devices"]] == [[], []]
    assert "job 1, node2, GPU-b-1: 50 % busy" in page(usage(old))


def test_json_has_the_series_of_the_page() -> None:
    found = json.loads(json.dumps(usage_json(usage())))
    device = found["jobs"][0]["devices"][1]
    assert len(device["samples"]) == 28
    assert device["samples"][0] == [START + 0.3 * HOUR, 360, 50, 2**32 + 2**27]
    assert found["received"] is None and found["jobs"][0]["transfers"] == []  # until 0.2.0
    assert found["jobs"][1]["timeline"][-1] == {
        "kind": "replaced",
        "since": START + 1.25 * HOUR,
        "until": START + 2 * HOUR,
    }


def bar(text: str, number: int, kind: str) -> str:
    """Return a bar of a job in the page."""
    row = text.split(f'id="job-{number}"')[1].split('<div class="row"')[0]
    found = re.search(rf'<(?:span|a) class="{kind}"[^>]*>', row)
    assert found, row
    return found[0]


def test_the_bars_show_a_lost_and_replaced_job() -> None:
    text = page(usage())
    lost, failed, replaced = (bar(text, 1, kind) for kind in ("lost", "failed", "replaced"))
    assert "left:33.333%;width:8.334%" in lost and 'title="lost for 15m"' in lost
    assert "width:0.0%" in failed and "FAILED: &lt;script&gt;" in failed
    assert 'href="#job-2"' in replaced and "replaced by job 2" in replaced
    assert 'replaced by <a href="#job-2">job 2</a>' in text
    assert 'replaces <a href="#job-1">job 1</a>' in text
    assert 'class="lost"' not in text.split('id="job-2"')[1]


def test_json_has_the_numbers() -> None:
    found = json.loads(json.dumps(usage_json(usage())))
    assert found["version"] == 1 and found["id"] == NAME
    assert found["busy"] == pytest.approx(0.76)
    assert found["failures"] == [1]
    assert [job["replaced_by"] for job in found["jobs"]] == [None, 2, None]
    assert [gpu["busy"] for gpu in found["jobs"][0]["devices"]] == [pytest.approx(1), 0.5]


def test_attempts_have_no_gpus_at_the_same_time() -> None:
    """The end of a job is rounded up, and the next attempt may start in the same second."""
    found = usage()
    first, _, last = found.jobs
    until = (last.started or 0.0) + 1
    next_attempt = replace(last, report=replace(last.report, attempt=2))
    both = replace(found, jobs=(replace(first, until=until), next_attempt))
    assert both.most_gpus == 2
    assert replace(found, jobs=(first, last)).most_gpus == 4
    jobs: Any = usage_json(both)["jobs"]
    assert [job["attempt"] for job in jobs] == [1, 2]


def test_text_names_the_replacement() -> None:
    text = usage_text(usage(replace(history(), problems={0: "NVMLError: no driver"})))
    assert "replaced by job 2" in text and "GPUs were not sampled: NVMLError" in text


# -- history ---------------------------------------------------------------------------------------
def test_a_worker_that_comes_again_has_two_connections() -> None:
    events = [
        {"at": 1, "event": "connected", "worker": "a", "row": {"gpu": {"uuid": "GPU-a"}}},
        {"at": 2, "event": "disconnected", "worker": "a"},
        {"at": 3, "event": "connected", "worker": "a"},
        {"at": 4, "event": "disconnected", "worker": "b"},
    ]
    assert list(connections(events)) == [
        Connection("a", 1, 2, ("GPU-a",)),
        Connection("a", 3, None),
    ]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    assert read_history(tmp_path, read_state(tmp_path).jobs) == History()
    (tmp_path / "usage").mkdir()
    (tmp_path / "jobs").mkdir()
    write_job(tmp_path, 0, "script", at=5.0)
    write_job(tmp_path, 0, "left", at=9, code=0)
    (tmp_path / "jobs" / "1.jsonl").write_text('{"event": "left", "at": 9\n{"event": "scr')
    sample = {"time": 7, "seconds": 1, "busy": [None], "used": [3]}
    lines = ['{"gpus": [{"uuid": "GPU-a", "memory": 8}]}', json.dumps(sample), '{"time": 8, "bu']
    (tmp_path / "usage" / "0-node-1.example.jsonl").write_text("\n".join(lines))
    found = read_history(tmp_path, read_state(tmp_path).jobs)
    assert (found.started, found.ended) == ({0: 5.0}, {0: 10.0})  # rounded up
    (gpu,) = found.gpus
    assert (gpu.job, gpu.node, gpu.uuid, len(gpu.samples)) == (0, "node-1.example", "GPU-a", 1)


# -- samples ---------------------------------------------------------------------------------------
def test_a_long_job_has_few_samples() -> None:
    assert interval(0) == 1 and interval(3600) == interval(86400) == 15
    assert interval(2 * 86400) == 30
    age, lines = 0.0, 0
    while age < 30 * 86400:
        age += interval(age)
        lines += 1
    assert lines < 30_000


def test_the_sampler_writes_what_the_reader_reads(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(build())
    environ = {**os.environ, "PYTHONPATH": str(NVML), "FAKE_NVML_UTILIZATION": "75,25"}
    environ |= {"GPUJOBS_FOLDER": str(tmp_path), "GPUJOBS_JOB": "3", "SLURMD_NODENAME": "node1"}
    argv = [sys.executable, str(tmp_path / ARCHIVE), "usage", "--devices=0,1"]
    process = subprocess.Popen(argv, env=environ)
    try:
        until(lambda: len(read_latest(tmp_path, 3)) == 2, 20, "a sample of both GPUs")
    finally:
        stop(process)
    first, second = read_history(tmp_path, read_state(tmp_path).jobs).gpus
    assert (first.uuid, first.node) == ("GPU-node1-0000-0000-0000-000000000000", "node1")
    assert (first.samples[0].busy, second.samples[0].busy) == (75, 25)
    assert first.samples[0].used == 0.75 * first.memory
    assert read_latest(tmp_path, 4) == {}


def test_the_thread_of_a_job_without_gpus_samples_its_processes_until_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    environ = {**os.environ, "GPUJOBS_FOLDER": str(tmp_path), "GPUJOBS_JOB": "3"}
    program = (
        "data = bytearray(300 * 2**20); data[::4096] = b'1' * 76800; import time; time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env=environ)
    thread = SamplingThread(str(tmp_path), 3)

    def samples() -> list[HostSample]:
        hosts = read_history(tmp_path, read_state(tmp_path).jobs).hosts
        return [sample for host in hosts for sample in host.samples]

    try:
        until(lambda: any(one.memory > 290 * 2**20 for one in samples()), 20, "its memory")
    finally:
        thread.kill()
        stop(process)
    (file,) = (tmp_path / "usage").iterdir()
    assert file.name == "3-node1.jsonl"
    until(lambda: "samples" not in [one.name for one in threading.enumerate()], 20, "its end")


def test_no_driver_is_a_note(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(build())
    environ = {**os.environ, "PYTHONPATH": str(NVML), "FAKE_NVML_GPUS": "0"}
    argv = [sys.executable, str(tmp_path / ARCHIVE), "usage", f"--folder={tmp_path}", "--job=0"]
    process = subprocess.Popen([*argv, "--devices=0"], env=environ, stderr=subprocess.PIPE)
    try:
        until(
            lambda: any(
                one.samples for one in read_history(tmp_path, read_state(tmp_path).jobs).hosts
            ),
            20,
            "a sample",
        )
    finally:
        stop(process)
    _, errors = process.communicate()
    assert (
        not errors
        and "LibraryNotFound" in read_history(tmp_path, read_state(tmp_path).jobs).problems[0]
    )


# -- page ------------------------------------------------------------------------------------------
def test_the_page_is_escaped_and_complete() -> None:
    text = page(usage())
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text
    assert text.count('<figure class="gpu">') == 6
    assert not [word for word in ("http:", "https:", "url(", "@import") if word in text]


def test_a_cluster_without_gpus_has_worker_hours() -> None:
    record = replace(RECORD, groups=(replace(RECORD.groups[0], gpus_per_job=0),))
    found = usage(history(), record)
    text, html = usage_text(found), page(found)
    assert re.search(r"^  connected  \d+\.\d worker h of CPU workers$", text, re.M)
    assert "<h2>Worker hours</h2>" in html and re.search(r"\d+\.\d worker h", html)
    assert "GPU s" not in text + html and "GPU h" not in text + html


def test_a_cluster_that_has_not_started_has_a_page_without_gpus() -> None:
    text = page(usage(History()))
    assert f"<h1>{NAME}" in text and '<figure class="gpu">' not in text


def test_a_long_job_has_lines_of_few_points() -> None:
    past = history()
    many = replace(past.gpus[0], samples=past.gpus[0].samples * 200)
    text = page(usage(replace(past, gpus=(many,))))
    assert len(text) < 50_000


def test_the_ticks_of_a_time_axis_begin_at_its_start_and_end_at_its_end() -> None:
    positions, times = zip(*Axis(1000.0, 1000.0 + 4 * 3600).ticks, strict=True)
    assert (positions[0], positions[-1]) == (0.0, 100.0) and times[-1] == "4h"
    assert sorted(positions) == list(positions)
