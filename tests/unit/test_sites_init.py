"""Drafts of site files from recorded answers of batch schedulers."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpujobs.cli.main import main
from gpujobs.config.sitefiles import SiteFile, load_site
from gpujobs.doctor.sitedraft import TO_BE_FILLED_IN, Host, draft
from gpujobs.doctor.sitereport import Comparison, check_offline
from gpujobs.schedulers import CommandResult, get_scheduler
from gpujobs.schedulers.inventory import LiveNode, LiveQueue, Survey
from gpujobs.schedulers.sge_inventory import GridEngineInventory, gpus_of_user, quota_sets

from ..support.surveys import ANSWERS, survey_of
from ..support.transcripts import recorded

HOST = Host("login1.example.org", ["lo", "eth0", "ib0"])


def drafted(folder: Path, name: str, survey: Survey) -> tuple[str, SiteFile]:
    text = draft(get_scheduler(name), survey, HOST)
    path = folder / f"{name}-draft.yaml"
    path.write_text(text)
    report = check_offline(str(path))
    assert report.correct, "\n".join([text, *map(str, report.findings)])
    return text, load_site(str(path))


@pytest.mark.parametrize("name", ANSWERS)
def test_every_draft_passes_the_check(home: Path, name: str) -> None:
    text, loaded = drafted(home, name, survey_of(name))
    assert loaded.site.scheduler == name and TO_BE_FILLED_IN in text
    assert r"login\d+\.example\.org" in text and "interface: ib0" in text
    gpus = {key: queue.gpus_per_node for key, queue in loaded.site.queues.items()}
    assert (
        gpus
        == {
            "slurm": {"main": 4, "short": 4},
            "sge": {"main": 4, "short": 4},
            "pbs": {"gpuq": 4},
            "torque": {"short": 4, "batch": 4},
            "lsf": {"short": 4, "short-cpu": None},
        }[name]
    )


def test_a_draft_has_the_account_limits_and_queues_of_slurm(home: Path) -> None:
    text, loaded = drafted(home, "slurm", survey_of("slurm"))
    site = loaded.site
    assert site.account and site.account.required and "# of this user: p1, p2" in text
    assert "defaults: {walltime: 1h}" in text
    assert site.max_array_size == 1000 and "ConstrainDevices" in text
    assert site.queues["short"].max_walltime == 600 and site.queues["main"].nodes == 4
    assert site.queues["main"].memory_per_node == 64 * 2**30
    assert [queue.max_gpus_per_user for queue in site.queues.values()] == [None, 8]
    free = {"scontrol show config": "AccountingStorageEnforce = associations\n"}
    assert all(not queue.user_gpus for queue in survey_of("slurm", free).queues), "not enforced"


def test_the_order_of_slurms_partitions_is_fixed() -> None:
    """sinfo lists those of a node in different orders; the default one is the first."""
    stdout = recorded("slurm", "sinfo.txt", "nodes and partitions").stdout
    lines = [line.replace(" main* ", " zoo*  ") for line in stdout.splitlines()]
    lines += [line.replace(" short ", " large ") for line in lines]
    for order in (lines, lines[::-1]):
        found = survey_of("slurm", {"sinfo": "\n".join(order)}).queues
        assert [queue.name for queue in found] == ["zoo", "large", "short"]


@pytest.mark.parametrize(
    ("release", "whole_nodes"),
    [
        ("20.11", "OverSubscribe=EXCLUSIVE"),
        ("22.05", "OverSubscribe=EXCLUSIVE"),
        ("22.05", "OverSubscribe=NO Exclusive=NODE"),
    ],
)
def test_the_limits_of_slurms_partitions_are_read(release: str, whole_nodes: str) -> None:
    """sinfo shows `2-1K` nodes for `pairs`, `1` for `single`, and from 26.05 on `NO` for `whole`."""
    nodes = recorded("slurm", "sinfo.txt", "nodes and partitions").stdout.splitlines()
    names = ("main", "whole", "single", "pairs", "down")
    rows = [nodes[0].replace("main* ", f"{name:6}") for name in names]
    partitions = recorded("slurm", "partitions.txt", release).stdout
    partitions = partitions.replace("OverSubscribe=EXCLUSIVE", whole_nodes)
    answers = {"sinfo": "\n".join(rows), "scontrol show partition": partitions}
    found = {queue.name: queue for queue in survey_of("slurm", answers).queues}
    assert [name for name in names if found[name].exclusive] == ["whole"]
    assert [name for name in names if not found[name].open] == ["down"]
    limits = [(found[name].min_nodes, found[name].max_nodes) for name in names]
    assert limits == [(None, None), (None, None), (None, 1), (2, 1024), (None, None)]
    assert [found[name].max_walltime for name in names[:2]] == [None, 86400]


def restricted(**settings: str) -> dict[str, str]:
    """Return the recorded partitions of Slurm, the second one with these settings."""
    main, short = recorded("slurm", "limits.txt", "partitions").stdout.splitlines()
    for name, value in settings.items():
        short = re.sub(rf" {name}=\S+", f" {name}={value}", short)
    return {"scontrol show partition -o -a": f"{main}\n{short}\n"}


def test_a_partition_of_some_accounts_is_marked_in_the_draft(home: Path) -> None:
    """p1 and p2 are the accounts of the user."""
    text, loaded = drafted(home, "slurm", survey_of("slurm", restricted(AllowAccounts="x,p2")))
    assert re.search(r"short: .*   # only for accounts x, p2$", text, re.M)
    assert loaded.site.queues["short"].auto
    text, loaded = drafted(home, "slurm", survey_of("slurm", restricted(AllowAccounts="x,y")))
    assert "# only for accounts x, y\n" in text
    assert [queue.auto for queue in loaded.site.queues.values()] == [True, False]
    nobody = {"sacctmgr -n -P show associations": "", **restricted(AllowAccounts="x")}
    survey = survey_of("slurm", nobody, user="eve")
    assert [queue.for_user for queue in survey.queues] == [True, True], "accounts are not known"


def test_a_partition_of_some_qos_and_groups_is_marked() -> None:
    answer = restricted(AllowQos="high,a,b,c,d,e,f,g", AllowGroups="lab")
    _, short = survey_of("slurm", answer).queues
    assert short.restriction == "only for groups lab; only for QOS high, a, b, c, d, e and 2 more"
    assert short.for_user and not short.hidden
    line = next(iter(restricted(AllowAccounts="ALL DenyAccounts=p1,p2").values()))
    _, short = survey_of("slurm", {"scontrol show partition -o -a": line}).queues
    assert (short.restriction, short.for_user) == ("not for accounts p1, p2", False)


@pytest.mark.parametrize("name", ["Hidden", "RootOnly"])
def test_a_hidden_partition_is_left_out(home: Path, name: str) -> None:
    survey = survey_of("slurm", restricted(**{name: "YES"}))
    text, loaded = drafted(home, "slurm", survey)
    assert list(loaded.site.queues) == ["main"]
    assert "# left out, because the batch scheduler hides them: short" in text
    assert [queue.name for queue in survey.queues] == ["main", "short"], "for sites check --live"


def test_the_shortest_walltime_of_pbs_is_in_the_draft(home: Path) -> None:
    title = "a queue with a shortest walltime, json"
    answer = {"qstat -Q": recorded("pbs", "resources.txt", title).stdout}
    _, loaded = drafted(home, "pbs", survey_of("pbs", answer))
    assert loaded.site.queues["gpuq"].min_walltime == 3600


def test_slurm_limits_the_gpus_of_a_type() -> None:
    short = next(queue for queue in survey_of("slurm").queues if queue.name == "short")
    assert [short.gpus_of_user(name) for name in (None, "", "a100", "h100")] == [8, 8, 4, 8]


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"max_run_res": {"mem": "[u:PBS_GENERIC=470gb]", "ncpus": "[u:PBS_GENERIC=256]"}}, None),
        ({"max_run_res": {"ngpus": "[u:PBS_GENERIC=4]"}}, 4),
        ({"max_run_res": {"ngpus": "[u:PBS_GENERIC=4, u:ada=8]"}}, 8),
        ({"max_run_res": {"ngpus": "[o:PBS_ALL=16], [u:bob=2]"}}, None),
        ({"max_run_res": {"ngpus": "[u:PBS_GENERIC=4]"}, "max_queued_res": {"ngpus": "[u:ada=2]"}}, 2),
    ],
)  # fmt: skip
def test_pbs_limits_the_gpus_of_a_user(limits: dict[str, object], most: int | None) -> None:
    queue = {"queue_type": "Execution", "enabled": "True", "started": "True", **limits}
    answer = {"qstat -Q": json.dumps({"Queue": {"gpuq": queue}})}
    (found,) = survey_of("pbs", answer).queues
    assert found.gpus_of_user("a100") == most


def test_the_recorded_limits_of_pbs_are_in_the_draft(home: Path) -> None:
    """Limits of OpenPBS 23.06; the other attributes of its queues are left out."""
    answer = {"qstat -Q": recorded("pbs", "limits.txt", "limits of queues, json").stdout}
    for user, most in (("ada", [4, 2]), ("nobody", [6, 2])):
        queues = survey_of("pbs", answer, user).queues
        assert [queue.gpus_of_user("a100") for queue in queues] == most
    text, _ = drafted(home, "pbs", survey_of("pbs", answer))
    assert text.count("max_gpus_per_user: ") == 2


QUOTAS = """\
{
   name         per_user
   description  NONE
   enabled      TRUE
   limit        users ada queues long to gpu=1
   limit        users {*,!bob} queues main,long to gpu=3,slots=64
   limit        users {*} queues short hosts {@gpus} to gpu=2
   limit        users {*} to gpu=7
}
{
   name         whole
   enabled      TRUE
   limit        users * to gpu=5
}
{
   name         off
   enabled      FALSE
   limit        users {*} to gpu=1
}
"""


@pytest.mark.parametrize(
    ("user", "queue", "most"),
    [("ada", "main", 3), ("ada", "long", 1), ("eve", "long", 3), ("bob", "main", 7),
     ("ada", "short", None), ("ada", "other", 7)],
)  # fmt: skip
def test_quotas_of_grid_engine_limit_the_gpus_of_a_user(
    user: str, queue: str, most: int | None
) -> None:
    found = gpus_of_user(quota_sets(QUOTAS), queue, user, "gpu")
    assert LiveQueue(queue, user_gpus=found).gpus_of_user(None) == most
    assert gpus_of_user(quota_sets("no resource quota set found\n"), queue, user, "gpu") == {}


def test_a_draft_has_the_request_and_queues_of_grid_engine(home: Path) -> None:
    text, loaded = drafted(home, "sge", survey_of("sge"))
    site = loaded.site
    assert site.visible_devices == "scheduler" and "see `visible_devices`" not in text
    assert site.queues["main"].cpus_per_node == 8 and site.queues["short"].max_walltime == 600
    assert site.request == ("-q {queue}", "-pe smp {cpus_per_job}", "-l gpu={gpus_per_cpu}")
    assert "counted per slot" in text and site.max_array_size == 75000
    other = {"cat /opt/prolog.sh": "SGE_HGR_gpu=$1"}
    _, loaded = drafted(home, "sge", survey_of("sge", other))
    assert str(loaded.document.value["visible_devices"]) == "{'variable': 'SGE_HGR_gpu'}"
    text, _ = drafted(home, "sge", survey_of("sge", {"cat /opt/prolog.sh": ""}))
    assert f"visible_devices: scheduler   {TO_BE_FILLED_IN}" in text


def test_free_gpus_of_grid_engine_are_not_all_gpus(home: Path) -> None:
    """qconf does not know hosts that this one cannot resolve, and qstat lists free GPUs only."""
    unknown = {"qconf -se node1": "", "qconf -se node2": ""}
    survey = survey_of("sge", unknown)
    numbers = {node.name: node.gpus for node in survey.nodes}
    assert numbers == {"node1": 4, "node2": None}, "no job is on node1"
    text, loaded = drafted(home, "sge", survey)
    assert {queue.gpus_per_node for queue in loaded.site.queues.values()} == {4}
    assert text.count(f"{TO_BE_FILLED_IN} the GPUs of 1 node; their number is not reported") == 2
    (home / "right.yaml").write_text(text)
    assert not list(Comparison(load_site("./right.yaml"), survey).problems())


def test_without_any_number_of_grid_engine_all_is_to_be_filled_in(home: Path) -> None:
    hosts = recorded("sge", "qstat-F.txt", "queue instances").stdout
    busy = re.sub(r" 0/0/16 ", " 0/1/16 ", hosts)
    answers = {"qconf -se node1": "", "qconf -se node2": "", "qstat -f -F": busy}
    survey = survey_of("sge", answers)
    assert {node.gpus for node in survey.nodes} == {None}
    text, _ = drafted(home, "sge", survey)
    assert "gpus_per_node:" not in text and text.count("their number is not reported") == 2


def test_a_draft_has_the_queues_of_pbs(home: Path) -> None:
    text, loaded = drafted(home, "pbs", survey_of("pbs"))
    queue = loaded.site.queues["gpuq"]
    assert (queue.gpu_type, queue.max_walltime, queue.memory_per_node) == (
        "a100",
        86400,
        32 * 2**30,
    )
    assert "visible_devices: scheduler   # to be filled in" in text
    assert loaded.site.max_array_size == 10000


def test_a_draft_has_the_queues_of_torque(home: Path) -> None:
    _, loaded = drafted(home, "torque", survey_of("torque"))
    assert loaded.site.queues["short"].max_walltime == 1800
    assert loaded.site.queues["batch"].cpus_per_node == 8
    assert set(loaded.site.queues) == {"batch", "short"}, "a routing queue runs no jobs"
    assert loaded.site.queues["short"].max_nodes == 1 and loaded.site.max_array_size == 8


DOWN = {
    "pbs": "a node that is offline and one that is down, json",
    "torque": "a node that has been down since the server started, xml",
}


@pytest.mark.parametrize("name", DOWN)
def test_nodes_that_are_down_are_in_the_draft(home: Path, name: str) -> None:
    answer = {"pbsnodes": recorded(name, "nodes.txt", DOWN[name]).stdout}
    (_, usual), (_, found) = (drafted(home, name, survey_of(name, more)) for more in ({}, answer))
    for key, queue in usual.site.queues.items():
        assert found.site.queues[key].nodes == 2
        assert found.site.queues[key].memory_per_node == queue.memory_per_node


def test_queues_of_pbs_that_run_no_jobs_of_users_are_left_out(home: Path) -> None:
    title = "queues, json: a routing queue and a closed one"
    answer = {"qstat -Q": recorded("pbs", "nodes.txt", title).stdout}
    survey = survey_of("pbs", answer)
    names = ["workq", "gpuq", "shortq", "offq"]
    assert [(queue.name, queue.open) for queue in survey.queues] == [
        (name, name != "offq") for name in names
    ]
    assert list(drafted(home, "pbs", survey)[1].site.queues) == names[:-1]


def test_a_draft_of_an_lsf_without_its_own_gpus_asks_for_the_shared_resource(home: Path) -> None:
    text, loaded = drafted(home, "lsf", survey_of("lsf"))
    assert loaded.site.queues["short"].max_walltime == 1800
    assert loaded.site.request and '-R "rusage[ngpus={gpus_per_node}]"' in loaded.site.request
    assert loaded.site.cpu_request and "mem=" not in " ".join(loaded.site.cpu_request)
    assert "the shared resource ngpus" in text
    assert loaded.site.max_array_size == 1000, "bparams has no -a there"
    assert loaded.site.queues["short"].memory_per_node == 23 * 2**30
    # Nothing lists the GPUs of a job there, so that a part of a node would find none.
    assert loaded.site.visible_devices == "exclusive"
    assert (
        loaded.site.queues["short"].exclusive
        and TO_BE_FILLED_IN not in text.split("visible")[1].split("\n")[0]
    )


def test_a_draft_of_an_lsf_with_its_own_gpus_asks_for_the_model(home: Path) -> None:
    models = recorded("lsf", "gpus.txt", "models").stdout
    for old, new in (("hosta", "node1"), ("hostb", "node2")):
        models = models.replace(old, new)
    free = recorded("lsf", "gpus.txt", "several hosts").stdout
    survey = survey_of("lsf", {"lshosts -gpu": models, "bhosts -o": free})
    found = [(node.name, node.gpus, node.free_gpus, node.gpu_type) for node in survey.nodes]
    assert found == [("node1", 4, 1, "TeskaK20c"), ("node2", 2, 2, "TeskaK80c")]
    assert survey.visible_devices == "scheduler"
    text, loaded = drafted(home, "lsf", survey)
    assert {queue.gpu_type for queue in loaded.site.queues.values()} == {"TeskaK20c", "TeskaK80c"}
    assert ":gmodel={gpu_type}" in text


def typed_nodes(*types: str) -> str:
    """Return the recorded nodes of PBS, with GPUs of these types."""
    text = recorded("pbs", "03-status.txt", "nodes, json").stdout
    for gpu_type in types:
        text = text.replace('"gpu_type":\t"a100"', f'"gpu_model":\t"{gpu_type}"', 1)
    return text


def test_a_draft_of_a_pbs_with_several_types_asks_for_the_type(home: Path) -> None:
    text, loaded = drafted(home, "pbs", survey_of("pbs", {"pbsnodes": typed_nodes("v100", "h100")}))
    assert loaded.site.request == (
        "-q {queue}",
        "-l select={nodes}:ncpus={cpus_per_node}:ngpus={gpus_per_node}:gpu_model={gpu_type}"
        ":mem={memory_per_node:MB}mb",
    )
    assert f"{TO_BE_FILLED_IN} whether jobs can request the type" in text
    assert not survey_of("pbs", {"pbsnodes": typed_nodes("v100", "v100")}).request


def test_a_draft_of_a_grid_engine_with_several_types_asks_for_the_type(home: Path) -> None:
    hosts = recorded("sge", "qstat-F.txt", "queue instances").stdout
    blocks = [
        f"{block}\n\thl:gpu_type=t{n % 2}" for n, block in enumerate(hosts.split("\n" + "-" * 81))
    ]
    kinds = recorded("sge", "hosts.txt", "complexes").stdout
    kinds += "gpu_type  gpu_type  STRING  ==  YES  NO  NONE  0\n"
    answers = {"qstat -f -F": ("\n" + "-" * 81).join(blocks), "qconf -sc": kinds}
    _, loaded = drafted(home, "sge", survey_of("sge", answers))
    assert loaded.site.request and loaded.site.request[-1] == "-l gpu_type={gpu_type}"
    assert {queue.gpu_type for queue in loaded.site.queues.values()} == {"t0", "t1"}


def test_types_that_the_request_does_not_name_are_marked(home: Path) -> None:
    nodes = [LiveNode("n1", "q", True, 64, 64, 2**39, 4, 4, name) for name in ("a100", "v100")]
    text = draft(get_scheduler("torque"), Survey((LiveQueue("q", 7200),), tuple(nodes)), HOST)
    assert f"{TO_BE_FILLED_IN} a `request` with {{gpu_type}}" in text
    (home / "t.yaml").write_text(text)
    findings = check_offline("./t.yaml").findings
    assert all("have the same directives" in str(finding) for finding in findings)
    assert len(findings) == 2
    slurm = draft(get_scheduler("slurm"), Survey((LiveQueue("q", 7200),), tuple(nodes)), HOST)
    assert "a `request`" not in slurm


def test_nodes_of_several_shapes_in_one_queue_become_several(home: Path) -> None:
    node = LiveNode("n1", "mixed", True, 64, 64, 2**39, 4, 4, "a100")
    nodes = [
        node,
        replace(node, name="n2", gpus=8, cpus=96),
        replace(node, name="n3", gpu_type="h100"),
        replace(node, name="n4", gpus=0, gpu_type="", memory=None),
    ]
    queues = (
        LiveQueue("mixed", 7200, max_nodes=2, exclusive=True),
        LiveQueue("closed", open=False),
    )
    text, loaded = drafted(home, "slurm", Survey(queues, tuple(nodes), visible_devices="scheduler"))
    found = {key: (q.name, q.gpus_per_node, q.gpu_type) for key, q in loaded.site.queues.items()}
    assert found == {
        "mixed-a100x8": ("mixed", 8, "a100"),
        "mixed-h100x4": ("mixed", 4, "h100"),
        "mixed-a100x4": ("mixed", 4, "a100"),
        "mixed-cpu": ("mixed", None, None),
    }
    assert all(q.exclusive and q.max_nodes == 2 for q in loaded.site.queues.values())
    assert f"{TO_BE_FILLED_IN} if jobs need an account" in text


def test_only_queues_with_gpus_give_whole_nodes_where_nothing_lists_a_jobs_gpus(home: Path) -> None:
    nodes = (
        LiveNode("n1", "gpu", True, 64, 64, 2**39, 4, 4, "a100"),
        LiveNode("n2", "cpu", True, 64, 64, 2**39, 0, 0, ""),
    )
    survey = Survey((LiveQueue("gpu", 7200), LiveQueue("cpu", 7200)), nodes)
    _, loaded = drafted(home, "slurm", replace(survey, visible_devices="exclusive"))
    exclusive = {key: queue.exclusive for key, queue in loaded.site.queues.items()}
    assert exclusive == {"gpu": True, "cpu": False, "gpu-cpu": False}


def test_a_node_with_one_gpu_is_given_whole_where_nothing_lists_a_jobs_gpus(home: Path) -> None:
    nodes = (LiveNode("n1", "gpu", True, 64, 64, 2**39, 1, 1, "a100"),)
    survey = Survey((LiveQueue("gpu", 7200),), nodes, visible_devices="exclusive")
    _, loaded = drafted(home, "slurm", survey)
    assert loaded.site.queues["gpu"].exclusive


def test_only_the_owner_can_write_a_draft(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that a group could write would be refused by the next command."""
    (home / "sinfo.txt").write_text(recorded("slurm", "sinfo.txt", "nodes and partitions").stdout)
    program = home / "sinfo"
    program.write_text(f"#!/bin/sh\n/bin/cat {home}/sinfo.txt\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(home))
    before = os.umask(0)
    try:
        done = CliRunner().invoke(main, ["sites", "init", "--scheduler", "slurm", "-o", "d.yaml"])
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.output
    assert (home / "d.yaml").stat().st_mode & 0o777 == 0o644


def test_a_draft_that_cannot_be_made_is_an_error_with_its_cause(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home))
    done = CliRunner().invoke(main, ["sites", "init"])
    assert done.exit_code == 2 and "no command of a batch scheduler was found" in done.stderr
    done = CliRunner().invoke(main, ["sites", "init", "--scheduler", "slurm"])
    assert done.exit_code == 3 and "slurm: the command sinfo was not found" in done.stderr
    done = CliRunner().invoke(main, ["sites", "init", "-o", "nosuch/s.yaml"])
    assert done.exit_code == 2 and "there is no folder nosuch for s.yaml" in done.stderr
    done = CliRunner().invoke(main, ["sites", "init", "-o", str(home / "s.yaml")])
    assert done.exit_code == 2 and "s.yaml exists; it is not overwritten" in done.stderr


def test_a_host_of_grid_engine_without_gpus_has_none() -> None:
    line = "-" * 81 + "\ncpu.q@node9   BIP   0/2/16   0.10   lx-amd64 \n\thl:mem_total=64.000G\n"
    (node,) = GridEngineInventory().parse_nodes(CommandResult(("qstat",), 0, line))
    assert (node.name, node.gpus, node.free_gpus, node.free_cpus) == ("node9", 0, 0, 14)
