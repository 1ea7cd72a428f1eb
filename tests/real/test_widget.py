"""The widget of a cluster: notebooks run headless, and are looked at in a real browser.

``GPUJOBS_UPDATE_PICTURES=1`` writes the screenshots of the documentation.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpujobs
from gpujobs.cli.usage_text import page
from gpujobs.clusters.ledger import Ledger

from ..conftest import need_library, unavailable
from ..support.backend import SlurmBackend
from ..support.browser import Browser, open_browser
from ..support.cli import ROOT, Cli
from ..support.owner import backend, site  # noqa: F401 - fixtures
from ..support.voila import serve, write_notebook
from .test_examples import local  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

WIDE, NARROW = 1000, 400
TABS = ".lm-TabBar-tab"
BUTTONS = "button.jupyter-button"
ACCORDION = ".lm-Accordion-title, .jupyter-widget-Collapse-header"
PICTURES = ROOT / "docs" / "pictures"
UPDATE_PICTURES = "GPUJOBS_UPDATE_PICTURES" in os.environ
LARGEST_PICTURE = 150_000
OVERFLOWING = """
[document.scrollingElement, ...document.querySelectorAll('.gpujobs, .gpujobs *, .widget-tab, .widget-tab *')]
.filter(e => e.checkVisibility() && getComputedStyle(e).display !== 'inline' && e.clientWidth
             && e.scrollWidth > e.clientWidth + 1)
.map(e => e.tagName + '.' + e.className)
"""
"""Elements whose content does not fit their width."""
COLOURS = """
(e => [getComputedStyle(e).color, getComputedStyle(document.body).backgroundColor])
(document.querySelector('.gpujobs td'))
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    need_library("voila")
    if not shutil.which("chromium"):
        unavailable("chromium", "it is not installed")
    with open_browser(tmp_path / "browser") as found:
        yield found


def check_sizes(browser: Browser, *, dark: bool) -> None:
    """Assert that the visible tab fits a wide and a narrow window."""
    for width in (NARROW, WIDE):
        browser.look(width, 900, dark=dark)
        assert browser.evaluate(OVERFLOWING) == [], width


def brightness(colour: str) -> float:
    """Return the mean of red, green and blue of ``rgb(r, g, b)`` or ``rgba(r, g, b, a)``."""
    numbers = colour[colour.index("(") + 1 : -1].split(",")
    return sum(map(float, numbers[:3])) / 3


def set_number(browser: Browser, row: int, number: int) -> None:
    """Type a number into a visible field."""
    fields = "[...document.querySelectorAll('input[type=number]')].filter(e => e.checkVisibility())"
    browser.evaluate(f"{fields}[{row}].focus(), {fields}[{row}].select()")
    browser.call("Input.insertText", text=str(number))


def save_picture(name: str, image: bytes) -> None:
    if UPDATE_PICTURES:
        assert len(image) < LARGEST_PICTURE
        (PICTURES / name).write_bytes(image)


# One job of `gpu` fails in `setup`, and is replaced. The job of `later` waits.
OWNER = """
import sys
import dask, gpujobs
dask.config.set({{"distributed.dashboard.link": "https://hub.example.org/user/ada/proxy/{{port}}/status"}})
cluster = gpujobs.GPUSLURMCluster(
    {site!r},
    name="svd",
    quiet=True,
    scheduler_options={{"dashboard_address": ":0"}},
    env={{"FAKE_NVML_UTILIZATION": "80,55", "FAKE_NVML_NAME": "NVIDIA A100-SXM4-40GB", "FAKE_NVML_MEMORY": str(40 * 2**30)}},
    worker_memory="2GiB",
    groups={{
        "gpu": {{"gpus_per_job": 1, "environment": {{"setup": {setup!r}, "python": sys.executable}}}},
        "later": {{"gpus": 0, "workers": {{"count": 1}}, "directives": ["--begin=now+2hours"]}},
    }},
)
cluster.scale(gpu=2, later=1)
"""
SETUP = 'if mkdir {marker} 2> /dev/null; then echo "module: no cuda on this node" >&2; exit 3; fi'


@pytest.mark.slurm
def test_the_widget_of_an_owned_cluster_shows_and_changes_its_jobs(
    browser: Browser, site: Callable[..., str], backend: SlurmBackend, home: Path
) -> None:
    queues = backend.site()["queues"]
    limited = site(queues={**queues, "main": {**queues["main"], "max_jobs": 12}})
    code = OWNER.format(site=limited, setup=SETUP.format(marker=home / "marker"))
    write_notebook(home / "owner.ipynb", [code, "cluster"])
    with serve(home / "owner.ipynb", os.environ, "light") as address:
        browser.look(WIDE, 900)
        browser.open(address)
        shown = ("2 / 2", "1: BeginTime", "2 NVIDIA A100-SXM4-40GB, 80GiB", "4GiB")
        text = browser.wait_for(lambda text: all(one in text for one in shown), 90, "workers")
        (record,) = Ledger().all()
        assert (
            f"GPUSLURMCluster {record.id} on here" in text
            and "Dashboard: https://hub.example.org/user/ada/proxy/" in text
        )
        assert "0 / 1" in text
        assert "(exit code 3): module: no cuda on this node" in text
        check_sizes(browser, dark=False)
        colour, background = browser.evaluate(COLOURS)
        assert brightness(colour) < 100 < brightness(background)
        save_picture("widget.png", browser.screenshot(".widget-tab"))

        browser.click("summary", "Jobs")
        assert "FAILED" in browser.text() and "BeginTime" in browser.text()
        check_sizes(browser, dark=False)
        browser.click(TABS, "Scaling")
        assert "Manual Scaling" in browser.text()
        handle = gpujobs.ClusterHandle(record.id)
        (home / "report.html").write_text(page(handle.usage()))
    browser.open((home / "report.html").as_uri())
    browser.wait_for(lambda text: "GPU hours" in text, 20, "report")
    assert browser.evaluate(OVERFLOWING) == []
    save_picture("report.png", browser.screenshot("body"))


ATTACHED = """
import gpujobs
cluster = gpujobs.GPUJobQueueCluster.from_name({name!r})
"""


def test_the_view_of_an_attached_cluster_changes_nothing(browser: Browser, local: Cli) -> None:
    name = local.submit({"gpus": 0, "workers": {"count": 1}, "name": "svd"}, "--wait")
    cells = [ATTACHED.format(name=name), "cluster", f"gpujobs.ClusterHandle({name!r})"]
    write_notebook(local.work / "attached.ipynb", cells)
    with serve(local.work / "attached.ipynb", local.env, "dark") as address:
        browser.look(WIDE, 900, dark=True)
        browser.open(address)
        shown = (f"AttachedCluster {name} on local", f"ClusterHandle {name} on local")
        text = browser.wait_for(lambda text: all(one in text for one in shown), 60, "notebook")
        assert text.count("1 / 1") == 2
        colour, background = browser.evaluate(COLOURS)
        assert brightness(colour) > 150 > brightness(background)
        check_sizes(browser, dark=True)
        browser.click(TABS, "Scaling")
        browser.click(ACCORDION, "Manual Scaling")
        set_number(browser, 0, 2)
        browser.click(BUTTONS, "Scale")
        browser.click(TABS, "Status")
        browser.wait_for(lambda text: "2 / 2" in text, 60, "second worker")
        assert local.status(name)["workers"]["wanted"] == 2
    assert local.status(name)["state"] == "RUNNING"  # the notebook has gone
