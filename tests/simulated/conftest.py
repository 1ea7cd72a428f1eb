"""A client of a fake batch scheduler, and jobs that are submitted through it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpujobs.batch.client import SchedulerClient
from gpujobs.planning.render import render
from gpujobs.schedulers import get_scheduler

from ..support.cli import text_of
from ..support.fakes import FakeBackend
from ..support.processes import patience
from ..unit.support import plan


@pytest.fixture
def batch(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> SchedulerClient:
    """The batch scheduler, which is retried for a few seconds."""
    for name, value in backend.env().items():
        monkeypatch.setenv(name, value)
    return SchedulerClient(get_scheduler(backend.name)(), timeout=patience(6.0))


@pytest.fixture
def name() -> str:
    """A unique name for the jobs of this test, by which a lost submission is found."""
    return f"test-{secrets.token_hex(2)}"


@pytest.fixture
def submit_body(
    backend: FakeBackend, batch: SchedulerClient, name: str, tmp_path: Path
) -> Iterator[Callable[[str, dict[str, Any]], str]]:
    """Return a function that submits a body of its own with the directives of a profile's jobs."""
    site = tmp_path / "here.yaml"
    site.write_text(text_of(backend.site()))

    def go(body: str, profile: dict[str, Any]) -> str:
        text = render(plan(tmp_path, profile, str(site)), name)[0].text
        return batch.submit(text.partition("\n\n")[0] + f"\n{body}\n", name, (), tmp_path)

    yield go
    backend.clean()
