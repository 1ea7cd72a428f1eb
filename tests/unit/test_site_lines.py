"""Lines, resources and software of a site that differ by option, by queue or by job."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpujobs.clusters.prepare import scripts_of
from gpujobs.config.document import Document
from gpujobs.config.spec import ClusterSpec, make_spec
from gpujobs.doctor.sitereport import check_offline
from gpujobs.errors import InputError
from gpujobs.planning.plan import Plan, make_plan
from gpujobs.planning.queuefit import ONLY_NVIDIA

from ..support.cli import ROOT, text_of
from ..support.each import each

QUEUE = {"gpus_per_node": 4, "cpus_per_node": 8, "memory_per_node": "64GiB"}
SITE: dict[str, object] = {
    "description": "x",
    "scheduler": "slurm",
    "queues": {"gpu": QUEUE},
    "defaults": {"walltime": "1h"},
}
GRES = "--gres=gpu:{gpus_per_node},lscratch:{lscratch}"
OPTION = {"lscratch": {"default": "10", "hint": "GB"}}


def spec(folder: Path, profile: dict[str, object], **keys: object) -> ClusterSpec:
    path = folder / "s.yaml"
    path.write_text(text_of({**SITE, **keys}))
    document = Document({"gpus": 1, "name": "svd", **profile}, source="p.yaml")
    return make_spec(document, site=str(path))


def planned(folder: Path, profile: dict[str, object], **keys: object) -> Plan:
    return make_plan(spec(folder, profile, **keys), python="/own/python")


def problem(folder: Path, profile: dict[str, object], **keys: object) -> str:
    with pytest.raises(InputError) as caught:
        planned(folder, profile, **keys)
    return str(caught.value)


def test_an_amount_without_a_unit_is_a_number_of_the_nodes(tmp_path: Path) -> None:
    queues = {"gpu": {**QUEUE, "resources": {"lscratch": 100, "nvme": "1600GB"}}}
    request = ["--gres=gpu:{gpus_per_node},lscratch:{lscratch_per_node},nvme:{nvme_per_node:GB}"]
    (jobs,) = planned(tmp_path, {"gpus": 2}, queues=queues, request=request).groups
    assert jobs.lines == ("--gres=gpu:2,lscratch:50,nvme:800",)
    few = {"gpu": {**QUEUE, "resources": {"nic": 2}}}
    lines = (
        planned(tmp_path, {}, queues=few, request=["--gres=gpu:{gpus_per_node},nic:{nic_per_node}"])
        .groups[0]
        .lines
    )
    assert lines == ("--gres=gpu:1,nic:0",)


@each(
    ("amount", "placeholder", "message"),
    [
        (100, "{lscratch_per_node:GB}", "{lscratch_per_node:GB} is a number without a unit"),
        ("100GB", "{lscratch_per_node}", "{lscratch_per_node} needs a unit, as in {lscratch_per_node:GB}"),
        ("some", "{lscratch_per_node}", "'some' is not a size"),
    ],
)  # fmt: skip
def test_amount_and_placeholder_agree(
    amount: object, placeholder: str, message: str, tmp_path: Path
) -> None:
    queues = {"gpu": {**QUEUE, "resources": {"lscratch": amount}}}
    request = [f"--gres=gpu:{{gpus_per_node}},lscratch:{placeholder}"]
    assert message in problem(tmp_path, {}, queues=queues, request=request)


@each(
    ("profile", "line"),
    [
        ({}, "--gres=gpu:1,lscratch:10"),
        ({"options": {"lscratch": 200}}, "--gres=gpu:1,lscratch:200"),
    ],
)
def test_an_option_stands_in_a_line_of_the_request(
    profile: dict[str, object], line: str, tmp_path: Path
) -> None:
    assert planned(tmp_path, profile, request=[GRES], options=OPTION).groups[0].lines == (line,)
    assert check_offline(str(tmp_path / "s.yaml")).correct


@each(
    "value",
    ["10,gpu:8", "10:x", "1 --mem=0", "1\n#SBATCH --mem=0", "{gpus_per_node}", "1+2:ngpus=4", "a=b", "$HOME"],
)  # fmt: skip
def test_a_value_cannot_request_anything_else(value: str, tmp_path: Path) -> None:
    profile = {"options": {"lscratch": value}}
    message = problem(tmp_path, profile, request=[GRES], options=OPTION)
    assert "p.yaml" in message and "lscratch" in message


def test_a_pattern_of_the_site_does_not_let_a_value_set_options(tmp_path: Path) -> None:
    options = {"x": {"default": "a", "pattern": ".*"}}
    request = ["-l select=1:ngpus={gpus_per_node}:x={x}"]
    keys: dict[str, object] = {
        "scheduler": "pbs",
        "visible_devices": "scheduler",
        "options": options,
    }
    lines = planned(tmp_path, {"options": {"x": "b+c"}}, request=request, **keys).groups[0].lines
    assert lines[0] == "-l select=1:ngpus=1:x=b+c"
    found = problem(tmp_path, {"options": {"x": "b,walltime=9"}}, request=request, **keys)
    assert "would set another option of the batch scheduler" in found


@each(
    ("keys", "message"),
    [
        (
            {"request": ["--gres=gpu:{gpus_per_node}"], "options": OPTION},
            "needs `directive`: no line of the site has {lscratch}",
        ),
        (
            {"request": [GRES], "options": {"lscratch": {}}},
            "needs `default` or `required: true` without `directive`",
        ),
        ({"request": [GRES]}, "{lscratch} is not a placeholder"),
        (
            {"request": [GRES], "options": {"lscratsh": {"default": "1"}}},
            "did you mean {lscratsh}?",
        ),
        (
            {"request": [GRES], "options": {"lscratch": {"default": "1,gpu:8"}}},
            "does not match the option's pattern",
        ),
    ],
)
def test_a_line_and_its_option_need_each_other(
    keys: dict[str, object], message: str, tmp_path: Path
) -> None:
    assert message in problem(tmp_path, {}, **keys)


def test_an_unknown_name_is_shown_at_its_place(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "description: x\nscheduler: slurm\nqueues: {gpu: {gpus_per_node: 4}}\n"
        "request:\n  - --gres=gpu:{gpus_per_node},x:{scratch}\n"
    )
    (finding,) = check_offline(str(tmp_path / "s.yaml")).findings
    assert finding.problem.position and (
        finding.problem.position.line,
        finding.problem.position.column,
    ) == (5, 34)


def test_a_required_option_must_be_chosen(tmp_path: Path) -> None:
    keys: dict[str, object] = {"request": [GRES], "options": {"lscratch": {"required": True}}}
    assert "option `lscratch` is needed" in problem(tmp_path, {}, **keys)
    chosen = planned(tmp_path, {"options": {"lscratch": "5"}}, **keys)
    assert chosen.groups[0].lines == ("--gres=gpu:1,lscratch:5",)
    assert check_offline(str(tmp_path / "s.yaml")).correct


def test_an_option_of_another_queue_is_not_known_here(tmp_path: Path) -> None:
    queues = {"a": QUEUE, "b": {**QUEUE, "options": OPTION}}
    assert planned(tmp_path, {"queue": "b"}, queues=queues, request=[GRES]).groups[0].lines == (
        "--gres=gpu:1,lscratch:10",
    )
    found = problem(tmp_path, {"queue": "a"}, queues=queues, request=[GRES])
    assert "{lscratch} is not known: queue a does not have this option" in found


@each("scheduler", ["sge", "pbs", "torque"])
def test_a_resource_may_have_no_value(scheduler: str, tmp_path: Path) -> None:
    keys: dict[str, object] = {
        "scheduler": scheduler,
        "visible_devices": "scheduler",
        "request": ["-l gpu={gpus_per_job},exclusive"],
        "directives": ["-l highp"],
    }
    profile: dict[str, object] = {"directives": ["-l fast"]}
    (jobs,) = planned(tmp_path, profile, **keys).groups
    assert set(jobs.lines) == {"-l gpu=1,exclusive", "-l highp", "-l fast"}
    clash = problem(tmp_path, {"directives": ["-l highp"]}, **keys)
    assert "-l highp is written by the site" in clash


def test_any_type_is_a_choice_beside_a_default(tmp_path: Path) -> None:
    typed = {**QUEUE, "gpu_types": {"a100": "NVIDIA_A100", "l40": "L40S"}, "gpu_type": "a100"}
    one = {**QUEUE, "gpu_type": "h100"}
    for profile, wanted in (
        ({}, "--gres=gpu:NVIDIA_A100:1"),
        ({"gpu_type": "l40"}, "--gres=gpu:L40S:1"),
        ({"gpu_type": "any"}, "--gres=gpu:1"),
        ({"gpu_type": "any", "queue": "one"}, "--gres=gpu:h100:1"),
    ):
        plan = planned(tmp_path, dict(profile), queues={"typed": typed, "one": one})
        assert wanted in plan.groups[0].lines
        assert not any("of any type" in note for note in plan.notes)


def test_containers_and_staging_may_differ_by_queue(tmp_path: Path) -> None:
    arm: dict[str, object] = {
        **QUEUE,
        "containers": {"runtime": "charliecloud", "images": {"rapids": "/arm/rapids"}},
        "environment": {"staging": "/arm.tar"},
    }
    keys: dict[str, object] = {
        "queues": {"x86": QUEUE, "arm": arm},
        "containers": {
            "runtime": "apptainer",
            "images": {"rapids": "/x86/rapids.sif", "torch": "/x86/torch.sif"},
            "args": ["--cleanenv"],
            "binds": ["/scratch"],
        },
        "environment": {"staging": "/x86.tar", "staging_folder": "/local"},
    }
    profile: dict[str, object] = {"environment": {"container": {"image": "rapids"}}}
    for queue, image, runtime, args in (
        ("x86", "/x86/rapids.sif", "apptainer", ("--cleanenv",)),
        ("arm", "/arm/rapids", "charliecloud", ()),
    ):
        container = planned(tmp_path, {**profile, "queue": queue}, **keys).groups[0].container
        assert container and (container.image, container.runtime.name) == (image, runtime)
        assert (container.args, container.binds) == (args, ("/scratch",))
    staging = planned(tmp_path, {"queue": "arm"}, **keys).groups[0].staging
    assert staging and (staging.archive, staging.folder) == ("/arm.tar", "/local")


def test_run_starts_through_the_launcher_of_the_site(tmp_path: Path) -> None:
    keys: dict[str, object] = {
        "queues": {"gpu": {**QUEUE, "exclusive": True}},
        "run_launcher": ["jsrun", "-n1", "-c{cpus_per_node}"],
    }
    profile: dict[str, object] = {"gpus": 8, "layout": "allocation", "run": ["python", "a b.py"]}
    made = spec(tmp_path, profile, **keys)
    plan = make_plan(made, python="/own/python")
    assert "--run jsrun -n1 -c8 python 'a b.py'" in scripts_of(made, plan, "svd-0000")[0].text
    one = spec(tmp_path, {**profile, "gpus": 4}, **keys)
    text = scripts_of(one, make_plan(one, python="/own/python"), "svd-0000")[0].text
    assert "--run python 'a b.py'" in text
    image = {"container": {"image": "/i.sif", "runtime": "apptainer"}}
    assert "through jsrun, which is not in a container" in problem(
        tmp_path, {**profile, "environment": image}, **keys
    )


AMD = {**QUEUE, "gpu_vendor": "amd", "exclusive": True}


@each("vendor", ["amd", "intel"])
def test_gpu_workers_on_gpus_of_other_makers_are_refused(vendor: str, tmp_path: Path) -> None:
    queues = {"gpu": {**AMD, "gpu_vendor": vendor}}
    found = problem(tmp_path, {"gpus": 4, "workers": {"worker_class": "nanny"}}, queues=queues)
    assert f"its GPUs are of {vendor.upper()}: {ONLY_NVIDIA}" in found and "gpus: 0" in found
    assert ONLY_NVIDIA in (ROOT / "docs" / "limits.md").read_text()
    assert check_offline(str(tmp_path / "s.yaml")).correct


def test_cpu_workers_run_on_nodes_with_gpus_of_other_makers(tmp_path: Path) -> None:
    profile: dict[str, object] = {"gpus": 0, "workers": {"count": 2}}
    assert planned(tmp_path, profile, queues={"gpu": AMD}).groups[0].queue_key == "gpu"
    made = spec(tmp_path, profile, queues={"gpu": AMD})
    script = scripts_of(made, make_plan(made, python="python"), "svd-0000")[0].text
    assert '[ -z "${ROCR_VISIBLE_DEVICES-}" ] || unset CUDA_VISIBLE_DEVICES' in script
    nvidia = {"gpu": {**QUEUE, "exclusive": True}, "amd": AMD}
    assert planned(tmp_path, profile, queues=nvidia).groups[0].queue_key == "amd"
    assert (
        planned(tmp_path, {"gpus": 4}, queues={"amd": AMD, "gpu": QUEUE}).groups[0].queue_key
        == "gpu"
    )


@each(
    ("directives", "lines"),
    [
        (["--gres=lscratch:100"], "--gres=gpu:2,lscratch:100"),
        (["--gres lscratch:100", "--gres=gres/nic"], "--gres=gpu:2,lscratch:100,gres/nic"),
        (["--gres=lscratch:1", "--gres=lscratch:2"], "gres/lscratch is written by another line"),
        (["--gres=gpu:8,lscratch:1"], "gres is written by gpujobs"),
        (["--gres=shard:8"], "gres is written by gpujobs"),
        (["--gres=none"], "gres is written by gpujobs"),
        (["--gres=lscratch:1 --gres=gpu:8"], "gres is written by gpujobs"),
    ],
)
def test_other_resources_of_a_profile_are_added_to_the_gpus(
    directives: list[str], lines: str, tmp_path: Path
) -> None:
    profile: dict[str, object] = {"gpus": 2, "directives": directives}
    if lines.startswith("--"):
        found = planned(tmp_path, profile).groups[0].lines
        assert [line for line in found if line.startswith("--gres")] == [lines]
    else:
        assert lines in problem(tmp_path, profile)
