"""Commands on a login node, without one."""

from __future__ import annotations

import logging
import threading

import pytest

from gpujobs.clusters import remote
from gpujobs.errors import UnavailableError


class Stop(threading.Event):
    """Records how long is waited, and is set by the eighth time."""

    waits: list[float]

    def __init__(self) -> None:
        super().__init__()
        self.waits = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0)
        if len(self.waits) == 8:
            self.set()
        return self.is_set()


def test_a_host_that_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried less and less often, up to once a minute; a reason is logged once."""
    reasons = iter(["refused"] * 4 + ["timed out"] * 4)

    def fail() -> None:
        raise UnavailableError(next(reasons))

    stop = Stop()
    with caplog.at_level(logging.WARNING, "gpujobs"):
        assert remote.repeat("login", fail, stop) is None
    assert stop.waits == [3, 6, 12, 24, 48, 60, 60, 60]
    assert [text.split(" (")[0] for text in caplog.messages] == [
        "login: refused",
        "login: timed out",
    ]
    assert remote.repeat("login", lambda: 5, threading.Event()) == 5
