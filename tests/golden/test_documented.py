"""Directives of included sites, compared with the examples in the documentation of the machines.

The lines are those of the pages or job scripts that `source` of the site file names, without CPUs
and memory where an example asks for another share of a node.
"""

from __future__ import annotations

from pathlib import Path

from gpujobs.config.spec import load_spec
from gpujobs.planning.plan import make_plan
from gpujobs.planning.render import render

from ..support.cli import text_of
from ..support.each import each
from ..unit.support import PYTHON

EXAMPLES: list[tuple[str, dict[str, object], str]] = [
    ("adastra", {"gpus": 0, "gpus_per_job": None}, "--constraint=MI250|--exclusive|--account=svd"),
    ("alpine", {"gpus": 2}, "--partition=aa100|--qos=gpu-normal|--gres=gpu:a100-40gb:2"),
    ("apolo", {"gpus": 2}, "-p accel|--gres=gpu:2"),
    ("bede", {"gpus": 4}, "--partition=gpu|--nodes=1|--gres=gpu:4"),
    ("bessemer", {"gpus": 2}, "--partition=gpu|--qos=gpu|--nodes=1|--gpus-per-node=2"),
    ("bruno", {"gpus": 1}, "--partition=gpu|--gpus=h100:1"),
    ("bunya", {"queue": "a100"}, "--qos=gpu|--partition=gpu_cuda|--gres=gpu:a100:1"),
    ("chinook", {"gpus": 1}, "--partition=l40s|--gpus=1|--mem-per-gpu=185G|--cpus-per-gpu=6"),
    ("deepthought", {"gpus": 2}, "--partition=gpu|--ntasks-per-node=1|--gres=gpu:tesla_v100:2"),
    ("donders", {"gpus": 2}, "--partition=gpu|--gpus=nvidia_a100-sxm4-40gb:2"),
    ("genius", {"gpus": 1}, "--nodes=1|--gpus-per-node=1"),
    ("hazel", {"queue": "a100", "gpus": 2}, "--gres=gpu:a100:2"),
    ("hortense", {"gpus": 1}, "--partition=gpu_rome_a100_40|--gpus=1|-A svd"),
    ("ilifu", {"queue": "p100"}, "--partition=GPU|--gres=gpu:1|--constraint=p100"),
    ("iris", {"gpus": 1}, "--nodes=1|--cpus-per-task=7|-G 1|--partition=gpu|--qos=normal"),
    ("kebnekaise", {"queue": "v100", "gpus": 2}, "-A svd|--gpus-per-node=2|-C v100"),
    ("leibniz", {"gpus": 1}, "-p pascal_gpu|--gpus-per-node=1|--cpus-per-gpu=14"),
    ("lengau", {"gpus": 1}, "-q gpu_1|-l select=1:ncpus=9:ngpus=1|-P svd"),
    ("lilac", {"gpus": 4}, '-q gpuqueue|-n 12|-gpu "num=4:j_exclusive=yes"'),
    ("lovelace", {"gpus": 1}, "-p gpu_h100|--gpus 1"),
    (
        "lumi",
        {"gpus": 0, "gpus_per_job": None, "account": "project_2001234"},
        "--partition=standard-g|--nodes=1|--account=project_2001234",
    ),
    ("midway3", {"gpus": 1}, "--partition=gpu|--gres=gpu:1|--constraint=v100|--ntasks-per-node=1"),
    ("mila", {"queue": "unkillable", "gpu_type": "a100l"}, "--partition=unkillable"),
    ("mindwell", {"gpus": 1}, "--partition=gpu_b200|--nodes=1|--gpus-per-node=1"),
    ("miyabi", {"gpus": 1}, "-q regular-g|-l select=1:mpiprocs=1|-W group_list=svd"),
    ("neuron", {"gpus": 8}, "--comment=pytorch|-p amd_a100nv_8|--gres=gpu:8"),
    ("nus-atlas", {"gpus": 1}, "-q volta_gpu|-l select=1:ncpus=10:mem=80gb:ngpus=1"),
    ("octopus", {"gpus": 1}, "--partition=gpu|--ntasks-per-node=1|--gres=gpu:v100d32q:1"),
    ("padum", {"gpus": 1}, "-P svd|-q standard|-l select=1:ncpus=20:ngpus=1:centos=skylake"),
    ("pelle", {"gpus": 10}, "-p gpu|--gpus=l40s:10|-A svd"),
    ("pi2", {"gpus": 1}, "--partition=dgx2|--nodes=1|--cpus-per-task=6|--gres=gpu:1"),
    ("pinnacles", {"queue": "h200"}, "--gres=gpu:nvidia_h200_nvl:1"),
    ("repacss", {"gpus": 1}, "--partition=h100|--gres=gpu:nvidia_h100_nvl:1"),
    ("sdumont", {"gpus": 4}, "-p sequana_gpu|--nodes=1|--gpus=4"),
    ("siue", {"gpus": 1}, "--gres=gpu:a100:1"),
    ("siyuan", {"gpus": 1}, "--partition=a100|--nodes=1|--cpus-per-task=16|--gres=gpu:1"),
    ("sofia", {"gpus": 2}, "--partition=zen4_h200|--nodes=1|--gpus-per-node=2|--cpus-per-task=48"),
    ("sophia", {"gpus": 4}, "-q by-gpu|-l select=4|-l filesystems=home:eagle|-A svd"),
    ("taiwania2", {"gpus": 1}, "--account=svd|--partition=gp1d|--cpus-per-task=4|--gres=gpu:1"),
    ("taltech", {"gpus": 1}, "-p gpu|--gres=gpu:A100:1"),
    ("tinkercliffs", {"gpus": 1}, "--account=svd|--partition=a100_normal_q|-N 1|--gres=gpu:1"),
    ("triton", {"queue": "gpu-h200-141g-short"}, "--gpus=h200:1"),
    ("umbrella", {"gpus": 1}, "--nodes=1|--ntasks-per-node=1|--gpus=1"),
    ("vaughan", {"gpus": 1}, "-p ampere_gpu|--gpus-per-node=1"),
    ("wendian", {"queue": "v100"}, "--account=svd|--gres=gpu:v100:1"),
    ("wice", {"gpus": 2}, "--partition=gpu_a100|--nodes=1|--gpus-per-node=2|--mem=252000m"),
    ("young", {"gpus": 8}, "-l gpu=8|-P Free|-A svd"),
]
"""Site, keys of a profile, and the directives of one job, separated by `|`."""


@each(("site", "keys", "expected"), EXAMPLES, ids=[name for name, _, _ in EXAMPLES])
def test_directives_are_those_of_the_documentation(
    site: str, keys: dict[str, object], expected: str, tmp_path: Path
) -> None:
    profile = tmp_path / "svd.yaml"
    run = {"run": ["python", "svd.py"], "gpus": 1, "account": "svd", "walltime": "10m"}
    gpus = keys.get("gpus", 1)
    profile.write_text(text_of({**run, "gpus_per_job": gpus, **keys}))
    plan = make_plan(load_spec(profile, site=site), python=PYTHON, machine=None)
    (script,) = render(plan, "svd-0000")
    lines = [line.partition(" ")[2] for line in script.text.partition("\n\n")[0].splitlines()]
    assert [line for line in expected.split("|") if line not in lines] == []
