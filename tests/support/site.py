"""A batch scheduler that is already there: the one of a site file, for `pytest --site SITE`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpujobs.batch.client import SchedulerClient
from gpujobs.clusters.ledger import ClusterRecord, Ledger
from gpujobs.config.document import core_value
from gpujobs.config.sitefiles import load_site
from gpujobs.schedulers import JobId, get_scheduler

from .backend import Backend
from .cli import NVML
from .processes import patience, until


class SiteBackend(Backend):
    """Its first queue with GPUs is the queue ``main`` of the tests, the first one without is ``cpu``.

    ``nodes`` of it may be filled; with 0, tests that fill them are skipped. ``folder``: where the
    homes of the tests are, which login and compute nodes share.
    """

    same_host = False
    can_pause = False  # others use it

    def __init__(self, site: str, nodes: int, folder: Path) -> None:
        file = load_site(site)
        self.name = file.site.scheduler
        self.folder, self._nodes = folder, nodes
        self.scheduler = get_scheduler(self.name)(file.site.cluster)
        self.client = SchedulerClient(self.scheduler, file.site.commands, timeout=patience(60.0))
        self._templates = file.path.parent / "templates"
        queue, shape = next(item for item in file.site.queues.items() if item[1].gpus_per_node)
        self.gpus_per_node = shape.gpus_per_node or 0
        plain = core_value(file.document.value)
        assert isinstance(plain, dict)
        roles = {"main": queue}
        without = (name for name, found in file.site.queues.items() if not found.gpus_per_node)
        if cpu_queue := next(without, ""):
            roles["cpu"] = cpu_queue
        left_out = ("extends", "hostnames")
        self._site = {key: value for key, value in plain.items() if key not in left_out} | {
            "poll": "1s",
            "directory": "~/.gpujobs",
            "queues": {
                role: {**plain["queues"][name], "name": file.site.queue_name(name)}
                for role, name in roles.items()
            },
            "defaults": {**plain.get("defaults", {}), "walltime": "10m"},
        }
        self.fake_gpus = str(NVML) in file.site.setup

    @property
    def nodes(self) -> int:  # type: ignore[override]
        """The nodes that tests may fill; skips the test if there are none."""
        if not self._nodes:
            pytest.skip("--site-nodes: it needs all GPUs of the queue")
        return self._nodes

    def env(self) -> dict[str, str]:
        names = ("PATH", "LD_LIBRARY_PATH", *self.scheduler.environment)
        return {name: os.environ[name] for name in names if name in os.environ}

    def site(self) -> dict[str, Any]:
        return dict(self._site)

    def templates(self) -> Path | None:
        return self._templates if self._templates.is_dir() else None

    def queue(self) -> list[str]:
        return [f"{self.scheduler.show_id(job)} {name}" for job, name in self._active().items()]

    def clean(self) -> None:
        if jobs := self._active():
            self.client.cancel(list(jobs), list(set(jobs.values())))
            until(lambda: not self._active(), 120, "an empty queue")

    def pause(self, seconds: float) -> None:
        raise NotImplementedError

    def kill_job(self, job: str) -> None:
        command, *arguments = self.scheduler.cancel_command([job])
        subprocess.run([self.client.commands.get(command, command), *arguments], check=True)

    def wait_empty(self, seconds: float, name: str = "") -> float:
        return super().wait_empty(max(60, seconds), name)  # its kill delay is not ours to choose

    def _active(self) -> dict[JobId, str]:
        """Return the jobs of the tests' clusters that are in the queue, and their names."""
        jobs = {job: record.id for record in self._records() for job in record.jobs.values()}
        if not jobs:
            return {}
        found = self.client.status(list(jobs), sorted(set(jobs.values())))
        return {
            job: jobs[job] for job, status in found.items() if status.native and status.state.active
        }

    def _records(self) -> Iterator[ClusterRecord]:
        for folder in self.folder.glob("home-*/.local/state/gpujobs/clusters"):
            yield from Ledger(folder).all()


def shared_home() -> Path:
    """Return a new folder in the user's home, which login and compute nodes share."""
    return Path(tempfile.mkdtemp(prefix=".gpujobs-tests-", dir=Path.home()))


def remove(folder: Path) -> None:
    """Remove what the tests have written."""
    shutil.rmtree(folder, ignore_errors=True)
