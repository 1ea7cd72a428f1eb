"""Groups of workers: plans, reports, records, and how many workers a group needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status

from gpujobs.cli.plan_text import plan_json, plan_text
from gpujobs.clusters.judge import judge
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Ledger, Submission
from gpujobs.clusters.logs import choose
from gpujobs.clusters.report import cluster_json
from gpujobs.config.spec import group_specs, load_spec, read_spec, write_spec
from gpujobs.errors import InputError
from gpujobs.injob.demand import HANDLER, add_handlers
from gpujobs.injob.folder import RegisteredWorker
from gpujobs.injob.job import enough_workers
from gpujobs.injob.options import parse
from gpujobs.planning.plan import Machine, make_plan
from gpujobs.planning.render import render
from gpujobs.schedulers import JobId, JobState, JobStatus

from ..support.each import each
from ..support.folderstate import folder_state
from .support import SLURM, error_of, made_plan, make_spec

TWO_QUEUES = (
    SLURM.replace(
        "defaults:",
        "  cpu: {cpus_per_node: 64, memory_per_node: 256GiB, max_jobs: 3}\ndefaults:",
    )
    + "max_queued_jobs: 6\n"
)
GROUPS = """\
workers: {threads: 2, options: {pid_file: w.pid}}
env: {A: "1"}
groups:
  gpu: {gpus: 4, gpus_per_job: 2}
  prep:
    gpus: 0
    env: {B: "2"}
    workers: {count: 2, memory: 8GiB, resources: {MEMORY: 8}}
"""


@pytest.fixture(autouse=True)
def two_queues(home: Path) -> None:
    (home / "s.yaml").write_text(TWO_QUEUES)


# -- plan --------------------------------------------------------------------------------------------------------
def test_each_group_is_planned_by_its_own_profile(home: Path) -> None:
    made = made_plan(home, GROUPS)
    gpu, prep = made.groups
    assert (gpu.queue, gpu.shape.jobs, gpu.shape.workers) == ("gpu", 2, 2)
    assert (prep.queue, prep.shape.jobs, prep.shape.worker_threads) == ("cpu", 2, 2)
    assert (gpu.profile.env, prep.profile.env) == ({"A": "1"}, {"A": "1", "B": "2"})
    assert (made.gpus, made.n_workers, made.start_workers) == (4, 6, 1)
    names = ["gpu-0-0", "gpu-0-1", "gpu-1-0", "gpu-1-1", "prep-2", "prep-3"]
    assert made.worker_names("svd-0000") == [f"svd-0000-{name}" for name in names]
    scripts = render(made, "svd-0000")
    assert [(script.first, script.count) for script in scripts] == [(0, 2), (2, 2)]
    assert "--resources=GPU=1" in scripts[0].text and "--resources=MEMORY=8" in scripts[1].text
    assert all("--pid-file=w.pid" in script.text for script in scripts)


def test_plan_shows_each_group(home: Path) -> None:
    text = plan_text(made_plan(home, GROUPS), "svd-0000")
    for line in ("4 requested, 4 with a worker of their own", "gpu: jobs          2 x (1 node, 2 GPUs", "prep: jobs         2 x (1 node, no GPU",
                 "gpu: workers       4: svd-0000-gpu-0-0", "prep: each worker  CPU worker, 2 threads",
                 "dask scheduler     in the job that starts first, of group gpu or prep"):  # fmt: skip
        assert line in text, text
    found = plan_json(made_plan(home, GROUPS), "svd-0000")
    assert found["worker_threads"] is None
    assert [group["name"] for group in found["groups"]] == ["gpu", "prep"]  # type: ignore[attr-defined]
    assert [jobs["group"] for jobs in found["jobs"]] == ["gpu", "prep"]  # type: ignore[attr-defined]


def test_a_plan_without_groups_has_no_keys_of_groups(home: Path) -> None:
    made = made_plan(home, "gpus: 2\n")
    found = plan_json(made, "svd-0000")
    assert "groups" not in found and found["worker_threads"] == 1
    assert "jobs            1 x (1 node, 2 GPUs" in plan_text(made, "svd-0000")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("gpus: 4\n", "`gpus` is a key of each group"),
        ("layout: mpi\n", "`layout: mpi` is one job with all workers, which has no `groups`"),
        ("head: {group: nosuch}\n", "there is no group `nosuch`"),
        ("head: {group: gpu, cpus: 2}\n", "`group` is for jobs of a group, cpus for a separate job"),
        ("start_workers: 7\n", "start_workers is 7, but there will be 6 workers"),
    ],
)  # fmt: skip
def test_keys_that_contradict_groups_are_refused(home: Path, changes: str, message: str) -> None:
    assert message in error_of(home, GROUPS + changes)


@each(
    ("group", "message"),
    [
        ("a: {start_workers: 2}", "groups.a.start_workers is 2, but there will be 1 worker"),
        ("a: {queue: nosuch}", "p.yaml:2:14: group a: site s has no queue `nosuch`"),
        ("a: {walltime: 3d}", "p.yaml:2:17: group a: no queue fits"),
        ("a: {gpus: 0, workers: {rmm_pool_size: 0.5}}", "group a: `workers.rmm_pool_size` is an option of CUDA workers"),
        ("a: {gpus: 0, workers: {count: 4}}", "group a: no queue fits"),
        ("a: {account: P1}", "group a: account 'P1' does not match the site's pattern"),
        ("jobs: {}", "'jobs' is reserved"),
        ("self: {}", "'self' is reserved"),
        ("a-1: {}", "'a-1': up to 40 letters, digits and '_', starting with a letter"),
        ("a: {gpu: 4}", "use `groups.a.gpus`"),
        ("a: {run: x}", "unknown key `groups.a.run`"),
    ],
)  # fmt: skip
def test_problems_name_the_group_and_its_line(home: Path, group: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        spec = make_spec(home, f"groups:\n  {group}\n", str(home / "s.yaml"), name="p.yaml")
        make_plan(spec, python="python")
    assert message in str(caught.value)


def test_limits_count_the_groups_before_and_the_head(home: Path) -> None:
    two = "groups: {a: {gpus: 0, workers: {count: 2}}, b: {gpus: 0, workers: {count: 2}}}\n"
    assert "group b: no queue fits" in error_of(home, two)
    assert "4 jobs; the queue allows 3 of one user (`max_jobs`)" in error_of(home, two)
    three = "groups: {a: {gpus: 3, gpus_per_job: 1}, b: {gpus: 0, workers: {count: 3}}}\n"
    assert made_plan(home, three).jobs_with_workers == 6
    assert "7 jobs; the site allows 6" in error_of(home, three + "head: {queue: gpu}\n")


def test_groups_that_differ_are_noted(home: Path) -> None:
    assert not made_plan(home, "run: ls\ngroups: {a: {}, b: {}}\n").notes
    differ = "run: ls\ngroups: {a: {walltime: 2h}, b: {env: {X: '1'}}}\n"
    (note,) = made_plan(home, differ).notes
    assert "of group a or b" in note and "they differ in walltime and environment: " in note
    assert not made_plan(home, differ + "head: {group: a}\n").notes
    path = home / "differ.yaml"
    path.write_text(differ)
    spec = load_spec(path, site=str(home / "s.yaml"))
    owned = make_plan(spec, python="python", replaces="owner")  # of a Python process
    assert not any("differ" in note for note in owned.notes)


def test_only_one_group_has_the_head(home: Path) -> None:
    made = made_plan(home, GROUPS + "head: {group: prep}\nrun: python x.py\n")
    gpu, prep = render(made, "svd-0000")
    assert "--scheduler " not in gpu.text and "--run " not in gpu.text
    assert "--scheduler " in prep.text and "--run python x.py" in prep.text


def test_ucxx_is_for_nodes_with_gpus(home: Path) -> None:
    (home / "s.yaml").write_text(TWO_QUEUES + "network: {protocols: [ucxx, tcp]}\n")
    made = made_plan(home, GROUPS)
    assert made.transport.protocols == ("tls",)
    assert any("ucxx is not used: nodes without GPUs may not have it" in n for n in made.notes)
    explicit = made_plan(home, GROUPS + "network: {protocol: ucxx}\n")
    assert explicit.transport.protocols == ("ucxx",)
    assert "ucxx" in made_plan(home, "groups: {a: {}, b: {}}\n").transport.protocols


def test_groups_share_the_gpus_of_this_machine(home: Path) -> None:
    machine = Machine(gpus=("0", "2", "3"), cpus=12, memory=30 * 2**30, busy={})
    profile = "groups: {a: {gpus: 2, gpus_per_job: 1}, b: {gpus: 1}}\n"
    made = made_plan(home, profile, "local", machine)
    assert [script.devices for script in render(made, "svd-0000")] == [("0", "2"), ("3",)]
    assert [group.shape.memory for group in made.groups] == [10 * 2**30, 10 * 2**30]
    more = "groups: {a: {gpus: 2}, b: {gpus: 2}}\n"
    assert "group b: 2 GPUs wanted, 1 free" in error_of(home, more, "local", machine)


def test_the_number_of_gpus_of_a_site_is_no_default_of_groups(home: Path) -> None:
    (home / "s.yaml").write_text(TWO_QUEUES.replace("walltime: 1h", "walltime: 1h, gpus: 4"))
    assert made_plan(home, "groups: {a: {}}\n").gpus == 1


def test_a_specification_with_groups_survives_its_file(home: Path) -> None:
    options = "groups: {a: {workers: {options: {x: true, y: '1'}}}}\n"
    spec = make_spec(home, options, str(home / "s.yaml"))
    write_spec(spec, home / "spec.json")
    found = group_specs(read_spec(home / "spec.json"))
    assert found["a"].profile.workers.options == {"x": True, "y": "1"}


# -- report ------------------------------------------------------------------------------------------------------
WORKER = RegisteredWorker(address="tls://h:1", threads=1, gpu=None)
RECORD = ClusterRecord(
    id="svd-0000", site="here", scheduler="slurm", folder="/nosuch", created=1.0, run=(), encrypted=True,
    groups=(GroupRecord("gpu", 2, 1, 1, "main"), GroupRecord("prep", 1, 1, 0, "cpu")),
    submissions=(Submission("7", 0, 2, "gpu", array=True), Submission("8", 2, 1, "prep")),
)  # fmt: skip


def test_the_report_counts_by_group() -> None:
    folder = folder_state(workers={"svd-0000-gpu-0": WORKER, "svd-0000-prep-2": WORKER}, head=0)
    answers = {
        JobId("7", 0): JobStatus(JobState.RUNNING), JobId("7", 1): JobStatus(JobState.PENDING, reason="Resources"),
        JobId("8"): JobStatus(JobState.RUNNING),
    }  # fmt: skip
    found = judge(RECORD, folder, answers, now=2.0)
    assert [(job.number, job.group, job.workers) for job in found.jobs] == [
        (0, "gpu", ("svd-0000-gpu-0",)), (1, "gpu", ("svd-0000-gpu-1",)), (2, "prep", ("svd-0000-prep-2",)),
    ]  # fmt: skip
    assert found.reason == "1 gpu waiting (Resources)" and not found.complete
    value: Any = cluster_json(found)
    assert value["workers"]["groups"] == [
        {"name": "gpu", "wanted": 2, "connected": 1}, {"name": "prep", "wanted": 1, "connected": 1},
    ]  # fmt: skip
    assert [job["group"] for job in value["jobs"]] == ["gpu", "gpu", "prep"]


def test_more_workers_of_one_group_do_not_replace_another() -> None:
    record = replace(RECORD, groups=RECORD.with_target("gpu", 1))
    workers = {f"svd-0000-gpu-{n}": WORKER for n in range(2)}
    found = judge(record, folder_state(workers=workers, head=0), {}, now=2.0)
    assert (found.connected, found.target, found.complete) == (2, 2, False)


def test_a_record_with_groups_is_read_as_it_was_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add(RECORD)
    assert ledger.get("svd-0000") == RECORD and (RECORD.workers, RECORD.gpus) == (3, 2)


def test_a_worker_of_a_group_has_the_log_of_its_job() -> None:
    (path,) = choose(RECORD, "svd-0000-prep-2", False)()
    assert path.name == "job-2.log"
    for name in ("svd-0000-2", "svd-0000-prep-9", "svd-0000-nosuch-2"):
        with pytest.raises(InputError, match="has no worker"):
            choose(RECORD, name, False)


# -- in the job --------------------------------------------------------------------------------------------------
def test_run_waits_for_workers_of_each_group() -> None:
    argv = ["supervise", "--folder=/x/svd-0000", "--job=0", "--started=1"]
    options: Any = parse([*argv, "--start-workers=3", "--start-groups=gpu=1,prep=2"])
    names = ["svd-0000-prep-2", "svd-0000-prep-3", "svd-0000-prep-4"]
    assert not enough_workers(options, names)
    assert not enough_workers(options, [*names[:1], "svd-0000-gpu-0", "svd-0000-gpu-1"])
    assert enough_workers(options, [*names[:2], "svd-0000-gpu-0"])
    assert not enough_workers(options, ["svd-0000-prep-2", "svd-0000-gpu-0"])


# -- demand ------------------------------------------------------------------------------------------------------
def task(duration: float = -1.0, **resources: float) -> SimpleNamespace:
    prefix = SimpleNamespace(duration_average=duration)
    return SimpleNamespace(resource_restrictions=resources or None, prefix=prefix)


def worker(name: str, processing: list[SimpleNamespace], nbytes: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        processing=processing,
        memory_limit=100,
        nbytes=nbytes,
        status=Status.running,
    )


def demand(workers: list[Any], queued: list[Any], unrunnable: list[Any], **group: Any) -> int:
    scheduler: Any = SimpleNamespace(
        handlers={}, queued=queued, unrunnable=unrunnable, workers={w.name: w for w in workers}
    )
    add_handlers(scheduler)
    values = {
        "prefix": "c-gpu-", "resources": {"GPU": 1.0}, "threads": 1, "plain_tasks": False, "target_duration": 5.0,
    }  # fmt: skip
    return int(scheduler.handlers[HANDLER](**(values | group)))


def test_a_group_is_wanted_for_tasks_that_it_can_run() -> None:
    gpu, plain, heavy = task(10.0, GPU=1), task(10.0), task(10.0, MEMORY=4)
    assert demand([], [plain] * 9, [heavy] * 9) == 0
    assert demand([], [plain] * 9, [gpu] * 3) == 3  # no more workers than tasks
    assert demand([], [], [task(1.0, GPU=1)] * 20) == 4  # 20 s of work in 5 s
    assert demand([], [], [task(GPU=1)]) == 1
    assert demand([], [], [task(0.001, GPU=2)]) == 0  # no worker has two
    prep = {"prefix": "c-prep-", "resources": {"MEMORY": 8.0}, "threads": 2, "plain_tasks": True}
    assert demand([], [plain] * 6, [heavy] * 4, **prep) == 5  # two at a time
    busy = [worker("c-gpu-0", [gpu] * 3), worker("c-prep-1", [plain] * 50)]
    assert demand(busy, [], []) == 3


def test_a_group_keeps_the_workers_that_hold_data() -> None:
    def held(nbytes: int) -> int:
        return demand([worker(f"c-gpu-{n}", [], nbytes) for n in range(4)], [], [])

    assert [held(n) for n in (0, 1, 20, 50, 61)] == [0, 1, 2, 4, 8]


def test_workers_that_leave_are_no_capacity() -> None:
    """They end the tasks that they have, and others get their data."""
    gpu = task(10.0, GPU=1)
    leaving = worker("c-gpu-0", [gpu] * 3, nbytes=50)
    leaving.status = Status.closing_gracefully
    assert demand([leaving], [], []) == 1  # for its data
    other = worker("c-gpu-1", [gpu])
    assert demand([leaving, other], [], []) == 1
    assert demand([leaving, other], [], [gpu] * 2) == 3
