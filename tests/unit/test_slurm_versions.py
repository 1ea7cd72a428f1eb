"""Recorded answers of several versions of Slurm to the commands that gpujobs runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from gpujobs.schedulers import CommandResult, JobId, JobState, JobStatus, get_scheduler
from gpujobs.schedulers.inventory import Survey
from gpujobs.schedulers.jobs import Reply

from ..support.transcripts import FOLDER, recorded

VERSIONS = sorted(path.stem for path in (FOLDER / "slurm" / "versions").glob("*.txt"))
SLURM = get_scheduler("slurm")()
REFUSED = ("no such partition", "no such GPU type", "too much memory", "no such account")
WITHOUT_CONTROLLER = ("status", "submit", "cancel")


def said(version: str, title: str) -> CommandResult:
    return recorded("slurm", f"versions/{version}.txt", title)


def jobs(version: str) -> dict[str, JobId]:
    """Return the job of each kind; the recorded file has their numbers in its first line."""
    first = (FOLDER / "slurm" / "versions" / f"{version}.txt").read_text().splitlines()[0]
    return {name: JobId(number) for name, number in re.findall(r"(\w+) (\d+)", first)}


def survey(version: str) -> Survey:
    titles = {
        "sinfo -h": "nodes and partitions",
        "scontrol show config": "settings",
        "scontrol show partition": "partitions",
        "sacctmgr -n -P show associations": "associations",
    }

    def ask(argv: Sequence[str]) -> str:
        words = " ".join(argv)
        found = [title for start, title in titles.items() if words.startswith(start)]
        return said(version, found[0]).stdout if found else ""

    inventory = get_scheduler("slurm").inventory
    assert inventory
    assert inventory().version(lambda _: said(version, "version").stdout).startswith(version)
    return inventory().survey(ask, "root")


def states(found: dict[JobId, JobStatus], version: str) -> dict[str, JobStatus]:
    return {name: found[job] for name, job in jobs(version).items() if job in found}


def test_all_supported_versions_are_recorded() -> None:
    assert VERSIONS == ["20.11", "22.05", "24.05", "26.05"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_survey_reads_the_partitions_of_each_version(version: str) -> None:
    found = survey(version)
    queues = {queue.name: queue for queue in found.queues}
    assert queues.keys() == {"main", "short", "whole", "pairs", "down"}
    assert next(iter(queues)) == "main", "the default one is the first"
    assert [name for name, queue in queues.items() if queue.exclusive] == ["whole"]
    assert [name for name, queue in queues.items() if not queue.open] == ["down"]
    assert (queues["pairs"].min_nodes, queues["pairs"].max_nodes) == (2, 1024)
    assert (queues["short"].max_walltime, queues["main"].max_walltime) == (600, None)
    nodes = {
        node.name: (node.gpus, node.free_gpus, node.gpu_type, node.cpus)
        for node in found.nodes
        if node.queue == "main"
    }
    assert nodes == dict.fromkeys(("node1", "node2"), (4, 4, "a100", 8))
    assert (found.max_array_size, found.cluster_name) == (10000, "private")
    assert found.account_required and "p1" in found.accounts


@pytest.mark.parametrize("version", VERSIONS)
def test_the_states_of_jobs_of_each_version_are_read(version: str) -> None:
    listed, own = said(version, "status"), jobs(version)
    array = [JobId(own["array"].submission, index) for index in range(10)]
    assert SLURM.reply(listed) is Reply.ANSWER
    found = SLURM.parse_status(listed, [*own.values(), *array])
    by_name = states(found, version)
    assert (by_name["ok"].state, by_name["failed"].state) == (JobState.COMPLETED, JobState.FAILED)
    waiting = {name: by_name[name] for name in ("held", "dependency", "begin")}
    assert {status.state for status in waiting.values()} == {JobState.PENDING}
    assert waiting["held"].reason.startswith("JobHeldUser: held by its user")
    assert waiting["dependency"].reason.startswith("DependencyNeverSatisfied: the job that")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]+", waiting["begin"].starts)
    kinds = [found[job].state for job in array[:2]]
    assert kinds == [JobState.RUNNING, JobState.CANCELLED] and found[array[0]].node
    assert {found[job].state for job in array[3:]} == {JobState.PENDING}
    assert SLURM.parse_find(said(version, "found").stdout, "svd-7f3a") == {
        job.submission for job in own.values()
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_the_accounting_of_each_version_is_read(version: str) -> None:
    own = jobs(version)
    member = JobId(own["array"].submission, 1)
    found = SLURM.parse_accounting(said(version, "accounting"), [*own.values(), member])
    by_name = states(found, version)
    assert (by_name["ok"].state, by_name["ok"].exit_code) == (JobState.COMPLETED, 0)
    assert (by_name["failed"].state, by_name["failed"].exit_code) == (JobState.FAILED, 3)
    assert (found[member].state, found[member].cancelled_by) == (JobState.CANCELLED, 0)
    assert by_name["held"].state is JobState.PENDING and not by_name["held"].node


@pytest.mark.parametrize("version", VERSIONS)
def test_refusals_and_outages_of_each_version_are_told_apart(version: str) -> None:
    submitted = said(version, "an array is submitted")
    assert SLURM.parse_submit(submitted.stdout) == jobs(version)["array"].submission
    for title in REFUSED:
        assert SLURM.reply(said(version, title)) is Reply.REFUSAL, title
        assert re.search("[Ii]nvalid|not available|satisfied", said(version, title).message)
    for name in WITHOUT_CONTROLLER:
        assert SLURM.reply(said(version, f"{name} without a controller")) is Reply.NONE, name
    tested, refused = said(version, "test of a script"), said(version, "test of a refused script")
    assert re.fullmatch(r"20\d\d-.*", SLURM.parse_estimate(tested)) and not SLURM.refuses(tested)
    assert "not available" in SLURM.refuses(refused)
    for title in ("cancel of an unknown job", "cancel of an ended job"):
        done = said(version, title)
        assert done.exit_code == 0 or SLURM.already_ended(done), title
