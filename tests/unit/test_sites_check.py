"""`gpujobs sites check` without a batch scheduler, and `sites show --effective`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpujobs.cli.main import main
from gpujobs.config.document import effective_text, parse
from gpujobs.config.sitefiles import data_folder, load_site
from gpujobs.doctor.sitereport import check_offline

from ..support.each import each
from .support import SLURM

FILES = sorted(data_folder("site_configs").glob("*.yaml"))
EXAMPLES = [path for path in FILES if re.match("local|example-", path.name)]
"""Not those of real machines, which tests/golden/test_sites.py checks."""


def gpujobs(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def check(home: Path, text: str, *arguments: str, code: int = 1) -> Result:
    (home / "s.yaml").write_text(text)
    done = gpujobs("sites", "check", "./s.yaml", *arguments)
    assert done.exit_code == code, done.output
    return done


def shapes(home: Path, change: tuple[str, str] = ("", "")) -> dict[str, list[str]]:
    """Return the shapes of the trials of each queue of the site, all of which are correct."""
    found: dict[str, list[str]] = {}
    done = check(home, SLURM.replace(*change), "--json", code=0)
    for trial in json.loads(done.stdout)["trials"]:
        assert trial["correct"] and trial["scripts"]
        found.setdefault(str(trial["queue"]), []).append(trial["shape"])
    return found


@each("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_of_sites_are_correct(file: Path) -> None:
    report = check_offline(str(file))
    assert report.correct, "\n".join(map(str, report.findings))
    assert {result.trial.queue for result in report.results} >= set(
        load_site(str(file)).site.queues
    )
    assert all(result.scripts for result in report.results)


def test_no_job_is_run_if_there_are_findings(home: Path) -> None:
    wrong = SLURM.replace("gpus_per_node: 4", "gpus_per_node: 4, min_gpus: 9, max_gpus: 3")
    for text in (wrong, SLURM.replace("queues:", "queues: [] #")):
        checks = json.loads(check(home, text, "--run", "--json").stdout)["checks"]
        assert [(one["name"], one["state"]) for one in checks] == [("job", "warning")]
    done = check(home, wrong, "--run")
    assert "warning  job" in done.stdout and "not run, because there are findings" in done.stdout
    assert json.loads(check(home, wrong, "--json").stdout)["checks"] == []


def test_all_shapes_that_a_queue_allows_are_tried(home: Path) -> None:
    ordinary = ["smallest job", "one GPU", "part of a node", "full node", "two nodes"]
    rest = ["mpi", "CPU", "walltime at the limit", "head of its own"]
    assert shapes(home) == {"gpu": [*ordinary, *rest], "None": ["defaults"]}
    assert shapes(home, ("max_nodes: 1", "max_gpus: 2"))["gpu"] == [
        "smallest job", "one GPU", "part of a node", "CPU", "walltime at the limit",
        "head of its own",
    ]  # fmt: skip
    assert shapes(home, ("max_nodes: 1", "exclusive: true, max_jobs: 1"))["gpu"] == [
        "smallest job", "full node", "mpi", "walltime at the limit",
    ]  # fmt: skip
    assert shapes(home, ("max_nodes: 1", "max_gpus_per_user: 4"))["gpu"] == [
        "smallest job", "one GPU", "part of a node", "full node", "mpi", "CPU",
        "walltime at the limit", "head of its own",
    ]  # fmt: skip
    assert shapes(home, ("max_walltime: 1d, max_nodes: 1", "min_nodes: 2"))["gpu"] == [
        "smallest job", "mpi",
    ]  # fmt: skip
    assert shapes(home, ("max_nodes: 1", "gpus_per_job: [2, 4], layouts: [workers]"))["gpu"] == [
        "smallest job", "part of a node", "full node", "two nodes", "CPU", "walltime at the limit",
        "head of its own",
    ]  # fmt: skip
    assert shapes(home, ("max_walltime: 1d, max_nodes: 1", "min_gpus: 8, min_walltime: 1h"))[
        "gpu"
    ] == ["smallest job", "mpi", "CPU"]
    types = "max_nodes: 1, auto: false, gpu_types: {a100: a100_80, h100: h100}"
    assert "GPU type h100" in shapes(home, ("max_nodes: 1", types))["gpu"]
    with_cpus = shapes(home, ("max_nodes: 1}", "exclusive: true}\n  cpu: {cpus_per_node: 8}"))
    assert with_cpus["cpu"] == ["smallest job", "head of its own"]
    assert "head of its own" in with_cpus["gpu"]


@pytest.mark.parametrize(
    ("text", "place", "message", "shape"),
    [
        ("request: ['--gres=gpu:{gpus_per_node}', '--nodes={nodes}', '--mem={memory_per_gpu:GB}G']\n"
         "cpu_request: ['--mem={memory_per_gpu:GB}G']\n", "8:15", "{memory_per_gpu} is not known", "CPU"),
        ("setup: |\n  module load cuda\n  if true; then\n", "10:1", "`setup`: bash -n refuses it: line 3", ""),
        ("mpi: {setup: 'echo \"'}\n", "7:14", "`mpi.setup`: bash -n refuses it: line 1: unexpected EOF", ""),
        ("mpi: {command: [mpiexec, '{rank}']}\n", "7:26", "{rank}", ""),
        ("directives: [--mem=0]\n", "7:14", "mem is written by gpujobs", "smallest job"),
        ("commands: {sbacth: /opt/sbatch}\n", "7:20", "slurm has no command sbacth", "smallest job"),
    ],
)  # fmt: skip
def test_a_finding_has_its_place_message_and_shape(
    home: Path, text: str, place: str, message: str, shape: str
) -> None:
    done = check(home, SLURM + text)
    assert re.search(rf"s\.yaml:{place}: .*{re.escape(message)}", done.stdout), done.stdout
    assert "1 finding" in done.stderr
    (finding,) = json.loads(check(home, SLURM + text, "--json").stdout)["findings"]
    assert message in finding["message"] and finding["file"].endswith("s.yaml")
    assert f"{finding['line']}:{finding['column']}" == place
    assert [trial["shape"] for trial in finding["trials"]][:1] == ([shape] if shape else [])


def test_a_finding_of_one_shape_names_it(home: Path) -> None:
    done = check(home, SLURM + "cpu_request: [--output=x]\n")
    assert "in queue gpu: CPU" in done.stdout
    assert re.search(r"^failed +queue gpu +CPU, head of its own$", done.stdout, re.M)


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("{walltime: 2d}", "walltime 2d is more than its 24h"),
        ("{walltime: 1h, gpus: 3, gpus_per_job: 2}", "3 GPUs are not whole jobs of 2"),
        ("{walltime: 1h, account: ABC}", "ABC"),
        ("{walltime: 1h, waltime: 1h}", "unknown key `waltime`"),
        ("{walltime: 1h, queue: nosuch}", "no queue `nosuch`"),
        ("{walltime: 1h, layout: mpi, head: {queue: gpu}}", "`head` has no meaning"),
    ],
)
def test_the_defaults_are_a_profile(home: Path, defaults: str, message: str) -> None:
    text = SLURM.replace("{walltime: 1h}", defaults)
    found = json.loads(check(home, text, "--json").stdout)["findings"]
    assert len(found) == 1 and message in found[0]["message"] and found[0]["line"] == 6


def test_one_run_shows_all_findings_of_a_file(home: Path) -> None:
    text = SLURM + "setup: 'if'\ndirectives: [--output=x]\ndirectory: $NOSUCH\n"
    lines = [
        finding["line"] for finding in json.loads(check(home, text, "--json").stdout)["findings"]
    ]
    assert sorted(lines) == [7, 8, 9]


def test_a_file_that_is_not_valid_has_findings_too(home: Path) -> None:
    done = check(home, SLURM.replace("queues", "queus") + "descripton: x\n", "--json")
    value = json.loads(done.stdout)
    assert {finding["line"] for finding in value["findings"]} == {1, 4, 7}
    assert value["trials"] == [] and value["site"] == "s" and value["correct"] is False


def test_a_template_that_bash_refuses_is_a_finding(home: Path) -> None:
    (home / "templates").mkdir()
    (home / "templates" / "slurm.sh.j2").write_text("#!/bin/bash\nif\n")
    done = check(home, SLURM)
    assert "smallest job: bash -n refuses the script: line 3" in done.stdout
    shown = gpujobs("sites", "show", "./s.yaml")
    assert shown.exit_code == 2 and "is valid" not in shown.stderr


def test_exit_codes_tell_whether_there_are_findings(home: Path) -> None:
    done = check(home, SLURM, code=0)
    assert re.search(r"^ok +queue gpu +smallest job, one GPU, ", done.stdout, re.M)
    assert "no findings" in done.stderr
    assert gpujobs("sites", "check", "nosuch").exit_code == 2
    assert gpujobs("sites", "check", "./s.yaml", "--set", "x").exit_code == 2
    account = ("--set", "account=P1")
    assert check(home, SLURM, "--set", "gpus=0", "--set", "queue=gpu", code=0).stdout == done.stdout
    found = json.loads(check(home, SLURM, "--json", *account).stdout)["findings"]
    assert all("P1" in finding["message"] for finding in found)


# -- sites show --effective ------------------------------------------------------------------------
@each("file", FILES, ids=lambda file: file.stem)
def test_the_effective_text_is_the_document(file: Path) -> None:
    document = load_site(str(file)).document
    assert parse(effective_text(document), "x").value == document.value


def test_the_effective_text_names_the_origin_of_each_value(home: Path) -> None:
    setup = "setup: |\n  module load cuda\n\n  echo ready\n"
    (home / "s.yaml").write_text(SLURM + setup + "directives: [-x 'a b', '--comment=\"#\"']\n")
    (home / "t.yaml").write_text("extends: ./s.yaml\nqueues: {gpu: {max_walltime: 2d}}\n")
    done = gpujobs("sites", "show", "./t.yaml", "--effective")
    assert done.exit_code == 0, done.output
    lines = [
        line.split("#")[0].strip() + " @" + Path(line.split("# ")[-1]).name
        for line in done.stdout.splitlines()
    ]
    assert "max_walltime: 2d @t.yaml:2" in lines and "gpus_per_node: 4 @s.yaml:5" in lines
    assert "setup: | @s.yaml:7" in lines and "walltime: 1h @s.yaml:6" in lines
    value: Any = parse(done.stdout, "x").value
    assert value["setup"] == "module load cuda\n\necho ready\n"
    assert value["queues"]["gpu"]["max_walltime"] == "2d"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("scheduler: slurm", "scheduler: slurm\nshell: /bin/bash -c"), "the jobs are bash scripts"),
        (("scheduler: slurm", "scheduler: slurm\nshell: /bin/bash -l -s"), "the jobs are bash scripts"),
        (("scheduler: slurm", "scheduler: slurm\noptions: {s: {directive: '--job-name={s}'}}"), "job-name is written by gpujobs"),
        (("scheduler: slurm", "scheduler: slurm\noptions: {s: {directive: '--comment={s} --wrap=x'}}"), "sbatch would run this command"),
        (("{account}", "{account} --wrap=x"), "must set one option, the account, not account and wrap"),
        (("scheduler: slurm", "scheduler: slurm\ndirectives: [--wrap=x]"), "sbatch would run this command"),
        (("max_nodes: 1", "gpus_per_job: [3, 5]"), "5: a node has 4 GPUs"),
    ],
)  # fmt: skip
def test_errors_for_which_users_would_be_blamed_are_findings(
    home: Path, change: tuple[str, str], message: str
) -> None:
    assert message in check(home, SLURM.replace(*change)).output


def test_a_site_with_options_and_jobs_of_whole_nodes_is_correct(home: Path) -> None:
    options = "options: {s: {directive: '--comment={s}', pattern: 'x|y'}}\nshell: /bin/bash -l\n"
    text = SLURM.replace("max_nodes: 1", "gpus_per_job: [1, 4, 8]")
    found = json.loads(check(home, options + text, "--json", code=0).stdout)
    assert "option s" in [trial["shape"] for trial in found["trials"]]


@pytest.mark.parametrize("value", ["account=p1", "options.priority=economy"])
def test_settings_of_a_user_find_no_fault_in_a_correct_site(value: str) -> None:
    assert gpujobs("sites", "check", "derecho", "--set", value).exit_code == 0


def test_a_setting_that_the_site_refuses_is_found() -> None:
    done = gpujobs("sites", "check", "derecho", "--set", "options.priority=x")
    assert done.exit_code == 1 and "priority 'x' does not match" in done.output


def test_a_queue_that_states_cpus_per_gpu_takes_no_cpu_workers_and_is_correct(home: Path) -> None:
    lines = '["--partition={queue}", "--mem={memory_per_node:MB}M"]'
    text = SLURM.replace("cpus_per_node: 64", f"cpus_per_gpu: 16, cpu_request: {lines}")
    done = check(home, text, code=0)
    assert "warning  queue gpu  no CPU workers without `memory_per_job`" in done.output
    assert "no findings" in done.output
