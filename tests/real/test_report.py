"""`gpujobs report`: of a cluster on the real Slurm, and its page in a real browser."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpujobs
from gpujobs.cli.report_page import page
from gpujobs.cli.usage_text import usage_text
from gpujobs.clusters.usagejson import usage_json

from ..conftest import unavailable
from ..support.owner import backend, make, site  # noqa: F401
from ..support.processes import patience, processes_with, until
from ..unit.report_data import NAME, usage


@pytest.mark.slurm
@pytest.mark.filterwarnings("default")
def test_a_failed_and_replaced_worker(make: Callable[..., Any]) -> None:
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
    assert failed.report.reason in page(found).replace("&#39;", "'")


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


def test_the_page_in_a_browser(
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


def test_a_request_and_a_console_message_are_noticed(
    browser: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    path, log = tmp_path / "other.html", tmp_path / "net.json"
    path.write_text('<img src="http://page.invalid/x.png"><script>console.error("oh")</script>')
    done = browser(path, f"--log-net-log={log}", "--dump-dom")
    assert "CONSOLE" in done.stderr and requests_of_pages(log)


@pytest.mark.parametrize("width", [400, 1600])
def test_screenshots_differ_between_light_and_dark(
    browser: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, width: int
) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(usage()), encoding="utf-8")
    images = []
    for scheme in (0, 1):  # of Blink: dark, light
        image = tmp_path / f"{scheme}.png"
        setting = f"--blink-settings=preferredColorScheme={scheme}"
        done = browser(path, setting, f"--window-size={width},1000", f"--screenshot={image}")
        assert done.returncode == 0 and image.exists(), done.stderr
        images.append(image.read_bytes())
    assert images[0] != images[1]
