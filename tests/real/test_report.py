"""`gpujobs report`: of a cluster on the real Slurm, and its page in a real browser."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import gpujobs
from gpujobs.cli.usage_text import page, usage_json, usage_text
from gpujobs.clusters.history import HostSample, host_samples
from gpujobs.clusters.usage import timeline
from gpujobs.injob.folder import read_lines
from gpujobs.injob.sampler import UsageLine

from ..conftest import unavailable
from ..support.browser import Browser, open_browser
from ..support.cli import Cli
from ..support.owner import backend, make, site  # noqa: F401
from ..support.processes import patience, processes_with, until
from ..unit.report_data import GROUPED, NAME, grouped_history, usage


@pytest.mark.slurm
@pytest.mark.stub
@pytest.mark.filterwarnings("default")
def test_a_job_without_gpus_is_sampled_by_its_supervisor(make: Callable[..., Any]) -> None:
    cluster = make(1, gpus_per_job=0)

    def samples() -> list[HostSample]:
        files = (cluster.folder / "usage").glob("*.jsonl")
        return [one for path in files for one in host_samples(read_lines(path, UsageLine))]

    until(lambda: len(samples()) >= 2, 60, "two samples")
    assert all(sample.memory > 0 for sample in samples())
    assert sum(sample.seconds for sample in samples()) >= 5  # the first one is of the start
    assert not processes_with(f"{cluster.id}/injob.pyz\0usage")
    (supervisor,) = processes_with(f"{cluster.id}/injob.pyz\0supervise")
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not processes_with(cluster.id), 30, "no process of the cluster")


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.filterwarnings("default")
def test_the_report_links_a_failed_job_with_its_replacement(make: Callable[..., Any]) -> None:
    cluster = make(gpus_per_job=1, env={"FAKE_NVML_UTILIZATION": "80"})
    cluster.scale(2)
    cluster.wait_for_workers(2, timeout=patience(60))
    until(lambda: len(list((cluster.folder / "usage").glob("*.jsonl"))) == 2, 20, "samples")
    handle = gpujobs.ClusterHandle(cluster.id)
    for pid in processes_with(f"--name\0{cluster.id}-1\0"):  # nannies, and their fork server
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: f"{cluster.id}-2" in cluster.observed, 60, "a new worker")
    until(lambda: handle.usage().jobs[1].ended and handle.usage().workers, 20, "the end of job 1")
    cluster.close()
    found = handle.usage()
    assert len(found.failures) == 1, [
        (
            job.report.number,
            job.report.phase,
            job.report.state,
            job.report.exit_code,
            job.report.reason,
            job.replaced_by,
        )
        for job in found.failures
    ]
    failed = found.failures[0]
    assert (failed.report.number, failed.replaced_by) == (1, 2)
    assert failed.report.exit_code and failed.report.reason
    assert failed.started and failed.served and failed.ended
    assert failed.started < failed.served <= failed.ended + 1
    assert max(number for _, number in found.workers) == 2
    assert found.targets[-1][1] == 2
    assert found.hours.busy_fraction == pytest.approx(0.8)
    assert found.hours.busy < found.hours.granted
    assert usage_json(found)["failures"] == [1]
    assert "replaced by job 2" in usage_text(found)
    html = page(found).replace("&#39;", "'")
    assert failed.report.reason in html
    assert '<td class="short"><a href="#job-2">job 2</a></td>' in html  # replaced by
    assert bar_of(html, 1, "failed") and 'href="#job-2"' in bar_of(html, 1, "replaced")
    assert "lost" in {phase.kind for phase in timeline(found, failed)}
    assert bar_of(html, 1, "lost") and not bar_of(html, 2, "failed")
    assert failed.workers_of(failed.gpu_samples[0].uuid) == [f"{cluster.id}-1"]


def bar_of(html: str, number: int, kind: str) -> str:
    """Return the bar of a job in the page; "" if there is none."""
    row = html.split(f'id="job-{number}"')[1].split('<div class="row"')[0]
    found = re.search(rf'<(?:span|a) class="{kind}"[^>]*>', row)
    return found[0] if found else ""


# -- the command line ------------------------------------------------------------------------------
MOVE = """
import time
from pathlib import Path
from distributed import Client

if __name__ == "__main__":
    with Client() as client:
        client.wait_for_workers(2)
        first, second = sorted(client.run(lambda dask_worker: dask_worker.name).values())
        data = client.submit(bytes, 10_000_000, workers=[first])
        print(client.submit(len, data, workers=[second]).result(), flush=True)
        while not Path("continue").exists():
            time.sleep(0.2)
"""


@pytest.mark.slurm
def test_report_submit_and_status_show_the_same_usage(cli: Cli) -> None:
    """`report`, its page and its JSON, the last line of `submit --wait`, and a column of `status`."""
    profile = {
        "gpus": 2,
        "gpus_per_job": 1,
        "env": {"FAKE_NVML_UTILIZATION": "80"},
        "run": ["python", "move.py"],
    }
    cli.write("move.py", MOVE)
    waiting = cli.start("submit", "--wait", str(cli.write("p.yaml", profile)))
    try:
        assert waiting.stdout
        cluster = waiting.stdout.readline().strip()
        until(lambda: busy_column(cli, cluster) == ["80 %"] * 2, 30, "samples in status", every=1)
        running = report_json(cli, cluster)
        assert running["state"] == "RUNNING"
        cli.write("continue", "")
        _, messages = waiting.communicate(timeout=patience(60))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(waiting.pid, signal.SIGKILL)
        waiting.communicate()
    assert waiting.returncode == 0, messages
    assert re.search(r"2 GPUs x \d+ \w+ = \d+ GPU \w+, 80 % busy\n", messages)
    assert "enough: " in messages and "cpus_per_job: 1" in messages

    found = report_json(cli, cluster)
    assert found["state"] == "DONE" and found["busy"] == pytest.approx(0.8)
    assert found["gpu_hours"]["granted"] >= found["gpu_hours"]["busy"] > 0
    owners = [gpu["workers"] for job in found["jobs"] for gpu in job["devices"]]
    assert owners == [[f"{cluster}-0"], [f"{cluster}-1"]]
    assert all(gpu["samples"] for job in found["jobs"] for gpu in job["devices"])
    for job in found["jobs"]:
        assert [one["kind"] for one in job["timeline"]][-1] == "running", job["timeline"]

    text = cli("report", cluster).stdout
    assert f"{cluster} on here: DONE" in text and "80 % busy" in text
    assert re.search(r"CPUs of a job +\d+ +\d\.\d on average, up to \d\.\d", text), text
    done = cli("report", cluster, "-o", "report.html")
    assert done.returncode == 0 and not done.stdout, done.stderr
    html = (cli.work / "report.html").read_text()
    assert html.count('<figure class="gpu">') == 2
    assert "<td>memory of a job</td>" in html and "enough: " in html


def report_json(cli: Cli, cluster: str) -> dict[str, Any]:
    done = cli("report", cluster, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def busy_column(cli: Cli, cluster: str) -> list[str]:
    """Return how busy the GPUs are in the text of `gpujobs status`."""
    _, _, gpus = cli("status", cluster).stdout.partition("UUID")
    assert not gpus or "BUSY" in gpus.splitlines()[0]
    return re.findall(r"\d+ %", gpus)


# -- known loads -----------------------------------------------------------------------------------
LOADED = """
import os, sys, time

pid = os.fork() if sys.argv[1] != "memory" else 1
kept = bytearray(700 * 2**20) if sys.argv[1] == "memory" else b""
if sys.argv[1] == "memory":
    pid = os.fork()  # it shares the pages
end = time.time() + 25
with open(f"spent-{sys.argv[1]}-{bool(pid)}", "w") as file:
    while time.time() < end:
        if sys.argv[1] == "cpu":
            until = time.time() + 0.2
            while time.time() < until:
                pass
        else:
            time.sleep(0.2)
        print(time.time(), time.process_time(), file=file, flush=True)
"""
LOADS = ("cpu", "memory", "idle")


@pytest.mark.slow
@pytest.mark.stub
@pytest.mark.slurm
@pytest.mark.waits
def test_known_loads_on_slurm_are_measured_within_ten_percent(cli: Cli) -> None:
    """Requested and used of two processes with CPU time, of shared memory, and of neither."""
    cli.write("loaded.py", LOADED)
    profile = {"gpus": 1, "cpus_per_job": 4, "memory_per_job": "6GiB", "walltime": "30m"}
    clusters = {
        load: cli.submit(profile | {"run": ["python", "loaded.py", load]}, name=f"{load}.yaml")
        for load in LOADS
    }
    for cluster in clusters.values():
        until(lambda one=cluster: cli.status(one)["state"] == "DONE", 120, "the end", every=1)
    sizes = {
        load: {one["key"]: one for one in report_json(cli, cluster)["sizes"]}
        for load, cluster in clusters.items()
    }
    for load, cluster in clusters.items():
        folder = Path(cli.status(cluster)["folder"])
        (file,) = (folder / "usage").iterdir()
        samples = list(host_samples(read_lines(file, UsageLine)))
        windows = list(cores(samples, *(spent(cli, load, side) for side in (True, False))))
        assert len(windows) > 10
        own, measured = (sum(each) / len(windows) for each in zip(*windows, strict=True))
        assert measured == pytest.approx(own, rel=0.1, abs=0.15), (load, windows)
        cpus = sizes[load]["cpus_per_job"]
        assert cpus["requested"] == 4 and cpus["enough"] in {
            max(1, math.ceil(own * part + more)) for part in (0.9, 1.1) for more in (-0.25, 0)
        }
    memory = {load: sizes[load]["memory_per_job"] for load in LOADS}
    used = 700 * 2**20 + memory["idle"]["peak"]
    assert memory["memory"]["peak"] == pytest.approx(used, rel=0.1)
    assert memory["cpu"]["peak"] < 0.5 * used
    assert 1.5 * 0.9 * used < memory["memory"]["enough"] < 1.5 * 1.1 * used + 2**28
    assert memory["idle"]["enough"] < memory["memory"]["enough"]


def spent(cli: Cli, load: str, side: bool) -> list[tuple[float, float]]:
    lines = (cli.work / f"spent-{load}-{side}").read_text().splitlines()
    return [(float(time), float(seconds)) for time, seconds in map(str.split, lines)]


def cores(
    samples: Sequence[HostSample], *processes: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Yield the cores that processes used during each sample by their own account, and the sampler's."""
    for one in samples:
        first, last = one.time - one.seconds, one.time
        if all(times[0][0] < first and last < times[-1][0] for times in processes):
            own = sum(at(times, last) - at(times, first) for times in processes)
            yield own / one.seconds, one.cpu / one.seconds


def at(times: Sequence[tuple[float, float]], moment: float) -> float:
    return max(seconds for time, seconds in times if time <= moment)


# -- in a browser ----------------------------------------------------------------------------------
@pytest.fixture
def browser(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a headless Chromium on a page."""
    program = shutil.which("chromium") or ""
    if not program:
        unavailable("chromium", "it is not installed")

    def run(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
        fixed = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        fixed += [f"--user-data-dir={tmp_path}/profile", "--enable-logging=stderr"]
        fixed += ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"]
        return subprocess.run(
            [program, *fixed, *options, path.as_uri()],
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=False,
        )

    return run


def requests_of_pages(log: Path) -> set[str]:
    """Return the initiators of all requests but those of the browser itself."""
    found = set(re.findall(r'"initiator": ?"([^"]*)"', log.read_text()))
    return found - {"not an origin"}


def test_the_page_in_a_browser_makes_no_request_and_no_message(
    browser: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    path, log = tmp_path / "report.html", tmp_path / "net.json"
    path.write_text(page(usage()), encoding="utf-8")
    done = browser(path, f"--log-net-log={log}", "--dump-dom")
    assert done.returncode == 0, done.stderr
    assert f"<h1>{NAME}: DONE</h1>" in done.stdout
    assert done.stdout.count('<figure class="gpu">') == 6 and "</html>" in done.stdout
    assert "CONSOLE" not in done.stderr and "<script" not in done.stdout
    assert not requests_of_pages(log)


@pytest.mark.slow
def test_a_request_and_a_console_message_are_noticed(
    browser: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    path, log = tmp_path / "other.html", tmp_path / "net.json"
    path.write_text('<img src="http://page.invalid/x.png"><script>console.error("oh")</script>')
    done = browser(path, f"--log-net-log={log}", "--dump-dom")
    assert "CONSOLE" in done.stderr and requests_of_pages(log)


OVERFLOWING = """
[document.scrollingElement, ...document.querySelectorAll('body *:not(svg *):not(.track *)')]
.filter(e => getComputedStyle(e).display !== 'inline' && e.clientWidth && e.scrollWidth > e.clientWidth + 1)
.map(e => `${e.tagName}.${e.className}: ${e.scrollWidth} > ${e.clientWidth}`)
"""
"""Elements whose content does not fit their width."""
BRIGHT = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.slow
def test_the_page_fits_wide_and_narrow_windows_light_and_dark(tmp_path: Path) -> None:
    if not shutil.which("chromium"):
        unavailable("chromium", "it is not installed")
    pages = {"plain.html": page(usage()), "groups.html": page(usage(grouped_history(), GROUPED))}
    with open_browser(tmp_path / "browser") as browser:
        for name, text in pages.items():
            path = tmp_path / name
            path.write_text(text, encoding="utf-8")
            browser.open(path.as_uri())
            browser.wait_for(lambda text: "GPU hours" in text, 20, "report")
            for width in (400, 1600):
                for dark, background in ((False, "rgb(255, 255, 255)"), (True, "rgb(13, 17, 23)")):
                    browser.look(width, 1000, dark=dark)
                    assert browser.evaluate(BRIGHT) == background
                    assert browser.evaluate("innerWidth") == width
                    assert browser.evaluate(OVERFLOWING) == [], (name, width, dark)
                    check_bars(browser)


BARS = """
[...document.querySelectorAll('.track > *')].map(e => [
    e.className, e.getBoundingClientRect().width,
    e.getBoundingClientRect().left - e.parentElement.getBoundingClientRect().left,
    e.parentElement.getBoundingClientRect().right - e.getBoundingClientRect().right,
])
"""


def check_bars(browser: Browser) -> None:
    """Fail if a bar cannot be seen: too narrow, or outside its track."""
    bars = browser.evaluate(BARS)
    assert {kind for kind, *_ in bars} >= {"pending", "running", "lost", "failed", "replaced"}
    assert not [bar for bar in bars if bar[1] < 1.9 or bar[2] < -0.1 or bar[3] < -2.1]
