"""The fake LSF as a backend."""

from __future__ import annotations

from typing import Any, ClassVar

from .fakes import FakeBackend


class LsfBackend(FakeBackend):
    """An LSF with the output of volclava and with IBM's ``-gpu``."""

    name = "lsf"
    dialect = "lsf"
    commands = ("bsub", "bjobs", "bhist", "bkill", "blaunch")
    settings: ClassVar[dict[str, Any]] = {
        "queues": {"main": None, "short": 10},
        "signals": {
            "delete": [["INT", 10], ["TERM", 10], ["KILL", 0]],
            "timeout": [["USR2", 600], ["INT", 10], ["TERM", 10], ["KILL", 0]],
        },
        "first_id": 101,
    }

    def site(self) -> dict[str, Any]:
        return self.usual_site("the tests' LSF")

    def kill_job(self, job: str) -> None:
        done = self.command("bkill", job)
        assert done.returncode == 0, done.stderr


class RelativeOfLsf(LsfBackend):
    """Volclava, which has no ``-gpu`` and does not set CUDA_VISIBLE_DEVICES."""

    commands = (*LsfBackend.commands, "bhosts", "bqueues", "lshosts", "bparams", "lsid")
    settings: ClassVar[dict[str, Any]] = {**LsfBackend.settings, "relative": True}
