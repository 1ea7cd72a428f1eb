"""A headless Chromium that a test controls: pages, clicks, sizes, dark and light, screenshots."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from .processes import patience

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
)
DRAWN = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))"
"""Waits until changes are drawn."""
LARGEST_ANSWER = 2**26


class Browser:
    """One page of a browser, controlled with the DevTools protocol."""

    def __init__(self, runner: asyncio.Runner, connection: WebSocketClientConnection) -> None:
        self._runner = runner
        self._connection = connection
        self._number = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol; return its result."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        return self._runner.run(self._answer(request))

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        await self._connection.write_message(json.dumps(request))
        while True:
            text = await asyncio.wait_for(self._connection.read_message(), patience(30))
            assert text is not None, "the browser has ended"
            answer = json.loads(text)
            if answer.get("id") == request["id"]:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, address: str) -> None:
        """Open a page."""
        self.call("Page.navigate", url=address)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise."""
        options = {"returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def text(self) -> str:
        """Return the visible text of the page."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def wait_for(self, condition: Callable[[str], object], seconds: float, reason: str) -> str:
        """Wait until a condition on the visible text holds; return the text."""
        deadline = time.monotonic() + patience(seconds)
        while not condition(text := self.text()):
            assert time.monotonic() < deadline, f"no {reason} in the page:\n{text}"
            time.sleep(0.2)
        return text

    def click(self, selector: str, text: str) -> None:
        """Click the visible element of a CSS selector that contains ``text``."""
        find = f"[...document.querySelectorAll({json.dumps(selector)})].filter(e => e.checkVisibility() && e.textContent.includes({json.dumps(text)}))"
        assert self.evaluate(f"{find}.length") >= 1, f"no {selector} with {text!r}"
        self.evaluate(f"{find}[0].scrollIntoView({{block: 'center'}})")
        self.evaluate(DRAWN)
        box = self.evaluate(f"(e => e.getBoundingClientRect().toJSON())({find}[0])")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window and the preferred colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.evaluate(DRAWN)

    def screenshot(self, selector: str = "") -> bytes:
        """Return a PNG of the window, or of the first element of a CSS selector."""
        options: dict[str, Any] = {}
        if selector:
            box = self.evaluate(
                f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()"
            )
            options["clip"] = {**{k: box[k] for k in ("x", "y", "width", "height")}, "scale": 1}
        answer = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, **options
        )
        return base64.b64decode(answer["data"])


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Start a Chromium whose files are in ``folder``; end it and its processes."""
    program = shutil.which("chromium")
    assert program
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = _port(folder / "DevToolsActivePort")
        with asyncio.Runner() as runner:
            connection = runner.run(_connect(port))
            try:
                yield Browser(runner, connection)
            finally:
                connection.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _port(path: Path) -> int:
    deadline = time.monotonic() + patience(30)
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) == 2:
            return int(lines[0])
        time.sleep(0.1)
    raise TimeoutError("the browser does not listen")


async def _connect(port: int) -> WebSocketClientConnection:
    from tornado.httpclient import AsyncHTTPClient

    answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json/list")
    page = next(item for item in json.loads(answer.body) if item["type"] == "page")
    request = HTTPRequest(page["webSocketDebuggerUrl"])
    return await websocket_connect(request, max_message_size=LARGEST_ANSWER)
