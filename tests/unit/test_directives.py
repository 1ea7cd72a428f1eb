"""All directives of a job, of the site, its queues and the user, against each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpujobs.schedulers import get_scheduler

from ..support.each import each
from .support import SLURM, error_of, made_plan

HEAD = {
    "slurm": "--gres=gpu:{gpus_per_node}",
    "pbs": "-l select=1:ngpus={gpus_per_node}",
    "torque": "-l nodes=1:gpus={gpus_per_node}",
    "lsf": "-gpu num={gpus_per_node}",
    "sge": "-l gpu={gpus_per_node}",
}


def write(home: Path, scheduler: str, *directives: str, queue: str = "", own: str = "") -> None:
    """Write a site whose `request` is the line in HEAD and ``own``, and a directive per line."""
    request = [HEAD[scheduler], *filter(None, [own])]
    lines = [
        "description: x", f"scheduler: {scheduler}", "visible_devices: scheduler",
        f"queues: {{gpu: {{gpus_per_node: 4, cpus_per_node: 8, memory_per_node: 52GiB{queue}}}}}",
        "request:", *(f"  - {line}" for line in request), "defaults: {walltime: 1h}",
    ]  # fmt: skip
    if directives:
        lines += ["directives:", *(f"  - {line}" for line in directives)]
    (home / "s.yaml").write_text("\n".join(lines) + "\n")


@each(
    ("scheduler", "first", "second", "option"),
    [
        ("slurm", "--partition=a", "--partition=b", "partition"),
        ("slurm", "-p a", "--part=b", "partition"),
        ("slurm", "--qos=a", "--gres=gpu:1,nvme:100", "gres"),
        ("slurm", "--qos=a", "-q b", "qos"),
        ("slurm", "--mail-type=END", "--mail-type=FAIL", "mail-type"),
        ("pbs", "-q a", "-q b", "-q"),
        ("pbs", "-l place=scatter", "-l select=2", "-l select"),
        ("pbs", "-l place=scatter", "-l ncpus=2", "-l select"),
        ("torque", "-q a", "-q b", "-q"),
        ("lsf", "-q a", "-q b", "-q"),
        ("lsf", "-q a", "-gpu num=1", "-gpu"),
        ("sge", "-q a", "-q b", "-q"),
        ("sge", "-pe smp 4", "-pe mpi 8", "-pe"),
        ("sge", "-l mem=1", "-l exclusive,gpu=8", "-l gpu"),
    ],
)
def test_lines_of_a_site_that_replace_each_other_are_an_error_with_both_places(
    home: Path, scheduler: str, first: str, second: str, option: str
) -> None:
    write(home, scheduler, first, second)
    message = error_of(home, "gpus: 4\n")
    assert f"s.yaml:10:5: `{second}`: {option} is written by the site" in message
    assert re.search(r"see .*s\.yaml:(6|9):5", message)  # the first one


@each(
    ("scheduler", "first", "second"),
    [
        ("slurm", "--gpus=4", "--constraint=a"),
        ("slurm", "--gpus-per-node=4", "--mem=1G"),
        ("slurm", "--time-min=1", "--wait-all-nodes=1"),
        ("pbs", "-l place=scatter", "-l filesystems=home"),
        ("pbs", "-W umask=022", "-W group_list=x"),
        ("lsf", '-R "select[a]"', '-R "rusage[mem=1]"'),
        ("sge", "-ac a=1", "-ac b=1"),
        ("sge", "-l a=1", "-l b=1"),
    ],
)
def test_lines_of_a_site_that_do_not_replace_each_other_are_accepted(
    home: Path, scheduler: str, first: str, second: str
) -> None:
    write(home, scheduler, first, second)
    assert made_plan(home, "gpus: 4\n").gpus == 4


def test_the_request_of_a_queue_cannot_replace_a_directive_of_the_site(home: Path) -> None:
    write(home, "slurm", "-p b", queue=', request: ["-p a", "--gres=gpu:{gpus_per_node}"]')
    assert "`-p b`: partition is written by the site" in error_of(home, "gpus: 4\n")


def test_a_line_of_the_site_cannot_replace_the_account(home: Path) -> None:
    write(home, "slurm", "--account=a")
    message = error_of(home, "gpus: 4\naccount: b\n")
    assert "`--account=a`: account is written by gpujobs" in message
    assert made_plan(home, "gpus: 4\n").gpus == 4


def test_a_line_of_the_site_cannot_replace_a_built_in_request(home: Path) -> None:
    write(home, "slurm", "--gres=gpu:1")
    text = (home / "s.yaml").read_text()
    (home / "s.yaml").write_text(re.sub(r"request:\n  - .*\n", "", text))
    assert "`--gres=gpu:1`: gres is written by gpujobs" in error_of(home, "gpus: 4\n")
    (home / "s.yaml").write_text((home / "s.yaml").read_text().replace("gpu:1", "nvme:100"))
    (jobs,) = made_plan(home, "gpus: 4\n").groups
    assert [line for line in jobs.lines if "gres" in line] == ["--gres=gpu:4,nvme:100"]


@pytest.mark.parametrize(
    ("account", "author"),
    [("{directive: '--account={account}'}", "the site"), ("{required: true}", "gpujobs")],
)
def test_who_writes_the_directive_of_the_account_is_named(
    home: Path, account: str, author: str
) -> None:
    text = re.sub("^account: .*", f"account: {account}", SLURM, flags=re.M)
    (home / "s.yaml").write_text(text)
    message = error_of(home, {"gpus": 4, "account": "p1", "directives": ["-A x"]})
    assert f"`-A x`: account is written by {author}\n" in message
    assert ("s.yaml:3:" in message) is (author == "the site")


def test_two_lines_of_the_profile_cannot_replace_each_other(home: Path) -> None:
    write(home, "slurm")
    message = error_of(home, "gpus: 4\ndirectives: [--constraint=a, -C b]\n")
    assert "svd.yaml:2:30: `-C b`: constraint is written by another line of the profile" in message


@pytest.mark.parametrize(
    ("scheduler", "line", "reason"),
    [
        ("slurm", "-l select=1", "sbatch has no option -l"),
        ("pbs", "--gres=gpu:4", "is not an option"),
        ("lsf", "--gres=gpu:4", "bsub has no option --gres=gpu:4"),
        ("sge", "--gres=gpu:4", "qsub has no option --gres=gpu:4"),
    ],
)
def test_lines_of_another_batch_scheduler_are_refused(
    home: Path, scheduler: str, line: str, reason: str
) -> None:
    write(home, scheduler, line)
    assert f"`{line}` is no directive: " in (message := error_of(home, "gpus: 4\n"))
    assert reason in message and "s.yaml:9:5" in message


@pytest.mark.parametrize(
    ("scheduler", "line", "reason"),
    [
        ("lsf", "-env all", "`env`"),
        ("lsf", '-env "none"', "`env`"),
        ("lsf", '-R "span[hosts=1]"', "-R is written by the site"),
        ("sge", "-w v", "submit nothing"),
        ("sge", "-verify", "submit nothing"),
        ("sge", "-r y", "started again"),
    ],
)
def test_lines_of_a_user_that_change_the_job_of_gpujobs_are_refused(
    home: Path, scheduler: str, line: str, reason: str
) -> None:
    write(home, scheduler, own='-R "span[hosts=1]"' if scheduler == "lsf" else "")
    assert reason in error_of(home, {"gpus": 4, "directives": [line]})


def test_a_repeated_option_of_grid_engine_adds_up(home: Path) -> None:
    write(home, "sge", "-ac a=1")
    assert made_plan(home, {"gpus": 4, "directives": ["-ac b=1"]}).groups[0].lines[-1] == "-ac b=1"


@pytest.mark.parametrize(
    ("scheduler", "line", "correct"),
    [
        ("pbs", "-l mem={memory_per_node:GB}", "write {memory_per_node:GB}G"),
        ("torque", "-l mem={memory_per_node:MB}", "write {memory_per_node:MB}M"),
        ("sge", "-l h_vmem={memory_per_cpu:G}", "write {memory_per_cpu:G}G"),
        ("sge", "-l h_vmem={memory_per_cpu:G},mem=1G", "write {memory_per_cpu:G}G"),
        ("slurm", "--mem={memory_per_node:GB}", "write {memory_per_node:GB}G"),
        ("slurm", "--mem={memory_per_node:GB}M", "write {memory_per_node:GB}G"),
        ("lsf", "-M {memory_per_node:MB}GB", "write {memory_per_node:MB}M"),
    ],
)
def test_memory_without_its_unit_is_refused_with_the_correct_line(
    home: Path, scheduler: str, line: str, correct: str
) -> None:
    write(home, scheduler, own=f"'{line}'")
    message = error_of(home, "gpus: 4\n")
    assert correct in message and "s.yaml:7:5" in message


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [
        ("pbs", "-l pvmem={memory_per_node:GB}gb"),
        ("sge", "-l h_vmem={memory_per_cpu:M}m,h_stack=1M"),
        ("slurm", "--mem={memory_per_node:MB}"),
        ("slurm", "--mem={memory_per_node:GB}g"),
        ("lsf", "-M {memory_per_node:KB}"),
    ],
)
def test_memory_with_its_unit_is_accepted(home: Path, scheduler: str, line: str) -> None:
    write(home, scheduler, own=f"'{line}'")
    assert made_plan(home, "gpus: 4\n").gpus == 4


@pytest.mark.parametrize("option", ["partition", "part", "p"])
def test_sbatch_takes_abbreviations(option: str) -> None:
    slurm = get_scheduler("slurm")()
    line = f"-{option} x" if len(option) == 1 else f"--{option}=x"
    assert slurm.repeated(line, {"partition"}) == "partition"
