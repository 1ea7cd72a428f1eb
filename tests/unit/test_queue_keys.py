"""Keys of a queue that decide which jobs it accepts, and what these request."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpujobs.cli.plan_text import plan_text
from gpujobs.config import placeholders
from gpujobs.config.sitefiles import load_site
from gpujobs.errors import InputError
from gpujobs.planning.limits import QueuedJobs, exceeded, job_limits, most_allowed

from ..support.each import each
from .support import SLURM, error_of, made_plan

HEAD = """\
description: test
scheduler: {scheduler}
visible_devices: scheduler
defaults: {{walltime: 1h}}
"""
NODE = "gpus_per_node: 4, cpus_per_node: 32, memory_per_node: 128GiB"


def site(home: Path, text: str, scheduler: str = "slurm") -> None:
    (home / "s.yaml").write_text(HEAD.format(scheduler=scheduler) + text)


def lines(home: Path, profile: str) -> tuple[str, ...]:
    return made_plan(home, profile).groups[0].lines


# -- auto ------------------------------------------------------------------------------------------
PREEMPT = f"queues:\n  low: {{auto: false, {NODE}}}\n  gpu: {{{NODE}, max_gpus: 2}}\n"


def test_a_queue_without_auto_is_selected_by_its_name_only(home: Path) -> None:
    site(home, PREEMPT)
    assert made_plan(home, "gpus: 4\n").groups[0].queue == "gpu"
    assert made_plan(home, "gpus: 4\nqueue: low\n").groups[0].queue == "low"
    message = error_of(home, "gpus: 4\ngpus_per_job: 4\n")
    assert "queue gpu: jobs of 4 GPUs; it allows 2 a job" in message
    assert "not tried, because `queue: auto` does not choose them: low" in message


def test_no_queue_may_be_chosen(home: Path) -> None:
    site(home, f"queues: {{low: {{auto: false, {NODE}}}}}\n")
    message = error_of(home, "gpus: 4\n")
    assert "site s has no queue that `queue: auto` may choose" in message
    assert "hint: queue: low" in message


def test_the_head_is_not_put_into_a_queue_that_only_its_name_selects(home: Path) -> None:
    site(home, f"queues: {{gpu: {{{NODE}}}, idle: {{auto: false}}, cpu: {{}}}}\n")
    head = made_plan(home, "gpus: 4\nhead: {cpus: 1}\n").head
    assert head and head.queue == "cpu"
    head = made_plan(home, "gpus: 4\nhead: {queue: idle}\n").head
    assert head and head.queue == "idle"


# -- gpu_types -------------------------------------------------------------------------------------
MIXED = f"queues: {{gpu: {{{NODE}, gpu_types: {{a100: NVIDIA_A100, l40: L40S}}}}}}\n"


def test_without_a_type_a_mixed_queue_gives_any(home: Path) -> None:
    site(home, MIXED)
    made = made_plan(home, "gpus: 4\n")
    assert "--gres=gpu:4" in made.groups[0].lines
    note = "jobs in queue gpu get GPUs of any type: a100, l40; `gpu_type` chooses one"
    assert note in made.notes and f"note: {note}" in plan_text(made, "x-0000")
    made = made_plan(home, "gpus: 4\ngpu_type: a100\nrun: ls\n")
    assert "--gres=gpu:NVIDIA_A100:4" in made.groups[0].lines and made.notes == ()


def test_a_type_that_the_queue_does_not_have_is_refused(home: Path) -> None:
    site(home, MIXED)
    message = error_of(home, "gpus: 4\ngpu_type: NVIDIA_A100\n")
    assert "its GPUs are a100, l40" in message and "s.yaml:5:" in message


def test_a_mixed_queue_may_have_a_default_type(home: Path) -> None:
    site(home, MIXED.replace("gpu_types", "gpu_type: l40, gpu_types"))
    assert "--gres=gpu:L40S:4" in lines(home, "gpus: 4\n")
    assert "--gres=gpu:NVIDIA_A100:4" in lines(home, "gpus: 4\ngpu_type: a100\n")
    site(home, MIXED.replace("gpu_types", "gpu_type: h100, gpu_types"))
    assert "has gpu_type h100, which is not one of its gpu_types" in error_of(home, "gpus: 4\n")


@each(
    ("text", "left"),
    [
        ("--gres=gpu:{gpu_type}:{gpus_per_node}", "--gres=gpu:{gpus_per_node}"),
        ("--gpus={gpu_type}:{gpus_per_job}", "--gpus={gpus_per_job}"),
        ("-G {gpu_type}:{gpus_per_job}", "-G {gpus_per_job}"),
        ("--gres=gpu:{gpus_per_node},x:{gpu_type}", "--gres=gpu:{gpus_per_node},x"),
        ("-l select=1:ngpus=2:model={gpu_type}", "-l select=1:ngpus=2"),
        ("-l select=1:model={gpu_type}:ngpus=2", "-l select=1:ngpus=2"),
        ("-l gpu=2,type={gpu_type}", "-l gpu=2"),
        ("-l type={gpu_type},gpu=2", "-l gpu=2"),
        ('-gpu "num=2:gmodel={gpu_type}"', '-gpu "num=2"'),
        ('-gpu "gmodel={gpu_type}:num=2"', '-gpu "num=2"'),
        ("-l gpu_type={gpu_type}", ""),
        ("-R {gpu_type}", ""),
        ("--constraint={gpu_type}", ""),
        ('-R "select[model=={gpu_type}]"', ""),
        ("--constraint={gpu_type}&x", "--constraint={gpu_type}&x"),
        ('-R "select[model=={gpu_type} && x]"', '-R "select[model=={gpu_type} && x]"'),
        ("--gres={gpu_type}:{gpus_per_node}", "--gres={gpu_type}:{gpus_per_node}"),
    ],
)
def test_a_type_is_left_out_of_a_directive_with_its_separator(text: str, left: str) -> None:
    assert placeholders.without(text, "gpu_type") == left


def test_a_type_that_cannot_be_left_out_is_required(home: Path) -> None:
    site(home, MIXED + "request: ['--gres={gpu_type}:{gpus_per_node}']\n")
    message = error_of(home, "gpus: 4\n")
    assert "s.yaml:6:11: {gpu_type} cannot be left out here" in message
    assert lines(home, "gpus: 4\ngpu_type: l40\n") == ("--gres=L40S:4",)


# -- resources -------------------------------------------------------------------------------------
def test_a_job_gets_its_share_of_a_resource_of_the_node(home: Path) -> None:
    queue = f"queues: {{gpu: {{{NODE}, resources: {{nvme: 1600GB}}}}}}\n"
    request = "request: ['-N {nodes}', '--gres=gpu:{gpus_per_node},nvme:{nvme_per_node:GB}']\n"
    site(home, queue + request)
    assert lines(home, "gpus: 1\n")[1] == "--gres=gpu:1,nvme:400"
    assert lines(home, "gpus: 3\n")[1] == "--gres=gpu:3,nvme:1200"
    assert lines(home, "gpus: 8\nlayout: mpi\n") == ("-N 2", "--gres=gpu:4,nvme:1600")


@pytest.mark.parametrize(
    ("placeholder", "text"), [("job", "800"), ("cpu", "50"), ("gpu", "400"), ("node", "800")]
)
def test_a_resource_is_divided_by_job_cpu_gpu_or_node(
    home: Path, placeholder: str, text: str
) -> None:
    site(
        home,
        f"queues: {{gpu: {{{NODE}, resources: {{jobfs: 1600GB}}}}}}\n"
        f"request: ['-l gpu={{gpus_per_job}},jobfs={{jobfs_per_{placeholder}:GB}}G']\n",
        "sge",
    )
    assert lines(home, "gpus: 2\n") == (f"-l gpu=2,jobfs={text}G",)


def test_a_resource_of_cpu_workers_is_the_share_of_their_cpus(home: Path) -> None:
    site(
        home,
        "queues: {cpu: {cpus_per_node: 32, resources: {disk: 320GB}}}\n"
        "cpu_request: ['-c {cpus_per_node}', '--tmp={disk_per_node:GB}G']\n",
    )
    made = lines(home, "gpus: 0\nworkers: {threads: 4}\n")
    assert made == ("-c 4", "--tmp=40G")


def test_a_queue_without_the_resource_cannot_request_it(home: Path) -> None:
    queues = f"queues: {{a: {{{NODE}, resources: {{nvme: 8GB}}}}, b: {{{NODE}}}}}\n"
    site(home, queues + "request: ['--gres=gpu:{gpus_per_node},nvme:{nvme_per_node:GB}']\n")
    message = error_of(home, "gpus: 1\nqueue: b\n")
    assert "{nvme_per_node} is not known: queue b does not state resources: {nvme: …}" in message


def test_the_memory_of_cpu_workers_is_the_share_of_their_cpus(home: Path) -> None:
    """The queue states the memory of a node, and its CPUs only for each GPU."""
    queue = "{gpus_per_node: 4, cpus_per_gpu: 8, memory_per_node: 64GiB}"
    site(home, f"queues: {{gpu: {queue}}}\ncpu_request: ['--mem={{memory_per_node:MB}}']\n")
    message = error_of(home, "gpus: 0\nqueue: gpu\n")
    assert (
        "queue gpu does not state cpus_per_node, by which CPU workers share its memory" in message
    )
    assert lines(home, "gpus: 0\nqueue: gpu\nworkers: {memory: 4GiB}\n") == ("--mem=4096",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-x {nvme_per_node}", "needs a unit, as in {nvme_per_node:GB}"),
        ("-x {nvme:GB}", "is not a placeholder"),
        ("-x {disk_per_node:GB}", "{disk_per_node:GB} is not a placeholder; "),
        ("-x {gpu_memory}", "needs a unit, as in {gpu_memory:GB}"),
        ("-x {walltime:GB}", "cannot have a unit"),
    ],
)
def test_placeholders_that_do_not_exist_are_refused_at_their_place(
    home: Path, line: str, message: str
) -> None:
    site(home, f"queues: {{a: {{{NODE}, resources: {{nvme: 8GB}}}}}}\ndirectives: ['{line}']\n")
    assert re.search(rf"s\.yaml:6:\d+: .*{re.escape(message)}", error_of(home, "gpus: 1\n"))


@pytest.mark.parametrize("name", ["Nvme", "gpus", "memory", "a_per_b", "a-b"])
def test_a_wrong_name_of_a_resource_is_refused_with_its_place(home: Path, name: str) -> None:
    site(home, f"queues: {{a: {{{NODE}, resources: {{{name}: 8GB}}}}}}\n")
    with pytest.raises(InputError, match=f"`queues.a.resources.{name}`"):
        load_site("./s.yaml")


def test_memory_of_a_gpu_and_the_walltime_are_placeholders(home: Path) -> None:
    site(
        home,
        f"queues: {{a: {{{NODE}, gpu_memory: 40GiB}}, b: {{{NODE}}}}}\n"
        "directives: ['--comment=gmem={gpu_memory:GB},time={walltime}']\n",
    )
    assert lines(home, "gpus: 1\nwalltime: 90m\n")[-1] == "--comment=gmem=40,time=01:30:00"
    assert "queue b does not state gpu_memory" in error_of(home, "gpus: 1\nqueue: b\n")


# -- limits ----------------------------------------------------------------------------------------
def test_jobs_have_sizes_that_the_queue_allows(home: Path) -> None:
    site(home, f"queues: {{a: {{{NODE.replace('4', '8', 1)}, gpus_per_job: [1, 2, 4, 8]}}}}\n")
    for gpus, per_job in ((6, 2), (8, 8), (12, 4), (3, 1), (16, 8)):
        assert made_plan(home, f"gpus: {gpus}\n").groups[0].shape.gpus == per_job
    message = error_of(home, "gpus: 6\ngpus_per_job: 3\n")
    assert "jobs of 3 GPUs; it allows jobs of 1, 2, 4, 8" in message
    message = error_of(home, "gpus: 3\nlayout: mpi\n")
    assert "jobs of 3 GPUs; it allows jobs of 1, 2, 4, 8" in message


def test_jobs_below_the_least_size_or_walltime_go_elsewhere(home: Path) -> None:
    site(home, f"queues: {{a: {{{NODE}, min_gpus: 2, min_walltime: 5m}}, b: {{{NODE}}}}}\n")
    assert made_plan(home, "gpus: 4\n").groups[0].queue == "a"
    assert made_plan(home, "gpus: 1\n").groups[0].queue == "b"
    assert made_plan(home, "gpus: 4\nwalltime: 4m\n").groups[0].queue == "b"
    message = error_of(home, "gpus: 1\nqueue: a\n")
    assert "jobs of 1 GPU; it requires 2 a job" in message
    message = error_of(home, "gpus: 4\nqueue: a\nwalltime: 4m\n")
    assert "walltime 4m is less than its 5m" in message


def test_jobs_above_the_node_hours_go_elsewhere(home: Path) -> None:
    site(
        home, f"queues: {{a: {{{NODE}, max_node_hours: 1.5}}, b: {{{NODE}, max_node_hours: 8}}}}\n"
    )
    for gpus, walltime, queue in (
        (4, "90m", "a"),
        (4, "1:30:01", "b"),
        (8, "45m", "a"),
        (8, "46m", "b"),
        (1, "2h", "b"),
    ):
        profile = f"gpus: {gpus}\nlayout: mpi\nwalltime: {walltime}\n"
        assert made_plan(home, profile).groups[0].queue == queue
    made = made_plan(home, "gpus: 8\nlayout: mpi\nwalltime: 30m\n")
    assert "node-hours of a job 1 <= 1.5" in plan_text(made, "x-0000")
    message = error_of(home, "gpus: 16\nlayout: mpi\nqueue: a\n")
    assert "jobs of 4 nodes for 1h; it allows 1.5 node-hours" in message
    assert "hint: walltime: 22m30s" in message and "s.yaml:5:" in message


def test_queues_and_sites_may_allow_one_layout_only(home: Path) -> None:
    site(home, f"queues: {{a: {{{NODE}, layouts: [mpi]}}, b: {{{NODE}}}}}\n")
    assert made_plan(home, "gpus: 4\n").groups[0].queue == "b"
    assert made_plan(home, "gpus: 4\nlayout: mpi\n").groups[0].queue == "a"
    site(home, f"queues: {{a: {{{NODE}}}}}\nlayouts: [mpi]\n")
    message = error_of(home, "gpus: 4\n")
    assert "queue a: it is for layout: mpi" in message and "s.yaml:6:10" in message


@each(
    ("keys", "message"),
    [
        ("min_gpus: 4, max_gpus: 2", "min_gpus 4 above max_gpus 2"),
        ("min_walltime: 2d", "has a min_walltime above its max_walltime"),
        ("max_node_hours: 0", "has max_node_hours 0, which no job could have"),
        ("gpus_per_job: 4", "must be a list"),
        ("gpus_per_job: [0]", "must be at least 1"),
        ("layouts: [mpj]", "'mpj' is not one of workers, allocation or mpi"),
        ("auto: no", "neither true nor false"),
        ("gpu_types: [a100]", "must be a mapping"),
    ],
)
def test_contradicting_limits_of_a_queue_are_refused(home: Path, keys: str, message: str) -> None:
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1", keys))
    with pytest.raises(InputError, match=re.escape(message)):
        load_site("./s.yaml")


def test_notes_of_site_and_queue_are_in_the_plan(home: Path) -> None:
    site(home, f"queues: {{a: {{{NODE}, notes: [jobs may be killed]}}}}\nnotes: [down on Monday]\n")
    notes = made_plan(home, "gpus: 4\nrun: ls\n").notes
    assert notes == ("queue a: jobs may be killed", "down on Monday")


# -- GPUs of one user ------------------------------------------------------------------------------
USER = f"""queues:
  gpu: {{{NODE}, max_gpus_per_user: 8}}
  part: {{name: gpu, {NODE}, max_gpus_per_user: 8}}
  cpu: {{}}
"""


@pytest.mark.parametrize(
    ("profile", "message", "line"),
    [
        ("gpus: 12\n", "12 GPUs; the queue allows 8 GPUs of one user", 6),
        ("gpus: 12\nlayout: mpi\n", "12 GPUs; the queue allows 8 GPUs of one user", 6),
        ("gpus: 9\ngpus_per_job: 1\n", "9 GPUs; the queue allows 8 GPUs", 6),
        (
            "groups: {a: {gpus: 4, queue: gpu}, b: {gpus: 8, queue: part}}\n",
            "group b: queue part: 12 GPUs; the queue allows 8 GPUs",
            7,
        ),
    ],
)
def test_more_gpus_than_one_user_may_have_are_refused(
    home: Path, profile: str, message: str, line: int
) -> None:
    site(home, USER)
    error = error_of(home, profile)
    assert message in error and "(`max_gpus_per_user`)" in error
    assert re.search(rf"s\.yaml:{line}:\d", error) and "svd.yaml:1:" in error


def test_gpus_within_the_limit_of_one_user_are_counted_over_groups(home: Path) -> None:
    site(home, USER)
    groups = "groups: {a: {gpus: 4}, b: {gpus: 4, queue: part}, c: {gpus: 0, queue: gpu}}\n"
    plan = made_plan(home, groups)
    assert [group.gpus for group in plan.groups] == [4, 4, 0]
    assert re.search(r"^limits +GPUs of one user 8 <= 8$", plan_text(plan, "svd-0000"), re.M)
    limits = job_limits(plan.site, "gpu", 4, [QueuedJobs("part", 3, 1), QueuedJobs("cpu", 9, 4)])
    assert most_allowed(limits) == 1 and exceeded(limits, 2) == limits[0]
    # A queue without the limit is chosen.
    site(home, USER + f"  large: {{{NODE}}}\n")
    assert made_plan(home, "gpus: 12\n").groups[0].queue == "large"


def test_a_limit_of_one_user_below_every_job_is_refused(home: Path) -> None:
    site(home, f"queues: {{gpu: {{{NODE}, min_gpus: 4, max_gpus_per_user: 2}}}}\n")
    with pytest.raises(InputError, match="has min_gpus 4 above max_gpus_per_user 2"):
        load_site(str(home / "s.yaml"))
