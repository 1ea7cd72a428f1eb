"""Fake batch schedulers as backends: commands first on PATH, and a server that really runs the jobs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from ..fakes.batch import engine
from .backend import Backend
from .cli import ORDINARY_USER, ROOT, python_for
from .processes import patience, reaper, stop, until

FAKES = ROOT / "tests" / "fakes" / "batch"


class FakeBackend(Backend):
    """The common part of the fakes. ``folder`` is the server's own; every user must be able to enter it."""

    dialect: str
    """Module in tests/fakes/batch."""
    commands: tuple[str, ...]
    settings: ClassVar[dict[str, Any]] = {}
    """Of the dialect, for config.json."""
    slots = 16

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        node_names = [f"node{n}" for n in range(1, self.nodes + 1)]
        shape = {
            "dialect": self.dialect,
            "nodes": node_names,
            "slots": self.slots,
            "gpus": self.gpus_per_node,
        }
        self.config = {**shape, **self.settings, **settings}

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeBackend]:
        """Start the server; stop it and all jobs at the end, also if the test run is killed."""
        (self.folder / "bin").mkdir(parents=True)
        for path in (self.folder, self.folder / "bin"):
            path.chmod(0o755)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        python = python_for(ORDINARY_USER if os.geteuid() == 0 else None)
        for command in self.commands:
            path = self.folder / "bin" / command
            path.write_text(
                f'#!/bin/sh\nexec {python} -SE {FAKES / self.dialect}.py {self.folder} {command} "$@"\n'
            )
            path.chmod(0o755)
        with reaper(str(self.folder)), (self.folder / "server.log").open("wb") as log:
            argv = [sys.executable, str(FAKES / "engine.py"), str(self.folder)]
            server = self.server = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                until((self.folder / "socket").exists, 20, "the fake's server")
                yield self
                self.clean()
            finally:
                stop(server)

    def env(self) -> dict[str, str]:
        return {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs, as the engine has them."""
        found: list[dict[str, Any]] = engine.ask(self.folder, "test", "jobs")["jobs"]
        return found

    def queue(self) -> list[str]:
        active = [job for job in self.jobs() if job["state"] != "done"]
        return [f"{job['id']} {job['index']} {job['state']} {job['name']}" for job in active]

    def clean(self) -> None:
        (self.folder / "faults.json").unlink(missing_ok=True)
        (self.folder / "quirks.json").unlink(missing_ok=True)
        targets = [[job["id"], job["index"]] for job in self.jobs() if job["state"] != "done"]
        engine.ask(self.folder, "test", "delete", targets=targets)
        until(lambda: not self.queue(), 60, "an empty queue")

    def expire(self, submission: str) -> None:
        """End the walltime of the jobs of a submission."""
        found = re.match(r"\d+", submission)
        assert found
        engine.ask(self.folder, "test", "expire", id=int(found[0]))

    def fault(self, fault: str, kind: str = "any", times: int | None = None) -> None:
        """Switch a fault of `engine` on; "" switches all off."""
        entry: dict[str, Any] = {"fault": fault}
        if times is not None:
            entry["times"] = times
        (self.folder / "faults.json").write_text(json.dumps({kind: entry} if fault else {}))

    def quirk(self, **quirks: float) -> None:
        """Switch quirks of `engine` and of the dialect on or off; without arguments, reset them."""
        path = self.folder / "quirks.json"
        path.unlink(missing_ok=True)
        if quirks:
            path.write_text(json.dumps(quirks))

    def pause(self, seconds: float) -> None:
        self.fault("down")
        time.sleep(seconds)
        self.fault("")

    def command(
        self, *argv: str, stdin: str = "", cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the commands as the user who runs the tests."""
        env = {"HOME": str(self.folder), **self.env()}
        return subprocess.run(
            argv,
            env=env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=False,
            cwd=cwd or self.folder,
        )


class PbsBackend(FakeBackend):
    """OpenPBS as of 2026, with the hook that names a job's GPUs."""

    name = "pbs"
    dialect = "pbs"
    commands = ("qsub", "qstat", "qdel", "qselect", "pbsnodes", "qmgr")
    settings: ClassVar[dict[str, Any]] = {
        "queues": {"main": {"max_walltime": 172800}, "short": {"max_walltime": 600}, "off": {"enabled": False}},
        "signals": {why: [["TERM", 5], ["KILL", 0]] for why in ("delete", "timeout")},
        "first_id": 61, "acl_roots": True, "hook": True, "history": 3600, "max_array_size": 10000,
        "resources": ["filesystems", "storage", "jobfs", "wd"],
        "quirks": {"first_id_only": 1, "qdel_aborts": 1},
    }  # fmt: skip

    def site(self) -> dict[str, Any]:
        return self.usual_site(f"the tests' {self.name}", visible_devices="scheduler")

    def kill_job(self, job: str) -> None:
        done = self.command("qdel", job)
        assert done.returncode == 0, done.stderr


class TorqueBackend(PbsBackend):
    """Torque."""

    name = "torque"
    dialect = "torque"
    commands = ("qsub", "qstat", "qdel", "pbsnodes")
    settings: ClassVar[dict[str, Any]] = {
        **PbsBackend.settings,
        # The login shell above the script dies of SIGTERM; the mom then kills the other processes.
        "signals": {**PbsBackend.settings["signals"], "delete": [["TERM", 0.1], ["KILL", 0]]},
        "first_id": 1,
        "history": 300,
        "quirks": {},
    }
