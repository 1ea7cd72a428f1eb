"""The dashboard of a dask scheduler in a job is imported when its first page is opened."""

from __future__ import annotations

import json
import subprocess
import sys

VISITS = """
import asyncio, json, sys
from distributed import Scheduler
from gpujobs.injob.dashboard import dask_setup
from tornado.httpclient import AsyncHTTPClient

async def main():
    async with Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0") as scheduler:
        dask_setup(scheduler)
        visits = []
        for page in sys.argv[1:]:
            url = f"http://127.0.0.1:{scheduler.http_server.port}{page}"
            answer = await AsyncHTTPClient().fetch(url, raise_error=False)
            end = answer.effective_url.rpartition("/")[2]
            visits.append([answer.code, end, answer.body.decode(), "bokeh.server" in sys.modules])
        print(json.dumps(visits))

asyncio.run(main())
"""


def visit(*pages: str, before: str = "") -> list[tuple[int, str, str, bool]]:
    """Open pages of a dask scheduler; return each code, the end of its address, its text, and whether Bokeh is there."""
    done = subprocess.run(
        [sys.executable, "-c", before + VISITS, *pages], capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(found) for found in json.loads(done.stdout)]


def test_the_first_page_imports_the_dashboard() -> None:
    health, first, tasks, nothing = visit("/health", "/", "/individual-task-stream", "/nothing")
    assert health == (200, "health", "ok", False)
    assert first[:2] == (200, "status") and "bokeh" in first[2] and first[3]
    assert tasks[0] == 200 and "bokeh" in tasks[2]
    assert nothing[0] == 404


IMPORTS = """
import asyncio, json, sys, threading
from distributed import Scheduler
from gpujobs.injob.dashboard import dask_setup
from tornado.httpclient import AsyncHTTPClient

began, goes_on = threading.Event(), threading.Event()

class Slow:
    def find_spec(self, name, *arguments):
        if name == "bokeh":
            began.set()
            assert goes_on.wait(60)

async def main():
    async with Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0") as scheduler:
        dask_setup(scheduler)
        sys.meta_path.insert(0, Slow())

        def fetch(page, **options):
            url = f"http://127.0.0.1:{scheduler.http_server.port}{page}"
            return AsyncHTTPClient().fetch(url, raise_error=False, **options)

        pages = [asyncio.ensure_future(fetch(page)) for page in ("/status", "/workers")]
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
        socket = asyncio.ensure_future(fetch("/status/ws", headers=upgrade))
        elsewhere = asyncio.ensure_future(fetch("/https:example.org?a=b", follow_redirects=False))
        await asyncio.to_thread(began.wait, 60)
        health = (await fetch("/health")).code
        waiting = not any(page.done() for page in pages)
        goes_on.set()
        codes = [(await page).code for page in pages]
        print(json.dumps([health, waiting, codes, (await elsewhere).headers["Location"], (await socket).code]))

asyncio.run(main())
"""


def test_the_dask_scheduler_answers_while_its_dashboard_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    health, waiting, codes, location, socket = json.loads(done.stdout)
    assert (health, waiting, codes) == (200, True, [200, 200])
    assert socket == 503  # which its page tries again
    assert location == "./https:example.org?a=b"  # a page of this server, not another server


def test_a_page_says_that_bokeh_is_missing() -> None:
    ((code, end, text, _),) = visit("/", before="import sys; sys.modules['bokeh'] = None\n")
    assert (code, end) == (200, "status") and "Dask needs bokeh" in text
