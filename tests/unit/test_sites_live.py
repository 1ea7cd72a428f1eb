"""A site file against the report of a batch scheduler: each difference has a line of the file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.config.sitefiles import load_site
from gpujobs.doctor.sitereport import Comparison, _compared
from gpujobs.schedulers.inventory import LiveNode, LiveQueue, Survey

from ..support.each import each
from ..support.surveys import survey_of
from ..support.transcripts import recorded
from .support import SLURM

NODE = LiveNode("n1", "gpu", True, 64, 64, 480 * 2**30, 4, 4, "a100")
SURVEY = Survey((LiveQueue("gpu", 86400),), (NODE, replace(NODE, name="n2")), max_array_size=1000)
TYPED = SLURM.replace("max_nodes: 1", "max_nodes: 1, gpu_type: a100, nodes: 2")


def differences(home: Path, text: str, survey: Survey) -> list[str]:
    (home / "s.yaml").write_text(text)
    found = Comparison(load_site("./s.yaml"), survey).problems()
    return [f"{p.position.line}: {p.message}" for p in found if p.position]


def test_a_file_that_agrees_has_no_differences(home: Path) -> None:
    assert differences(home, TYPED + "max_array_size: 1000\n", SURVEY) == []
    lower = TYPED.replace("1d", "1h").replace("480GiB", "400GiB").replace("nodes: 2", "nodes: 1")
    assert differences(home, lower, SURVEY) == []


@each(
    ("change", "message"),
    [
        (("max_walltime: 1d", "max_walltime: 25h"), "5: slurm: the walltime in queue gpu is at most 24h"),
        (("gpus_per_node: 4", "gpus_per_node: 2"), "5: slurm: its nodes have 4 GPUs"),
        (("gpu_type: a100", "gpu_type: h100"), "5: slurm: its nodes have GPUs of type a100, not h100"),
        (("cpus_per_node: 64", "cpus_per_node: 65"), "5: slurm: its nodes have 64 CPUs"),
        (("480GiB", "481GiB"), "5: slurm: its nodes have 480GiB of memory"),
        (("nodes: 2", "nodes: 3"), "5: slurm: it has 2 such nodes"),
        (("defaults:", "max_array_size: 1001\ndefaults:"), "6: slurm: arrays have at most 1000 jobs"),
        (("  gpu:", "  a100:"), "5: slurm: there is no queue a100; there are gpu"),
    ],
)  # fmt: skip
def test_each_difference_from_the_machine_is_found(
    home: Path, change: tuple[str, str], message: str
) -> None:
    assert differences(home, TYPED.replace(*change), SURVEY) == [message]


def test_limits_of_the_batch_scheduler_below_those_of_the_file_are_differences(home: Path) -> None:
    survey = replace(SURVEY, queues=(LiveQueue("gpu", 86400, max_nodes=1, open=False),))
    found = differences(home, TYPED.replace("max_nodes: 1", "max_nodes: 2"), survey)
    assert found == [
        "5: slurm: jobs in queue gpu have at most 1 node", "5: slurm: queue gpu is closed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_nodes": 1}, "5: slurm: jobs in queue gpu have at most 1 node"),
        ({"max_walltime": 3600}, "5: slurm: the walltime in queue gpu is at most 1h"),
    ],
)
def test_an_upper_limit_that_the_file_lacks_is_a_difference(
    home: Path, limit: dict[str, int], message: str
) -> None:
    """Slurm accepts such a job, which then waits for ever."""
    survey = replace(SURVEY, queues=(LiveQueue("gpu", **limit),))
    text = TYPED.replace("max_nodes: 1, ", "").replace("max_walltime: 1d, ", "")
    assert differences(home, text, survey) == [message]
    assert differences(home, text, replace(SURVEY, queues=(LiveQueue("gpu", max_nodes=2),))) == []


def test_lower_limits_that_the_file_lacks_are_differences(home: Path) -> None:
    queue = LiveQueue("gpu", min_nodes=2, min_walltime=3600, exclusive=True)
    survey = replace(SURVEY, queues=(queue,))
    text = TYPED.replace("max_nodes: 1, ", "")
    assert differences(home, text, survey) == [
        "5: slurm: the walltime in queue gpu is at least 1h",
        "5: slurm: jobs in queue gpu have at least 2 nodes",
        "5: slurm: jobs in queue gpu get whole nodes; the file lacks `exclusive: true`",
    ]
    known = "exclusive: true, min_nodes: 2, min_walltime: 1h, gpu_type"
    assert differences(home, text.replace("gpu_type", known), survey) == []
    assert differences(home, text.replace("gpu_type", known), SURVEY) == []


def test_an_account_that_is_needed_or_unknown_is_a_difference(home: Path) -> None:
    survey = replace(SURVEY, account_required=True, accounts=("p1", "P2"))
    none = re.sub("account: .*", "account: null", TYPED)
    assert differences(home, none, survey) == [
        "3: slurm: jobs need an account; the file has `account: null`"
    ]
    assert differences(home, none, SURVEY) == []
    assert differences(home, TYPED, survey) == [], "p1 matches"
    other = replace(survey, accounts=("P1", "P2"))
    message = "slurm: no account of this user matches the pattern: P1, P2"
    assert differences(home, TYPED, other) == [f"3: {message}"]
    of_queue = TYPED.replace("max_nodes", "account: {pattern: 'x.*'}, max_nodes")
    assert differences(home, of_queue, survey) == [f"5: {message.replace('P1', 'p1')}"]


@pytest.mark.parametrize(
    ("required", "known", "number"), [("false", True, 1), ("true", True, 0), ("false", None, 0)]
)
def test_an_account_that_the_file_does_not_require_is_a_warning(
    home: Path, required: str, known: bool | None, number: int
) -> None:
    (home / "s.yaml").write_text(TYPED.replace("required: false", f"required: {required}"))
    survey = replace(SURVEY, account_required=known)
    found = list(Comparison(load_site("./s.yaml"), survey).account_warnings())
    assert [check.state for check in found] == ["warning"] * number


PARTITION = "PartitionName=main QoS=N/A GraceTime={} PreemptMode={} State=UP\n"
PREEMPTION = "PreemptType = {}\nSlurmctldParameters = {}\nPreemptParameters = {}\n"


@pytest.mark.parametrize(
    ("partition", "config", "number"),
    [
        (("15", "CANCEL"), ("preempt/partition_prio", "(null)", "(null)"), 1),
        (("15", "CANCEL"), ("preempt/none", "(null)", "(null)"), 0),
        (("0", "CANCEL"), ("preempt/partition_prio", "(null)", "(null)"), 0),
        (("15", "OFF"), ("preempt/partition_prio", "(null)", "(null)"), 0),
        (("15", "CANCEL"), ("preempt/qos", "a,preempt_send_user_signal", "(null)"), 0),
        (("15", "CANCEL"), ("preempt/qos", "(null)", "send_user_signal"), 0),
    ],
)
def test_a_grace_time_that_jobs_do_not_notice_is_a_warning(
    home: Path, partition: tuple[str, str], config: tuple[str, str, str], number: int
) -> None:
    answers = {
        "scontrol show partition": PARTITION.format(*partition),
        "scontrol show config": PREEMPTION.format(*config),
    }
    (home / "s.yaml").write_text(TYPED.replace("  gpu:", "  main:"))
    survey = survey_of("slurm", answers)
    found = list(Comparison(load_site("./s.yaml"), survey).preemption_warnings())
    assert [check.name for check in found] == ["preemption"] * number


@pytest.mark.parametrize(
    ("allowed", "why"),
    [
        ("AllowAccounts=p1 AllowQos=ALL", ""),
        ("AllowAccounts=p3,p4", "only for accounts p3, p4"),
        ("DenyAccounts=p1,p2", "not for accounts p1, p2"),
        ("AllowQos=gpu,long", ""),
        ("AllowQos=long", "only for QOS long"),
        ("AllowQos=gpu DenyQos=gpu", "only for QOS gpu; not for QOS gpu"),
    ],
)
def test_a_queue_in_which_no_job_of_this_user_can_start_is_a_warning(
    home: Path, allowed: str, why: str
) -> None:
    answers = {
        "scontrol show partition": f"PartitionName=main MaxTime=1-00:00:00 State=UP {allowed}\n",
        "sacctmgr -n -P show associations user=ada format=User,QOS": "ada|normal,gpu\n|x\n",
    }
    (home / "s.yaml").write_text(TYPED.replace("  gpu:", "  main:"))
    found = Comparison(load_site("./s.yaml"), survey_of("slurm", answers)).user_warnings()
    assert [check.result for check in found] == (
        [f"your jobs cannot start in main: {why}"] if why else []
    )


def test_nothing_is_said_of_users_that_are_not_known(home: Path) -> None:
    answers = {
        "scontrol show partition": "PartitionName=main AllowQos=long AllowAccounts=p3\n",
        "sacctmgr -n -P show associations": "",
    }
    (home / "s.yaml").write_text(TYPED.replace("  gpu:", "  main:"))
    survey = survey_of("slurm", answers)
    assert not list(Comparison(load_site("./s.yaml"), survey).user_warnings())


def test_what_differs_is_not_called_ok() -> None:
    assert str(_compared("live", "slurm reports 1 queue", 0).state) == "ok"
    found = _compared("live", "slurm reports 1 queue", 2)
    assert (str(found.state), found.result) == (
        "warning",
        "slurm reports 1 queue; 2 findings below",
    )


def test_a_lower_limit_of_one_user_is_a_difference(home: Path) -> None:
    text = TYPED.replace("nodes: 2", "nodes: 2, max_gpus_per_user: 8")
    survey = replace(SURVEY, queues=(LiveQueue("gpu", user_gpus={"": 9, "a100": 4}),))
    message = "5: slurm: one user has at most 4 GPUs in queue gpu"
    assert differences(home, text, survey) == [message]
    assert differences(home, text.replace("user: 8", "user: 4"), survey) == []
    assert differences(home, text, SURVEY) == []


def test_names_of_shapes_are_no_queues(home: Path) -> None:
    text = (
        TYPED.replace("  gpu:", "  big:")
        + "request: ['-N {nodes}', '--gres=gpu:{gpus_per_node}']\n"
    )
    assert differences(home, text, SURVEY) == []


def test_gpus_that_are_not_reported_are_not_compared(home: Path) -> None:
    survey = replace(SURVEY, nodes=(replace(NODE, gpus=0, gpu_type=""),))
    assert differences(home, TYPED.replace(", nodes: 2", ""), survey) == []


# -- other batch schedulers, with their recorded answers ---------------------------------------------
OTHERS = {
    "pbs": "gpuq: {gpus_per_node: 4, cpus_per_node: 8, memory_per_node: 32GiB, max_walltime: 24h, gpu_type: a100, nodes: 2}",
    "torque": "short: {gpus_per_node: 4, cpus_per_node: 8, memory_per_node: 23GiB, max_walltime: 30m, nodes: 2, max_nodes: 1}",
    "lsf": "short: {gpus_per_node: 4, cpus_per_node: 8, max_walltime: 30m}",
    "sge": "short: {gpus_per_node: 4, cpus_per_node: 8, max_walltime: 10m, nodes: 2}",
}
"""Queues of site files that agree with the recorded answers."""


def site_text(name: str, *changes: tuple[str, str], rest: str = "") -> str:
    text = (
        f"description: test\nscheduler: {name}\nvisible_devices: scheduler\nqueues:\n"
        f"  {OTHERS[name]}\ndefaults: {{walltime: 10m}}\n{rest}"
    )
    for change in changes:
        assert change[0] in text
        text = text.replace(*change)
    return text


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_agrees_with_another_batch_scheduler_has_no_differences(
    home: Path, name: str
) -> None:
    assert differences(home, site_text(name), survey_of(name)) == []


@each(
    ("name", "change", "message"),
    [
        ("pbs", ("24h", "25h"), "the walltime in queue gpuq is at most 24h"),
        ("pbs", ("per_node: 4", "per_node: 8"), "its nodes have 4 GPUs"),
        ("pbs", ("a100", "h100"), "its nodes have GPUs of type a100, not h100"),
        ("pbs", ("32GiB", "33GiB"), "its nodes have 32GiB of memory"),
        ("pbs", ("nodes: 2", "nodes: 3"), "it has 2 such nodes"),
        ("pbs", ("  gpuq:", "  gpus:"), "there is no queue gpus; there are gpuq"),
        ("pbs", ("defaults", "max_array_size: 10001\ndefaults"), "arrays have at most 10000 jobs"),
        ("torque", ("30m", "31m"), "the walltime in queue short is at most 30m"),
        ("torque", ("per_node: 4", "per_node: 2"), "its nodes have 4 GPUs"),
        ("torque", ("node: 8", "node: 9"), "its nodes have 8 CPUs"),
        ("torque", ("23GiB", "24GiB"), "its nodes have 24684092KiB of memory"),
        ("torque", ("nodes: 2", "nodes: 3"), "it has 2 such nodes"),
        ("torque", ("  short:", "  long:"), "there is no queue long; there are batch, short"),
        ("lsf", ("30m", "31m"), "the walltime in queue short is at most 30m"),
        ("lsf", ("per_node: 4", "per_node: 8"), "its nodes have 4 GPUs"),
        ("lsf", ("node: 8", "node: 9"), "its nodes have 8 CPUs"),
        ("lsf", ("  short:", "  long:"), "there is no queue long; there are short"),
        ("sge", ("10m, nodes", "11m, nodes"), "the walltime in queue short is at most 10m"),
        ("sge", ("nodes: 2", "nodes: 3"), "it has 2 such nodes"),
    ],
)  # fmt: skip
def test_each_difference_of_another_batch_scheduler_is_found(
    home: Path, name: str, change: tuple[str, str], message: str
) -> None:
    (found,) = differences(home, site_text(name, change), survey_of(name))
    assert found.endswith(f" {name}: {message}")


def test_an_lsf_without_units_of_memory_needs_a_cpu_request(home: Path) -> None:
    """Its relatives refuse the built-in `cpu_request`, which has a unit."""
    queue = ("  short:", "  cpu: {name: short, max_walltime: 30m}\n  short:")
    (found,) = differences(home, site_text("lsf", queue), survey_of("lsf"))
    assert found.endswith(
        "CPU workers need `cpu_request: ['-q {queue}', '-n {cpus_per_job}', "
        "'-R \"span[ptile={cpus_per_node}]\"']`"
    )
    own = "cpu_request: ['-q {queue}', '-n {cpus_per_job}']\n"
    assert differences(home, site_text("lsf", queue, rest=own), survey_of("lsf")) == []


def test_pbs_has_a_shortest_walltime(home: Path) -> None:
    title = "a queue with a shortest walltime, json"
    survey = survey_of("pbs", {"qstat -Q": recorded("pbs", "resources.txt", title).stdout})
    message = "5: pbs: the walltime in queue gpuq is at least 1h"
    assert differences(home, site_text("pbs"), survey) == [message]
    less = ("max_walltime", "min_walltime: 2h, max_walltime")
    assert differences(home, site_text("pbs", less), survey) == []


LINES_OF_PBS = [
    "-l select={nodes}:ncpus={cpus_per_node}:mem={memory_per_node:GB}GB:ngpus={gpus_per_node}:gpu_typ=a100",
    "-l select=1:ncpus=1+{nodes}:gpu_typ=a100:ngpus={gpus_per_node},place=scatter",
    "-l filesystems=home -l ngpus={gpus_per_node},gpu_typ=a100",
]


@pytest.mark.parametrize("line", LINES_OF_PBS)
def test_resources_that_pbs_does_not_have_are_differences(home: Path, line: str) -> None:
    listed = {"qmgr": recorded("pbs", "resources.txt", "resources").stdout}
    text = site_text("pbs", rest=f"request: ['-q {{queue}}', '{line}']\n")
    message = "7: pbs: there is no resource gpu_typ (qmgr -c 'list resource')"
    assert differences(home, text, survey_of("pbs", listed)) == [message]
    correct = text.replace("gpu_typ=", "gpu_type=")
    assert differences(home, correct, survey_of("pbs", listed)) == []
    assert differences(home, text, survey_of("pbs")) == [], "users may not ask for them"


@pytest.mark.parametrize(
    "rest",
    [
        "options: {project: {directive: '-l gqu={project}'}}\n",
        "submit_arguments: [-ac x -l gqu=1]\n",
        "account: {directive: '-l gqu={account}'}\n",
        "directives: ['-pe smp 4 -l gqu=1']\n",
    ],
)
def test_every_line_of_the_file_is_compared(home: Path, rest: str) -> None:
    message = "sge: there is no resource gqu (qconf -sc)"
    assert differences(home, site_text("sge", rest=rest), survey_of("sge")) == [f"7: {message}"]
    of_queue = ("{gpus_per_node: 4", f"{{{rest.strip()}, gpus_per_node: 4")
    assert differences(home, site_text("sge", of_queue), survey_of("sge")) == [f"5: {message}"]
    correct = site_text("sge", rest=rest.replace("gqu", "gpu"))
    assert differences(home, correct, survey_of("sge")) == []


def test_a_queue_with_its_own_cpu_request_is_no_difference(home: Path) -> None:
    own = "cpu_request: ['-q {queue}', '-n {cpus_per_job}']"
    queue = ("  short:", f"  cpu: {{name: short, max_walltime: 30m, {own}}}\n  short:")
    assert differences(home, site_text("lsf", queue), survey_of("lsf")) == []


@pytest.mark.parametrize(
    ("directives", "number"), [("['--account=p1']", 0), ("['-A p1']", 0), ("['--qos=p1']", 1)]
)
def test_an_account_that_the_file_itself_names_is_no_warning(
    home: Path, directives: str, number: int
) -> None:
    (home / "s.yaml").write_text(f"{TYPED.rstrip()}\ndirectives: {directives}\n")
    survey = replace(SURVEY, account_required=True)
    found = list(Comparison(load_site("./s.yaml"), survey).account_warnings())
    assert len(found) == number
    site = f"{TYPED.rstrip()}\nsubmit_arguments: [--verbose]\n"
    (home / "s.yaml").write_text(site)
    key = next(iter(load_site("./s.yaml").site.queues))
    assert load_site("./s.yaml").site.in_queue(key).submit_arguments == ("--verbose",)
    (home / "s.yaml").write_text(site.replace("max_nodes", "submit_arguments: [], max_nodes", 1))
    assert load_site("./s.yaml").site.in_queue(key).submit_arguments == ()
