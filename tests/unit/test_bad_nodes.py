"""Which nodes have failed, for how long new jobs avoid them, and how a job says so."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gpujobs.batch.process import System
from gpujobs.cli.usage_text import nodes_text, ticket
from gpujobs.clusters import badnodes
from gpujobs.clusters.badnodes import BAD, NodeFailure, bad_nodes, failures, note, read
from gpujobs.clusters.clusterfolder import write_atomically
from gpujobs.clusters.history import GpuSamples, History
from gpujobs.clusters.judge import judge
from gpujobs.clusters.ledger import Ledger
from gpujobs.clusters.monitor import client_of
from gpujobs.clusters.report import ClusterReport
from gpujobs.clusters.submit import new_record, with_avoided
from gpujobs.clusters.targets import Targets
from gpujobs.clusters.usage import make_usage
from gpujobs.injob.folder import Ended, EndKind
from gpujobs.injob.jobevents import ExitRecord
from gpujobs.planning.plan import Plan
from gpujobs.planning.render import avoidance, render
from gpujobs.schedulers import JobId, JobState, JobStatus
from gpujobs.schedulers.slurm_inventory import SlurmInventory

from ..support.each import each
from ..support.filecalls import file_calls
from ..support.folderstate import folder_state, job_trace
from .report_data import RECORD, START, WORKERS
from .support import SLURM, made_plan

LOST_GPU = "worker svd-0000-1 ended (exit code 1): pynvml.NVMLError_GpuIsLost: GPU is lost"
NO_DRIVER = (
    "worker svd-0000-1 ended (exit code 1): the node has no NVIDIA driver, or the job has no GPU "
    "(pynvml.NVMLError_LibraryNotFound: NVML Shared Library Not Found)"
)


def failed_job(
    reason: str,
    *,
    seen: int = 0,
    exit_code: int = 1,
    says: JobState | None = None,
    began: float | None = START,
    ended: Ended | None = None,
    owner: str = "",
) -> ClusterReport:
    """Return a cluster whose job 1 has ended on node2 a minute after its start; ``says``: as the batch scheduler says.

    ``owner``: of a Python process, which "lives" or is "gone".
    """
    folder = folder_state(
        gone=dict.fromkeys(WORKERS[:seen], START + 60),
        ended=ended,
        jobs={
            1: job_trace("node2", began=began, left=ExitRecord(exit_code, "node2"), reason=reason)
        },
    )
    answers = {JobId("7", 0): JobStatus(JobState.RUNNING, node="node1")}
    if says:
        answers[JobId("7", 1)] = JobStatus(says, node="node2", exit_code=exit_code)
    return judge(
        replace(RECORD, owner="client") if owner else RECORD,
        folder,
        answers,
        now=START + 60,
        owner_lives=owner == "lives",
        gone_owner="process 7 on node0" if owner == "gone" else "",
    )


@each(
    ("report", "sure"),
    [
        (failed_job(LOST_GPU), True),
        (failed_job(NO_DRIVER), None),  # the site file, or the container, may be wrong
        (failed_job(NO_DRIVER, seen=2), True),  # only on this one
        (failed_job(f"{NO_DRIVER}; Xid 79 at 0000:09:00"), True),
        (failed_job("svd-0000-1 on node2: 2 GPUs were requested, but 1 assigned (0)"), True),
        (
            failed_job("svd-0000-1 on node2: the launcher's step has 1 of the job's 4 GPUs (0)"),
            None,
        ),
        (failed_job(LOST_GPU, ended=Ended(EndKind.FAILED, 1, NO_DRIVER, 1, START + 50)), True),
        (failed_job("ModuleNotFoundError: No module named 'x'"), None),  # as on all nodes
        (failed_job("ModuleNotFoundError: No module named 'x'", seen=2), True),  # only on this one
        (
            failed_job("", seen=2, exit_code=143, says=JobState.CANCELLED),
            None,
        ),  # by hand, while it started
        (failed_job("", seen=2, exit_code=143, says=JobState.PREEMPTED), None),
        (failed_job(LOST_GPU, says=JobState.CANCELLED), True),
        (failed_job("killed", seen=4), False),  # its workers had connected
        (failed_job("killed", seen=4, began=START - 600), None),
        (failed_job("killed", seen=4, ended=Ended(EndKind.FAILED, 1, "x", 1, START + 50)), None),
        (failed_job("x", seen=4, exit_code=0), None),
        (failed_job("killed", seen=4, owner="lives"), False),
        (failed_job("the dask scheduler is gone", seen=4, owner="gone"), None),
        (failed_job("cannot reach the dask scheduler", seen=2, owner="gone"), None),
        (failed_job(LOST_GPU, owner="gone"), True),
    ],
)
def test_a_node_is_to_blame_for_failures_of_its_gpus_only(
    report: ClusterReport, sure: bool | None
) -> None:
    found = list(failures(report, START + 60))
    assert [(one.node, one.sure) for one in found] == ([] if sure is None else [("node2", sure)])


@pytest.mark.parametrize(
    ("reason", "node"),
    [
        ("worker svd-0000-1-1 on node3 ended (exit code 1): NVMLError_Unknown", "node3"),
        ("svd-0000-1-1 on node3: 4 GPUs were requested, but 2 assigned (0,1)", "node3"),
        ("rank 3 on node3: NVMLError_Unknown: Unknown Error", "node3"),
        ("worker svd-0000-1 on node2.cluster ended (exit code 1): NVMLError_Unknown", "node2"),
        ("NVMLError_Unknown: GPU on host1: failed", "node2"),
    ],
)
def test_the_node_that_the_reason_names_is_to_blame(reason: str, node: str) -> None:
    """The batch scheduler says node2, or it is the first of an allocation's."""
    assert [one.node for one in failures(failed_job(reason), START + 60)] == [node]


def failure(node: str, time: float, *, sure: bool = True, site: str = "here") -> NodeFailure:
    return NodeFailure(time, site, node, "svd-0000", f"7_{time:.0f}", time - 60, LOST_GPU, sure)


def test_a_node_is_avoided_for_a_limited_time() -> None:
    found = [
        failure("old", 0.0),
        failure("once", 100.0, sure=False),
        failure("twice", 100.0, sure=False),
        failure("twice", 200.0, sure=False),
        failure("bad", 300.0),
        failure("elsewhere", 300.0, site="other"),
    ]
    assert list(bad_nodes(found, "here", BAD + 50)) == ["bad", "twice"]
    assert list(bad_nodes(found, "here", BAD + 250)) == ["bad"]
    assert list(bad_nodes(found, "here", BAD + 300)) == []


@each(
    ("reason", "time", "is_bad"),
    [
        ("worker svd-0000-1 ended (exit code 1): killed; Xid 79 at 0000:09:00", 30, True),
        (LOST_GPU, 30, True),
        ("1 of 2 GPUs visible (GPU is lost)", 30, True),
        ("worker svd-0000-1 ended (exit code 1): killed; Xid 13 at 0000:09:00", 30, False),
        ("svd-0000-1 on node2: 2 GPUs were requested, but 1 assigned (0)", 30, False),
        ("launch failed: its script did not run", 30, False),
        (LOST_GPU, -30, False),  # the job started although this was known
    ],
)
def test_a_running_job_leaves_a_node_on_which_a_gpu_fails(
    reason: str, time: float, is_bad: bool
) -> None:
    job = failed_job("x").jobs[0]
    job = replace(job, node="node0,node1", began=START)
    found = replace(failure("node1", START + time), reason=reason)
    assert (job.number in badnodes.turned_bad([job], [found], "svd-0000")) is is_bad
    others = [replace(found, node="node2"), replace(found, cluster="x"), replace(found, sure=False)]
    assert not badnodes.turned_bad([job], others, "svd-0000")


def test_a_failure_in_the_future_counts_as_now(tmp_path: Path) -> None:
    """A node whose clock is wrong is not bad for years; another host may be some seconds ahead."""
    now = START + 60
    ended = Ended(EndKind.FAILED, 1, LOST_GPU, 1, START + 10**9)
    report = failed_job(LOST_GPU, ended=ended)
    assert [one.time for one in failures(report, now)] == [now]
    found = [failure("far", START + 10**9), failure("near", now + 5)]
    assert list(bad_nodes(found, "here", now)) == ["near"]
    path = tmp_path / badnodes.FILE
    path.write_text("".join(f"{json.dumps(asdict(one))}\n" for one in found))
    note([report], Ledger(tmp_path), now)
    assert [one.node for one in read(Ledger(tmp_path))] == ["near", "node2"]


def test_the_file_has_each_failure_once(tmp_path: Path) -> None:
    ledger, report = Ledger(tmp_path), failed_job(LOST_GPU)
    for _ in range(2):
        (text,) = note([report], ledger, START + 60)[0].bad_nodes
    assert text == f"node node2 is bad for six hours: {LOST_GPU}"
    (one,) = read(ledger)
    assert (one.node, one.job, one.time) == ("node2", "7_1", START + 60)
    (path,) = failures(failed_job("/home/eve/bin/python: NVML error"), START + 60)
    assert path.reason == "(path): NVML error"
    assert ledger.all() == []  # it is no record
    later = START + 2 * 86400
    assert (
        note([replace(report, record=replace(RECORD, finished=True))], ledger, later)[0].bad_nodes
        == ()
    )
    (tmp_path / badnodes.FILE).write_text("half a li")
    assert read(ledger) == []
    assert note([failed_job("fine", exit_code=0, seen=4)], ledger, START)[0].bad_nodes == ()


def test_the_text_for_the_operator_has_what_a_ticket_needs() -> None:
    sampled = History(started={1: START}, gpus=(GpuSamples(1, "node2", "GPU-1", 2**34),))
    usage = make_usage(failed_job(LOST_GPU), sampled, Targets(), START + 60)
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
    (launched,) = failures(failed_job("launch failed requeued held", began=None), START + 60)
    assert "\n  started  it did not begin\n" in ticket([launched], usage)


@pytest.mark.parametrize(
    ("nodes", "own", "others"),
    [(1, 0, 0), (2, 0, 0), (3, 1, 0), (9, 2, 0), (10, 2, 1), (20, 2, 2), (400, 2, 38)],
)
def test_a_tenth_of_the_nodes_and_those_of_the_cluster_itself_are_avoided(
    home: Path, nodes: int, own: int, others: int
) -> None:
    """The cluster of two whole nodes has failed on two of 40 bad nodes, which are not the newest."""
    (home / "s.yaml").write_text(
        SLURM.replace("gpus_per_node: 4", f"gpus_per_node: 4, nodes: {nodes}")
    )
    bad = [failure(f"n{number}", START + number) for number in range(40)]
    bad[1:3] = [replace(one, cluster="p-0000") for one in bad[1:3]]
    plan = with_failures(made_plan(home, {"gpus": 8}), bad, home)
    newest = [one.node for one in reversed(bad) if one.cluster != "p-0000"]
    expected = [*["n2", "n1"][:own], *newest[:others]]
    assert list(avoidance(plan, plan.groups[0])[0]) == expected


def with_failures(plan: Plan, found: list[NodeFailure], home: Path) -> Plan:
    """Return the plan of new jobs of the cluster p-0000 after these failures."""
    (home / badnodes.FILE).write_text("".join(f"{json.dumps(asdict(one))}\n" for one in found))
    plan = replace(plan, site_name="here")
    client = client_of(new_record(plan, "p-0000"), system=At(START + 100))
    return with_avoided(plan, client, Ledger(home), "p-0000")


class At(System):
    """The host at another time."""

    def __init__(self, moment: float) -> None:
        self.moment = moment

    def time(self) -> float:
        return self.moment


@pytest.mark.parametrize(("nodes", "avoided"), [(9, []), (10, ["bad"]), (0, [])])
def test_the_batch_scheduler_is_asked_for_the_number(
    home: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, avoided: list[str]
) -> None:
    """Without bad nodes it is not; 0: it does not answer."""
    asked, sinfo = home / "asked", home / "sinfo"
    widths = [column.partition(":") for column in SlurmInventory().nodes_command()[-1].split(",")]
    row = {"Partition": "gpu", "StateLong": "idle", "CPUsState": "0/64/0/64", "Gres": "gpu:4",
           "Memory": "500000", "Available": "up"}  # fmt: skip
    rows = [{**row, "NodeList": f"n{number}"} for number in range(nodes)]
    lines = (
        "".join(one.get(name, "").ljust(int(size)) for name, _, size in widths) for one in rows
    )
    (home / "rows").write_text("".join(f"{line}\n" for line in lines))
    sinfo.write_text(f"#!/bin/sh\ntouch {asked}\ncat {home}/rows\n{'' if nodes else 'exit 1'}\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:/usr/bin:/bin")
    plan = made_plan(home, {"gpus": 1})
    assert with_failures(plan, [], home).avoid == {} and not asked.exists()
    plan = with_failures(plan, [failure("bad", START)], home)
    assert list(avoidance(plan, plan.groups[0])[0]) == avoided and asked.exists()


def test_each_batch_scheduler_has_its_directive_or_none(home: Path) -> None:
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


@pytest.mark.parametrize("machine", ["example-pbs", "example-torque"])
def test_a_node_that_cannot_be_avoided_changes_nothing(home: Path, machine: str) -> None:
    """OpenPBS refuses `host!=n7`, and Torque has no such request: nothing is written or noted."""
    usual = made_plan(home, {"gpus": 1, "account": "p12345"}, machine)
    bad = [failure("n7", START)]
    plan = with_failures(usual, bad, home)
    assert plan.avoid == {} and plan.notes == usual.notes
    forced = replace(usual, avoid={"": ["n7"]})
    assert render(forced, "p-0000")[0].text == render(usual, "p-0000")[0].text
    assert avoidance(forced, forced.groups[0]) == ((), "")


def test_a_directive_of_the_user_has_priority(home: Path) -> None:
    usual = replace(made_plan(home, {"gpus": 1}), avoid={"": ["n7"]})
    assert "\n#SBATCH --exclude=n7\n" in render(usual, "p-0000")[0].text
    own = replace(made_plan(home, {"gpus": 1, "directives": ["--exclude=n1"]}), avoid={"": ["n7"]})
    text = render(own, "p-0000")[0].text
    assert "--exclude=n1" in text and "n7" not in text
    assert avoidance(own, own.groups[0]) == ((), "")


def test_the_sites_own_directive_excludes_nodes(home: Path) -> None:
    """Torque has none: a real one refuses `-l host!=n7`, and passes `-W x=…` on to hooks."""
    site = SLURM.replace("slurm", "torque").replace("--account={account}", "-A {account}")
    option = "options: {avoid_nodes: {directive: '-W x=EXCLUDE:{avoid_nodes}'}}\n"
    (home / "t.yaml").write_text(site + option)
    plan = replace(made_plan(home, {"gpus": 1}, "./t.yaml"), avoid={"": ["n7", "n8"]})
    assert "\n#PBS -W x=EXCLUDE:n7,n8\n" in render(plan, "p-0000")[0].text


def test_the_table_of_nodes_begins_with_the_newest_failure() -> None:
    found = badnodes.rows(
        [failure("node2", START), failure("node3", START + 9, sure=False)], START + 60
    )
    assert [line.split()[:2] for line in nodes_text(found).splitlines()] == [
        ["NODE", "SITE"],
        ["node3", "here"],
        ["node2", "here"],
    ]
    assert [row["bad"] for row in found] == [False, True]
    assert "2027-01-15 08:00:00 UTC  for 6 h  worker svd" in nodes_text(found)


def test_the_file_of_bad_nodes_is_opened_only_if_it_has_changed(tmp_path: Path) -> None:
    """An owner looks once a second."""
    ledger, reader = Ledger(tmp_path), badnodes.FailuresReader(Ledger(tmp_path))
    assert reader.read() == []

    def write(*found: NodeFailure) -> None:
        lines = (f"{json.dumps(asdict(one))}\n" for one in found)
        write_atomically(tmp_path / badnodes.FILE, "".join(lines))

    first, second = failure("n1", START), failure("n2", START + 1)
    for found in ([first], [first, second], [second]):
        write(*found)
        assert "open" in file_calls(lambda: reader.read())
        assert reader.read() == read(ledger) == found
        assert "open" not in file_calls(lambda: reader.read())
    (tmp_path / badnodes.FILE).unlink()
    assert reader.read() == []
