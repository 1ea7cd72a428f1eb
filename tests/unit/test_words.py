"""Words of other programs: directives and keywords of public scripts mean keys of a profile, or are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpujobs
from gpujobs.deploy.clusteroptions import with_keywords
from gpujobs.deploy.keywords import read_keywords, spec_of
from gpujobs.errors import InputError
from gpujobs.planning.plan import Plan, make_plan
from gpujobs.planning.render import render
from gpujobs.schedulers import get_scheduler
from gpujobs.schedulers.words import NotHere

from ..support.cli import ROOT
from ..support.each import each
from .support import PYTHON, SLURM, error_of

CASES = json.loads((ROOT / "tests" / "data" / "jobqueue_keywords.json").read_text())
"""Keywords of public scripts, with replaced names, and what each means."""
OF_THE_CLASS = ("log_directory", "scheduler_options")


def planned(kind: str, keywords: dict[str, Any], site: str | None = None) -> Plan:
    """Return the plan of the keywords of a class."""
    own = {name: value for name, value in keywords.items() if name not in OF_THE_CLASS}
    batch_schedulers = getattr(gpujobs, kind).batch_schedulers
    try:
        spec = spec_of(own, site, 0, batch_schedulers)
        return make_plan(spec, python=PYTHON, replaces="owner")
    except InputError as error:
        raise with_keywords(error) from None


def slurm(**keywords: Any) -> Plan:
    """Return the plan of keywords of GPUSLURMCluster, which has no site file here."""
    return planned("GPUSLURMCluster", {"queue": "gpu", "walltime": "1h", **keywords})


def refusal(kind: str = "GPUSLURMCluster", **keywords: Any) -> str:
    with pytest.raises(InputError) as caught:
        planned(kind, {"queue": "gpu", "walltime": "1h", **keywords})
    return str(caught.value)


def torque_site(home: Path) -> str:
    """Write the site of the script for Torque."""
    node = {"gpus_per_node": 4, "cpus_per_node": 16, "memory_per_node": "64GiB"}
    text = {"description": "torque", "scheduler": "torque", "queues": {"gpuqueue": node}}
    path = home / "torque.yaml"
    path.write_text(json.dumps(text))
    return str(path)


@each("case", CASES, ids=lambda case: str(case["case"]))
def test_keywords_of_public_scripts_get_their_gpus_or_name_the_line(
    home: Path, case: dict[str, Any]
) -> None:
    expected, site = case["expected"], case.get("site")
    if site == "example-torque":
        site = torque_site(home)
    if "refused" in expected:
        with pytest.raises(InputError) as caught:
            planned(case["class"], case["keywords"], site)
        (problem,) = caught.value.problems  # one round
        assert str(problem).startswith(expected["refused"])
        assert expected["hint"] in problem.hint
        return
    plan = planned(case["class"], case["keywords"], site)
    (group,) = plan.groups
    assert group.shape.gpus == expected["gpus_per_job"]
    assert group.profile.gpu_type == expected.get("gpu_type")
    assert group.shape.workers == expected["workers_per_job"]
    assert group.walltime == expected["walltime_seconds"]
    assert ":a100:" in " ".join(group.lines) or "gpu_type" not in expected


# -- directives ----------------------------------------------------------------------------------------------------------
@each(
    ("name", "line", "keys", "rest"),
    [
        ("slurm", "--gres=gpu:4", "gpus_per_job: 4", ""),
        ("slurm", "--gres gpu:a100:2", "gpus_per_job: 2, gpu_type: a100", ""),
        ("slurm", "--gres=gpu:2,lscratch:10", "gpus_per_job: 2", "--gres=lscratch:10"),
        ("slurm", "--gpus-per-node=v100:1", "gpus_per_job: 1, gpu_type: v100", ""),
        ("slurm", "-G 2", "gpus_per_job: 2", ""),
        ("slurm", "-G2 -N 1", "gpus_per_job: 2", ""),
        ("slurm", "--gpus-per-task=1", "gpus_per_job: 1", ""),
        ("slurm", "-t 90", "walltime: 1h30m", ""),
        ("slurm", "--time=1-12", "walltime: 36h", ""),
        ("slurm", "--mem=64G", "memory_per_job: 64GiB", ""),
        ("slurm", "--part=a -A p1 -J j", "queue: a, account: p1, name: j", ""),
        ("slurm", "--nodes=1 --ntasks=1", "", ""),
        ("slurm", "--mem=0", "", "--mem=0"),
        ("slurm", '--qos="x" -C a', "", '--qos="x" -C a'),
        ("slurm", "--nice -5", "", "--nice -5"),
        ("lsf", "-gpu num=2:j_exclusive=yes:mode=shared:mps=no:", "gpus_per_job: 2", ""),
        ("lsf", '-gpu "num=1:gmodel=A100"', "gpus_per_job: 1, gpu_type: A100", ""),
        ("lsf", "-W 4:00", "walltime: 4h", ""),
        ("lsf", '-R "select[a]"', "", '-R "select[a]"'),
        ("pbs", "-l select=1:ncpus=8:ngpus=2:mem=64gb,walltime=02:00:00",
         "cpus_per_job: 8, gpus_per_job: 2, memory_per_job: 64GiB, walltime: 2h", ""),
        ("pbs", "-l walltime=1:00:00 -l place=pack", "walltime: 1h", "-l place=pack"),
        ("torque", "-l nodes=1:ppn=4:gpus=1:shared", "cpus_per_job: 4, gpus_per_job: 1", ""),
        ("sge", "-l gpu=1,h_vmem=8G", "gpus_per_job: 1", "-l h_vmem=8G"),
        ("sge", "-pe smp 8", "cpus_per_job: 8", ""),
        ("sge", "-P p1", "", "-P p1"),
    ],
)  # fmt: skip
def test_a_directive_means_keys(name: str, line: str, keys: str, rest: str) -> None:
    found = get_scheduler(name)().meaning(line)
    assert (str(found), found.rest) == (keys, rest)


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("slurm", "--nodes=2", "number of nodes"),
        ("slurm", "--ntasks=4", "one task on each node"),
        ("slurm", "--gres=gpu:a100:1,gpu:v100:1", "several types"),
        ("slurm", "--output=x", "logs"),
        ("lsf", "-gpu num=1:mode=exclusive_process", "mode=exclusive_process has no key"),
        ("pbs", "-l select=2:ngpus=1", "number of nodes"),
        ("pbs", "-l select=1:ngpus=1:model=sky", "model=sky has no key"),
    ],
)
def test_a_value_that_no_job_can_have_is_refused(name: str, line: str, words: str) -> None:
    with pytest.raises(NotHere, match=words):
        get_scheduler(name)().meaning(line)


@pytest.mark.parametrize(
    ("line", "keyword", "values"),
    [
        ("--cpus-per-task=4", {"cores": 8}, "8 and 4"),
        ("--mem=64G", {"memory": "32GiB"}, "32GiB and 64GiB"),
        ("--gres=gpu:4", {"gpus_per_job": 2}, "2 and 4"),
        ("--time=2:00:00", {"walltime": "1h"}, "1h and 2h"),
        ("-A p1", {"project": "p2"}, "p2 and p1"),
    ],
)
def test_a_directive_that_differs_from_a_keyword_is_an_error_with_both(
    line: str, keyword: dict[str, Any], values: str
) -> None:
    one, other = values.split(" and ")
    text = refusal(job_extra_directives=[line], **keyword)
    assert f": {values}" in text or f": {other} and {one}" in text


def test_a_directive_that_agrees_with_the_keywords_is_understood() -> None:
    lines = ["--cpus-per-task=8", "--mem=32768M", "-t 60", "--nodes=1", "-p gpu", "-A p1"]
    plan = slurm(cores=8, memory="32GiB", account="p1", job_extra=lines)
    assert plan.groups[0].walltime == 3600 and plan.groups[0].shape.cpus == 8


def test_two_requests_for_gpus_that_differ_are_an_error() -> None:
    assert "4 and 2" in refusal(job_extra_directives=["--gpus=2", "--gres=gpu:4"])


@pytest.mark.parametrize(
    ("processes", "gpus", "workers", "noted"),
    [(4, 4, 4, 0), (8, 4, 8, 1), (1, 4, 4, 1), (2, 4, 4, 1), (2, 1, 2, 1)],
)
def test_processes_are_workers_on_the_gpus_of_the_directives(
    processes: int, gpus: int, workers: int, noted: int
) -> None:
    plan = slurm(processes=processes, cores=8, job_extra_directives=[f"--gres=gpu:{gpus}"])
    assert (plan.groups[0].shape.gpus, plan.groups[0].shape.workers) == (gpus, workers)
    assert len([note for note in plan.notes if note.startswith("processes=")]) == noted


def test_processes_that_cannot_be_divided_are_an_error_with_both_numbers() -> None:
    text = refusal(processes=6, job_extra_directives=["--gres=gpu:4"])
    assert "processes is 6, but gpus_per_job is 4" in text


def test_processes_without_a_request_for_gpus_are_noted() -> None:
    assert any("a job has 4 GPUs" in note for note in slurm(processes=4, cores=4).notes)


def test_the_command_of_dask_cuda_starts_a_worker_on_each_gpu() -> None:
    plan = slurm(processes=3, worker_command="dask_cuda.cli", job_extra_directives=["--gres=gpu:2"])
    assert plan.groups[0].shape.workers == 2


def test_a_type_that_no_line_would_request_is_an_error() -> None:
    text = refusal("GPULSFCluster", job_extra_directives=['-gpu "num=1:gmodel=A100"'])
    assert "no line requests GPUs of type A100" in text


def test_a_users_condition_on_hosts_is_joined_with_the_written_requirements() -> None:
    keywords = {"queue": "gpu", "cores": 4, "walltime": "4:00"}
    lines = ['-R "select[a || b]"', '-R "hname!=x"']
    plan = planned("GPULSFCluster", {**keywords, "job_extra_directives": lines})
    assert '-R "select[(a || b) && hname!=x] span[ptile=4]"' in plan.groups[0].lines
    assert plan.groups[0].walltime == 4 * 3600
    assert "-R is written" in refusal("GPULSFCluster", cores=4, job_extra=['-R "span[hosts=2]"'])


@pytest.mark.parametrize(("line", "mails"), [("-m abe", 1), ("-M a@b -m e", 1), ("", 1)])
def test_pbs_sends_the_mails_that_a_user_wants(home: Path, line: str, mails: int) -> None:
    site = torque_site(home)
    lines = [line] if line else []
    keywords = {"queue": "gpuqueue", "walltime": "1h", "job_extra_directives": lines}
    plan = planned("GPUPBSCluster", keywords, site)
    text = render(plan, f"{plan.name}-0000", site_folder=home)[0].text
    found = [row for row in text.splitlines() if row.startswith("#PBS") and " -m " in row]
    assert len(found) == mails and (line or "-m n") in found[0]


def test_directives_of_a_group_mean_keys_of_the_group() -> None:
    gpu = {"gpus": 4, "directives": ["--gres=gpu:a100:4", "--comment=x"]}
    read = read_keywords(
        {"groups": {"gpu": gpu, "prep": {"gpus": 0}}}, scheduler=get_scheduler("slurm")()
    )
    assert read.checked().document.plain == {
        "groups": {
            "gpu": {
                "gpus": 4,
                "gpus_per_job": 4,
                "gpu_type": "a100",
                "directives": ["--comment=x"],
            },
            "prep": {"gpus": 0},
        }
    }


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"gpus_per_job": 2, "directives": ["--gres=gpu:4"]}, "groups.gpu.gpus_per_job`.*: 4 and 2"),
        ({"directives": ["--nodes=2"]}, "`--nodes=2`: the number of nodes follows"),
        ({"directives": ["--time=1:00:00", "-t 120"]}, "groups.gpu.walltime`.*: 2h and 1h"),
    ],
)  # fmt: skip
def test_a_directive_of_a_group_that_differs_or_cannot_be_is_an_error(
    group: dict[str, Any], words: str
) -> None:
    found = read_keywords({"groups": {"gpu": group}}, scheduler=get_scheduler("slurm")()).problems
    assert [problem.position.source for problem in found if problem.position] == ["keyword groups"]
    assert re.search(words, str(found[0]))


def test_a_request_for_gpus_in_a_group_of_a_profile_is_refused_with_its_key(home: Path) -> None:
    profile = "groups: {a: {gpus: 4, directives: ['--gres=gpu:4']}, b: {gpus: 0}}\n"
    assert "gpus_per_job: 4" in error_of(home, profile)


# -- keywords ------------------------------------------------------------------------------------------------------------
class Listed(Sequence[Any]):
    """A list of another library, as OmegaConf's."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


def test_values_of_other_libraries_are_taken() -> None:
    plan = slurm(
        cores=np.int64(8),
        gpus_per_job=np.int32(2),
        job_extra_directives=Listed("--comment=x"),
        local_directory=Path("/fast"),
        death_timeout=60.0,
    )
    group = plan.groups[0]
    assert "--comment=x" in group.lines and group.shape.cpus == 8
    assert group.profile.workers.local_directory == "/fast"
    assert group.profile.workers.death_timeout == 60


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("partition", "use queue=…"),
        ("nodelist", "use directives=['--nodelist=NAME']"),
        ("services", "leave it out: a cluster of jobs has nothing like it"),
        ("zzz", "`gpujobs schema profile` lists the keys, which are keywords here"),
    ],
)
def test_a_word_that_no_class_has_gets_its_key_or_where_all_are(word: str, hint: str) -> None:
    assert f"keyword {word}: unknown keyword\n  hint: {hint}" in refusal(**{word: "x"})


def test_a_number_of_workers_of_numpy_is_taken() -> None:
    keywords = {"queue": "gpu", "gpus_per_job": 0}
    spec = spec_of(keywords, None, np.int64(2), ("slurm",))  # type: ignore[arg-type]
    assert spec.profile.workers.count == 2


def test_keywords_without_an_effect_are_noted() -> None:
    words = ["--lifetime", "1h", "--lifetime-stagger", "4m"]
    plan = slurm(shebang="#!/bin/zsh", worker_extra_args=words)
    assert [note.partition(":")[0] for note in plan.notes[:2]] == [
        "shebang",
        "--lifetime is not used",
    ]


def test_cpu_workers_keep_their_lifetime() -> None:
    plan = slurm(gpus_per_job=0, worker_extra_args=["--lifetime", "1h"])
    assert plan.groups[0].profile.workers.options == {"lifetime": "1h"}


def test_a_skip_leaves_out_lines_of_the_user_only() -> None:
    plan = slurm(job_extra=["--comment=x", "-C a"], job_directives_skip=["--comment", "--gres"])
    assert "-C a" in plan.groups[0].lines and "--gres=gpu:1" in plan.groups[0].lines
    assert "--comment=x" not in plan.groups[0].lines
    assert sum(note.startswith("job_directives_skip") for note in plan.notes) == 2


def test_an_underscore_in_a_name_becomes_a_dash() -> None:
    assert slurm(name="a_b").name == "a-b"


def test_a_command_as_python_is_refused_at_once() -> None:
    assert "python='/home/me/python.sh'" in refusal(python="srun -n 1 python")


def test_hours_and_minutes_are_a_walltime_of_lsf_only() -> None:
    assert "minutes or hours" in refusal(walltime="4:00")


def test_all_errors_come_in_one_round() -> None:
    text = refusal(colour=1, python="srun python", cores=0, job_extra=["--nodes=2", "--mem=1G"],
                   memory="2GiB", gpu_type="a b", directives=["-C x"])  # fmt: skip
    for words in ("colour", "srun", "at least 1", "--nodes=2", "memory", "gpu_type", "directives"):
        assert words in text, words


# -- memory --------------------------------------------------------------------------------------------------------------
@each(
    ("memory", "mib"),
    [
        ("2.2GiB", 2252), ("7.7GB", 7343), ("4000000000B", 3814), (int(15e9), 14305), (1e9, 953),
        ("64GiB", 65536), ("500G", 476837), (str(2**30), 1024),
    ],
)  # fmt: skip
def test_memory_is_read_as_dask_reads_it(memory: Any, mib: int) -> None:
    assert f"--mem={mib}M" in slurm(memory=memory).groups[0].lines


def test_a_job_of_less_than_a_mebibyte_is_an_error() -> None:
    assert "needs at least 1MiB" in refusal(memory="500KB")


def test_the_memory_of_a_worker_may_be_that_of_its_job() -> None:
    slurm(memory="2.2GiB", workers={"memory": "2.2GiB"})


# -- in a profile --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--gres=gpu:2", "gpus_per_job: 2"),
        ("--time=2:00:00", "walltime: 2h"),
        ("--gpus-per-task=1", "gpus_per_job: 1"),
        ("--mem=64G", "memory_per_job: 64GiB"),
        ("--ntasks=1", "leave it out: jobs have it anyway"),
        ("--output=x", "`gpujobs logs` shows them"),
    ],
)
def test_the_hint_of_a_refused_directive_is_the_key_to_write(
    home: Path, line: str, hint: str
) -> None:
    assert f"hint: {hint}" in error_of(home, {"gpus": 2, "directives": [line]})


def test_a_type_has_the_name_of_the_batch_scheduler_too(home: Path) -> None:
    types = "gpus_per_node: 4, gpu_types: {big: a100, small: t4}"
    (home / "s.yaml").write_text(SLURM.replace("gpus_per_node: 4", types))
    keywords = {"job_extra_directives": ["--gres=gpu:a100:2"]}
    plan = planned("GPUSLURMCluster", keywords, str(home / "s.yaml"))
    assert "--gres=gpu:a100:2" in plan.groups[0].lines


def test_the_hint_of_a_refused_line_of_a_site_is_its_default(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM + "directives: [--time=2:00:00]\n")
    assert "a default is `defaults: {walltime: 2h}`" in error_of(home, {"gpus": 2})
