"""A batch scheduler in a package of its own: demo-submit, demo-list and demo-cancel.

It is as small as a batch scheduler can be. The class registers itself when it is imported. An entry
point of the group ``gpujobs.schedulers`` imports it when a site file has ``scheduler: demo``.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpujobs.schedulers import CommandResult, JobId, JobState, JobStatus, Reply, Scheduler

STATES = {
    "HELD": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "LOST": JobState.NODE_FAIL,
    "0": JobState.COMPLETED,
}
BUSY = 75
"""Exit code of the commands while the batch scheduler is busy."""


class Demo(Scheduler):
    """Jobs are processes of this machine, and folders below ``$DEMO_FOLDER``."""

    name = "demo"
    prefix = "#DEMO"
    environment = ("DEMO_FOLDER",)
    request = ("-q {queue}", "-g {gpus_per_job}")
    cpu_request = ("-q {queue}",)
    visible_devices = "scheduler"
    mpi_command = ("mpiexec", "-n", "{ranks}")
    managed = frozenset({"-N", "-o", "-t", "-a"})
    index_variable = "DEMO_INDEX"
    job_variable = "DEMO_JOB"
    hold = "-h"

    def output(self, root: str, cluster: str, array: bool) -> str:
        return f"{root}/{cluster}/logs/demo.log"

    def array(self, count: int) -> str:
        return f"-a {count}"

    def submit_command(self) -> list[str]:
        return ["demo-submit"]

    def parse_submit(self, stdout: str) -> str | None:
        return stdout.strip() if stdout.strip().isdigit() else None

    def reply(self, result: CommandResult) -> Reply:
        return Reply.NONE if result.exit_code == BUSY else super().reply(result)

    def find_command(self, name: str, user: str) -> list[str]:
        return ["demo-list"]

    def parse_find(self, stdout: str, name: str) -> set[str]:
        rows = (line.split() for line in stdout.splitlines())
        return {row[0] for row in rows if row[3] == name}

    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        return ["demo-list"]

    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> dict[JobId, JobStatus]:
        found = {}
        for line in result.stdout.splitlines():
            number, index, native, _ = line.split()
            state = STATES.get(native, JobState.FAILED)
            exit_code = int(native) if native.isdigit() else None
            status = JobStatus(state, native, exit_code=exit_code, node="localhost")
            found[JobId(number)] = found[JobId(number, int(index))] = status
        return {job: found[job] for job in ids if job in found}

    def cancel_command(self, targets: Sequence[str]) -> list[str]:
        return ["demo-cancel", *targets]
