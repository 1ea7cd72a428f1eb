"""Answers of batch schedulers that are cut off, joined or garbled: what is left decides nothing.

Recorded answers of real ones, each changed at random by a seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from gpujobs.errors import UnavailableError
from gpujobs.schedulers import CommandResult, JobId, JobStatus, Reply, get_scheduler
from gpujobs.schedulers.answers import reading

from ..support.tearing import torn
from ..support.transcripts import FOLDER, recorded

SLURM = ("20.11", "22.05", "24.05", "26.05")
OTHERS = (
    ("pbs", "03-status.txt", "running, json"),
    ("pbs", "03-status.txt", "pending, json"),
    ("pbs", "03-status.txt", "suspended, json"),
    ("pbs", "03-status.txt", "array parent, json"),
    ("pbs", "04-finished.txt", "done"),
    ("torque", "queues.txt", "jobs"),
    ("torque", "queues.txt", "members held by the slot limit"),
    ("lsf", "status.txt", "wide, all states"),
)
NODES = (
    ("slurm", "sinfo.txt", "nodes and partitions"),
    ("slurm", "shards.txt", "22.05"),
    ("pbs", "nodes.txt", "a busy node and an exclusive one, json"),
    ("torque", "queues.txt", "nodes, xml"),
    ("lsf", "inventory.txt", "hosts, wide"),
    ("lsf", "inventory.txt", "resources"),
    ("lsf", "inventory.txt", "queue limits"),
    ("lsf", "inventory.txt", "memory of hosts"),
    ("lsf", "gpus.txt", "several hosts"),
    ("sge", "qstat-F.txt", "queue instances"),
)


@dataclass(frozen=True)
class Answer:
    """A whole answer: ``kind`` is what reads it."""

    scheduler: str
    kind: str
    result: CommandResult


def _answers() -> Iterator[Answer]:
    for version in SLURM:
        for title, kind in (("status", "status"), ("accounting", "accounting")):
            yield Answer("slurm", kind, recorded("slurm", f"versions/{version}.txt", title))
    for name, file, title in OTHERS:
        result = recorded(name, file, title)
        if name == "torque":
            result = replace(result, argv=("qstat", "-t", "-f1"))
        if name == "lsf":
            result = replace(result, argv=("bjobs", "-a", "-w"))
        yield Answer(name, "status", result)
    grid_engine = (("qstat-mixed.xml", "status"), ("qacct.txt", "accounting"))
    for file, kind in grid_engine:
        argv = ("qstat", "-u", "alice", "-xml") if kind == "status" else ("qacct", "-j", "5")
        text = (FOLDER / "sge" / file).read_text()
        yield Answer("sge", kind, CommandResult(argv, 0, text))
    for name, file, title in NODES:
        yield Answer(name, "nodes", replace(recorded(name, file, title), exit_code=0))


ANSWERS = list(_answers())


def ids_in(answer: Answer) -> list[JobId]:
    """Return all jobs that a whole answer lists: whatever number is one."""
    text = re.sub(r"\[\d+\]", "[]", answer.result.stdout)
    numbers = dict.fromkeys(re.findall(r"\d+(?:\[\])?\.node1|\b\d{1,6}\b", text))
    candidates = [JobId(number, index) for number in numbers for index in (None, *range(12))]
    found = statuses(answer, answer.result, candidates)
    return [job for job, status in found.items() if "index" not in status.reason]


def statuses(answer: Answer, result: CommandResult, ids: Sequence[JobId]) -> dict[JobId, JobStatus]:
    """Return what is read in a result, {} if it is no answer."""
    scheduler = get_scheduler(answer.scheduler)()
    if scheduler.reply(result) is not Reply.ANSWER:
        return {}
    with reading(result.argv[:1]):
        if answer.kind == "accounting":
            return scheduler.parse_accounting(result, ids)
        return scheduler.parse_status(result, ids)


def check_jobs(answer: Answer, number: int) -> int:
    """Tear an answer about jobs ``number`` times; return how many were read all the same."""
    ids = ids_in(answer)
    whole = statuses(answer, answer.result, ids)
    assert whole, answer.result.argv
    chance = random.Random(f"{answer.result.argv} {answer.scheduler}")
    read = 0
    for _ in range(number):
        text = torn(answer.result.stdout, chance)
        try:
            found = statuses(answer, replace(answer.result, stdout=text), ids)
        except UnavailableError:
            continue
        read += bool(found)
        assert found.keys() <= set(ids)
        for job, status in found.items():
            if whole[job].in_queue:
                assert status.in_queue, (answer.result.argv, job, status, text)
    return read


def check_nodes(answer: Answer, number: int) -> None:
    """Tear an answer about nodes or queues ``number`` times; all else is as if it were empty."""
    inventory_class = get_scheduler(answer.scheduler).inventory
    assert inventory_class is not None
    inventory = inventory_class()
    chance = random.Random(f"{answer.result.argv} {answer.scheduler}")
    for _ in range(number):
        text = torn(answer.result.stdout, chance)

        def ask(argv: Sequence[str], text: str = text) -> str:
            alike = tuple(argv)[:2] == answer.result.argv[:2]
            return text if alike or argv[0] == "sinfo" else ""

        for read in (inventory.nodes, lambda ask: inventory.survey(ask, "alice")):
            try:
                with reading(["it"]):
                    read(ask)
            except UnavailableError as error:
                assert "cannot be read" in str(error)


def tear_all(number: int) -> None:
    """Tear all recorded answers, ``number`` times in all."""
    each = -(-number // len(ANSWERS))
    read = 0
    for answer in ANSWERS:
        if answer.kind == "nodes":
            check_nodes(answer, each)
        else:
            read += check_jobs(answer, each)
    assert read > number // 20  # most of these are still whole


def test_torn_answers_are_never_taken_for_whole_ones() -> None:
    tear_all(1500)


@pytest.mark.slow
def test_many_more_torn_answers_are_never_taken_for_whole_ones() -> None:
    tear_all(13000)


@pytest.mark.parametrize("answer", [one for one in ANSWERS if one.scheduler == "slurm"][:2])
def test_each_cut_of_squeue_and_sacct_is_no_answer(answer: Answer) -> None:
    """At any character: the last job may run. With the end of a line added, too."""
    text = answer.result.stdout
    ends = [match.end() for match in re.finditer("\n", text)]
    if answer.kind == "accounting":
        ends.insert(0, 0)  # it has no header
    for end in range(1, len(text)):
        if end in ends or end + 1 in ends:
            continue  # whole rows
        for added in ("", "\n"):
            result = replace(answer.result, stdout=text[:end] + added)
            columns = {"status": 7, "accounting": 4}[answer.kind]
            bars = text[:end].rpartition("\n")[2].count("|")
            whole_row = end > ends[0] and bars == columns - 1
            if not (added and whole_row):  # only its last column is cut
                assert get_scheduler("slurm")().reply(result) is Reply.NONE, result.stdout


@pytest.mark.parametrize(
    ("name", "reply", "id_"),
    [
        ("slurm", "7041\n", "7041"),
        ("slurm", "7041;delta\n", "7041"),
        ("pbs", "7041[].node1\n", "7041[].node1"),
        ("torque", "7041.node1\n", "7041.node1"),
        ("lsf", "Job <7041> is submitted to queue <gpu>.\n", "7041"),
        ("sge", "7041.1-4:1\n", "7041"),
    ],
)
def test_a_cut_reply_to_a_submission_is_no_id_of_another_job(
    name: str, reply: str, id_: str
) -> None:
    scheduler = get_scheduler(name)()
    assert scheduler.parse_submit(reply) == id_
    for end in range(len(reply)):
        assert scheduler.parse_submit(reply[:end]) is None
