"""Which nodes have failed, for how long new jobs avoid them, and how a job says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.cli.usage_text import nodes_text, ticket
from gpujobs.clusters import badnodes
from gpujobs.clusters.badnodes import AVOIDED, NodeFailure, bad_nodes, failures, note, read
from gpujobs.clusters.folder import ExitRecord, FolderState
from gpujobs.clusters.history import GpuSamples, History
from gpujobs.clusters.judge import judge
from gpujobs.clusters.ledger import Ledger
from gpujobs.clusters.report import ClusterReport
from gpujobs.clusters.usage import make_usage
from gpujobs.injob.folder import Ended, EndKind
from gpujobs.planning.render import avoidance, render
from gpujobs.schedulers import JobId, JobState, JobStatus

from .report_data import RECORD, START, WORKERS
from .support import made_plan

NO_DRIVER = "worker svd-0000-1 ended (exit code 1): the node has no NVIDIA driver (NVMLError_LibraryNotFound)"


def failed_job(reason: str, *, seen: int = 0, exit_code: int = 1, **state: object) -> ClusterReport:
    """Return a cluster whose job 1 has ended on node2 a minute after its start."""
    folder = FolderState(
        seen=frozenset(WORKERS[:seen]), exits={1: ExitRecord(exit_code, "node2")}, reasons={1: reason},
        nodes={1: "node2"}, began={1: START},
    )  # fmt: skip
    answers = {JobId("7", 0): JobStatus(JobState.RUNNING, node="node1")}
    return judge(RECORD, replace(folder, **state), answers, now=START + 60)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("report", "sure"),
    [
        (failed_job(NO_DRIVER), True),
        (failed_job("svd-0000-1 on node2: 2 GPUs were requested, but 1 assigned (0)"), True),
        (failed_job(NO_DRIVER, ended=Ended(EndKind.FAILED, 1, NO_DRIVER, 1, START + 50)), True),
        (failed_job("ModuleNotFoundError: No module named 'x'"), None),  # as on all nodes
        (failed_job("ModuleNotFoundError: No module named 'x'", seen=2), True),  # only on this one
        (failed_job("killed", seen=4), False),  # its workers had connected
        (failed_job("killed", seen=4, began={1: START - 600}), None),
        (failed_job("killed", seen=4, ended=Ended(EndKind.FAILED, 1, "x", 1, START + 50)), None),
        (failed_job("x", seen=4, exit_code=0), None),
    ],
)
def test_when_a_node_is_to_blame(report: ClusterReport, sure: bool | None) -> None:
    found = list(failures(report, START + 60))
    assert [(one.node, one.sure) for one in found] == ([] if sure is None else [("node2", sure)])


def failure(node: str, time: float, *, sure: bool = True, site: str = "here") -> NodeFailure:
    return NodeFailure(time, site, node, "svd-0000", f"7_{time:.0f}", time - 60, NO_DRIVER, sure)


def test_how_long_a_node_is_avoided() -> None:
    found = [
        failure("old", 0.0),
        failure("once", 100.0, sure=False),
        failure("twice", 100.0, sure=False),
        failure("twice", 200.0, sure=False),
        failure("bad", 300.0),
        failure("elsewhere", 300.0, site="other"),
    ]
    assert list(bad_nodes(found, "here", AVOIDED + 50)) == ["bad", "twice"]
    assert list(bad_nodes(found, "here", AVOIDED + 250)) == ["bad"]
    assert list(bad_nodes(found, "here", AVOIDED + 300)) == []


def test_the_file_has_each_failure_once(tmp_path: Path) -> None:
    ledger, report = Ledger(tmp_path), failed_job(NO_DRIVER)
    for _ in range(2):
        (text,) = note(report, ledger, START + 60).bad_nodes
    assert text == f"new jobs avoid node node2 for six hours: {NO_DRIVER}"
    (one,) = read(ledger)
    assert (one.node, one.job, one.time) == ("node2", "7_1", START + 60)
    (path,) = failures(failed_job("/home/eve/bin/python: NVML error"), START + 60)
    assert path.reason == "(path): NVML error"
    assert ledger.all() == []  # it is no record
    later = START + 2 * 86400
    assert (
        note(replace(report, record=replace(RECORD, finished=True)), ledger, later).bad_nodes == ()
    )
    (tmp_path / badnodes.FILE).write_text("half a li")
    assert read(ledger) == []
    assert note(failed_job("fine", exit_code=0, seen=4), ledger, START).bad_nodes == ()


def test_the_text_for_the_operator() -> None:
    sampled = History(started={1: START}, gpus=(GpuSamples(1, "node2", "GPU-1", 2**34),))
    usage = make_usage(failed_job(NO_DRIVER), sampled, START + 60)
    one = replace(failure("node2", START), reason="NVML error")
    assert ticket([one, replace(one, cluster="x")], usage) == (
        "node node2: a GPU job failed\n"
        f"  job      {one.job}\n"
        "  started  2027-01-15 07:59:00 UTC\n"
        "  failed   2027-01-15 08:00:00 UTC\n"
        "  reason   NVML error\n"
        "  GPU      GPU-1"
    )
    assert "no job has failed on a node" in ticket([], usage)


NODES = tuple(f"n{number}" for number in range(40))


@pytest.mark.parametrize(
    ("nodes", "most"), [(None, 1), (1, 0), (2, 1), (19, 1), (20, 2), (400, 40)]
)
def test_never_more_than_a_tenth_of_the_nodes(home: Path, nodes: int | None, most: int) -> None:
    plan = replace(made_plan(home, {"gpus": 1}), avoid=NODES)
    (jobs,) = plan.groups
    queue = replace(jobs.site.queues[jobs.queue_key], nodes=nodes)
    site = replace(jobs.site, queues={**jobs.site.queues, jobs.queue_key: queue})
    assert avoidance(plan, replace(jobs, site=site))[0] == NODES[:most]


def test_directives_of_each_batch_scheduler(home: Path) -> None:
    from gpujobs.schedulers import get_scheduler

    lines = {
        name: get_scheduler(name)().avoid(["a1", "b2"])
        for name in ("slurm", "lsf", "sge", "pbs", "torque", "local")
    }
    assert lines == {
        "slurm": "--exclude=a1,b2",
        "lsf": "-R \"select[hname!='a1' && hname!='b2']\"",
        "sge": "-l h='!(a1|b2)'",
        "pbs": "",
        "torque": "",
        "local": "",
    }


def test_a_directive_of_the_user_has_priority(home: Path) -> None:
    usual = replace(made_plan(home, {"gpus": 1}), avoid=("n7",))
    assert "\n#SBATCH --exclude=n7\n" in render(usual, "p-0000")[0].text
    own = replace(made_plan(home, {"gpus": 1, "directives": ["--exclude=n1"]}), avoid=("n7",))
    text = render(own, "p-0000")[0].text
    assert "--exclude=n1" in text and "n7" not in text
    assert avoidance(own, own.groups[0]) == ((), "")


def test_the_table_of_nodes() -> None:
    found = badnodes.rows(
        [failure("node2", START), failure("node3", START + 9, sure=False)], START + 60
    )
    assert [line.split()[:2] for line in nodes_text(found).splitlines()] == [
        ["NODE", "SITE"],
        ["node3", "here"],
        ["node2", "here"],
    ]
    assert [row["avoided"] for row in found] == [False, True]
    assert "2027-01-15 08:00:00 UTC  for 6 h  worker svd" in nodes_text(found)
