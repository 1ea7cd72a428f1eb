"""The installed command without a batch scheduler: its output, its messages and its exit codes."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.cli import live
from gpujobs.cli.plan_text import plan_json, submitted_json
from gpujobs.cli.status import status_table, wait_for_cluster
from gpujobs.clusters.folderstate import FolderState
from gpujobs.clusters.judge import judge
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Ledger, Submission
from gpujobs.clusters.prepare import make_cluster_plan
from gpujobs.clusters.report import ClusterReport
from gpujobs.config.spec import load_spec
from gpujobs.injob.folder import Ended, EndKind, RegisteredWorker

from ..support.cli import ROOT, run_gpujobs, text_of
from ..support.folderstate import folder_state
from .report_data import RECORD, WORKERS


@pytest.fixture
def run(tmp_path: Path):  # type: ignore[no-untyped-def]
    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        own = {"HOME": str(tmp_path), "PATH": "/nosuch", "LANG": "C.UTF-8"}
        return run_gpujobs(arguments, env={**own, **env}, cwd=tmp_path)

    return run


def site(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(
        f"description: {text}\nscheduler: slurm\nqueues:\n  main: {{gpus_per_node: 4, cpus_per_node: 8}}\n"
    )
    return path


def submitted(home: Path, cluster: str, **changes: object) -> Ledger:
    """Write the record of a cluster of a Slurm whose commands are not on this machine."""
    ledger = Ledger(home / ".local" / "state" / "gpujobs" / "clusters")
    folder = home / ".gpujobs" / cluster
    folder.mkdir(parents=True)
    values = {
        "id": cluster, "site": "here", "scheduler": "slurm", "folder": str(folder), "created": 1.0,
        "groups": (GroupRecord("", workers=4, workers_per_job=4, gpus_per_job=4),), "run": (), "encrypted": True, "submissions": (Submission("7", 0, 1),),
    }  # fmt: skip
    ledger.add(ClusterRecord(**(values | changes)))  # type: ignore[arg-type]
    return ledger


def test_cancel_waits_for_no_tasks_of_a_cluster_that_is_scaled_elsewhere(
    run, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    """It stays, and the error names it; orphans have no process that could wait."""
    ledger = submitted(tmp_path, "svd-0001", owner="client")
    done = run("cancel", "--all", "--drain")
    assert done.returncode == 2 and "svd-0001" in done.stderr, done.stderr
    assert not (ledger.get("svd-0001").path / "ended").exists()
    done = run("cancel", "--orphans", "--drain")
    assert done.returncode == 2 and "--orphans and --drain exclude each other" in done.stderr


@pytest.mark.parametrize("others", [("--here",), ("-o", "folder"), ("--here", "-o", "folder")])
def test_render_prints_one_thing(run, tmp_path: Path, others: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "svd.yaml").write_text("gpus: 4\nrun: [python]\n")
    words = ("svd.yaml", "--site", "example-slurm", *others)
    done = run("render", *words, *(["--job", "0"] if len(others) < 3 else []))
    assert done.returncode == 2 and "--job, --here and -o exclude each other" in done.stderr


# -- sites, schema -------------------------------------------------------------------------------------------------
def test_sites_are_found_in_four_places(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    listed = run("sites", "list").stdout
    assert re.search(r"^SITE +SCHEDULER +NOT VERIFIED +VERIFIED +FILE +DESCRIPTION$", listed, re.M)
    assert re.search(r"^example-slurm +slurm +/", listed, re.M) and re.search(
        r"^local +local +/", listed, re.M
    )
    config = tmp_path / ".config" / "gpujobs" / "sites"
    site(config, "local", "of the user")
    site(config, "mine", "of the user")
    first, second = tmp_path / "first", tmp_path / "second"
    site(second, "mine", "of the second folder")
    path = f"{first}:{second}"
    found = {
        item["name"]: item for item in json.loads(run("sites", "list", "--json").stdout)["sites"]
    }
    assert (
        found["local"]["description"] == found["mine"]["description"] == "of the user"
    )  # over the package's
    site(first, "mine", "of the first folder")
    value = json.loads(run("sites", "list", "--json", GPUJOBS_SITE_PATH=path).stdout)
    found = {item["name"]: item for item in value["sites"]}
    assert value["version"] == 1
    assert found["mine"]["path"] == str(first / "mine.yaml")
    assert found["example-slurm"]["contact"] == "support@example.org"
    (second / "other.yml").write_text("")
    assert "other.yml is ignored" in run("sites", "list", GPUJOBS_SITE_PATH=path).stderr
    (first / "mine.yaml").write_text("nonsense: 1\n")
    broken = run("sites", "list", GPUJOBS_SITE_PATH=path)
    assert broken.returncode == 0 and re.search(
        r"^mine +\? .*error: ", broken.stdout, re.M
    )  # the others are there


def test_sites_show_prints_the_file_and_what_is_wrong_in_it(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = site(tmp_path, "here", "x")
    for name in ("./here.yaml", str(path)):
        done = run("sites", "show", name)
        assert done.stdout == path.read_text() and "site here is valid" in done.stderr
    path.write_text(path.read_text() + "contact: gpu@example.org\nsource: the manual\n")
    done = run("sites", "show", str(path))
    assert "source: the manual\ncontact: gpu@example.org\n" in done.stderr
    assert "maintainers" not in done.stderr
    path.write_text(path.read_text() + "maintainers: ['@ada', hpc@example.org]\n")
    done = run("sites", "show", str(path))
    assert done.stderr.endswith("maintainers: @ada, hpc@example.org\n")
    path.write_text(path.read_text() + "directives: [--output=x, --time=1]\n")
    done = run("sites", "show", str(path))
    assert done.returncode == 2 and done.stdout == path.read_text()
    assert "output is written by gpujobs" in done.stderr and "time is written" in done.stderr
    path.write_text(path.read_text().replace("queues", "queus"))
    done = run("sites", "show", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(r"here\.yaml:3:1: .*queus.*did you mean `queues`", done.stderr, re.S)
    done = run("sites", "show", "nosuch")
    assert done.returncode == 2 and "nosuch" in done.stderr


def test_the_schemas_accept_and_refuse_as_gpujobs_does(run) -> None:  # type: ignore[no-untyped-def]
    import jsonschema  # takes a second, in each test process if it stood above

    profile, site_schema = (json.loads(run("schema", kind).stdout) for kind in ("profile", "site"))
    for schema in (profile, site_schema):
        jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"gpus": 8, "walltime": "2h", "run": ["python", "x.py"]}, profile)
    jsonschema.validate(
        {"description": "x", "scheduler": "local", "queues": {"local": {}}}, site_schema
    )
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"gpuss": 8}, profile)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"description": "x", "queues": {}}, site_schema)
    assert run("schema", "nosuch").returncode == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_of_the_shell(run, shell: str) -> None:  # type: ignore[no-untyped-def]
    done = run("completion", shell, PATH=os.environ["PATH"])
    assert done.returncode == 0, done.stderr
    assert "_GPUJOBS_COMPLETE" in done.stdout


# -- data goes to stdout ------------------------------------------------------------------------------------------------
def test_render_prints_the_scripts_and_submits_nothing(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    profile = tmp_path / "svd.yaml"
    profile.write_text(text_of({"gpus": 8, "account": "p12345", "run": ["python", "svd.py"]}))
    done = run("render", str(profile), "--site", "example-slurm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!") and "svd-0000" in done.stdout
    assert not (tmp_path / ".gpujobs").exists() and not (tmp_path / ".local").exists()
    other = run(
        "render", str(profile), "--site", "example-slurm", "--set", "gpus=16", "--set", "name=other"
    )
    assert "other-0000" in other.stdout and other.stdout != done.stdout


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("max_queued_jobs: 1", "2 jobs; the site allows 1 of one user (`max_queued_jobs`)"),
        (
            "directory: $NOSUCH/x",
            "the site's `directory` is $NOSUCH/x, but $NOSUCH is not set here",
        ),
        ("directives: [--partition=x]", "partition is written by gpujobs"),
    ],
)
def test_plan_and_render_refuse_what_submit_refuses(  # type: ignore[no-untyped-def]
    run, tmp_path: Path, limit: str, message: str
) -> None:
    path = site(tmp_path, "here", "x")
    path.write_text(f"{path.read_text()}{limit}\n")
    (tmp_path / "p.yaml").write_text("gpus: 8\nwalltime: 1h\n")
    commands = (["plan"], ["render"], ["submit"])
    found = [run(*words, "p.yaml", "--site", "./here.yaml") for words in commands]
    assert {done.returncode for done in found} == {2} and {done.stdout for done in found} == {""}
    assert len({done.stderr for done in found}) == 1 and message in found[0].stderr


def test_the_id_of_the_cluster_is_in_one_line_of_a_script(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    profile = tmp_path / "svd.yaml"
    profile.write_text(text_of({"gpus": 8, "account": "p12345", "run": ["python", "train.py"]}))
    script = run("render", str(profile), "--site", "example-slurm").stdout
    assert script.count("svd-0000") == 1


def test_plan_prints_everything(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    profile = tmp_path / "svd.yaml"
    spec = {
        "gpus": 8,
        "account": "p12345",
        "walltime": "2h",
        "run": ["python", "x.py"],
        "workers": {"threads": 3, "memory": "20GiB"},
    }
    profile.write_text(text_of(spec))
    done = run("plan", str(profile), "--site", "example-slurm", "--set", "network.protocol=tcp")
    assert done.returncode == 0, done.stderr
    for line in (
        r"jobs +2 x \(1 node, 4 GPUs, .*2h\) in queue gpu", r"GPUs +8 requested, 8 with a worker of their own",
        r"workers +8: svd-0000-0-0, .*, svd-0000-1-3", r"each worker +CUDAWorker, 3 threads, memory limit 20GiB",
        r"dask scheduler +in the job that starts first", r"network +tcp, encrypted \(TLS\); interface: \w+",
        r"account +p12345", r"run +python x.py \(in .*, starts with the first worker\)", r"limits +.*walltime 2h <= 2d",
    ):  # fmt: skip
        assert re.search(rf"^{line}", done.stdout, re.M), line
    value = json.loads(run("plan", str(profile), "--site", "example-slurm", "--json").stdout)
    assert (
        value["version"] == 1
        and value["gpus"] == 8
        and len(value["worker_names"]) == 8
        and value["jobs"]
    )
    refused = run("plan", str(profile), "--site", "example-slurm", "--set", "walltime=1000h")
    assert (refused.returncode, refused.stdout) == (2, "")
    spaced = run("plan", str(profile), "--site", "example-slurm", "--set", "gpus", "2")
    assert (spaced.returncode, spaced.stdout) == (2, "")
    assert "--set gpus: must be KEY=VALUE\n  hint: --set gpus=VALUE" in spaced.stderr


# -- exit codes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments", [["status"], ["logs"], ["connect"], ["connect", "--env"], ["cancel"], ["scale", "--", "4"]], ids=" ".join
)  # fmt: skip
def test_an_id_of_no_cluster_exits_with_4(run, tmp_path: Path, arguments: list[str]) -> None:  # type: ignore[no-untyped-def]
    submitted(tmp_path, "svd-0001")
    words = [word for word in arguments if word not in ("--", "4")]
    done = run(*words, "svd-02", *(["4"] if "4" in arguments else []))
    assert (done.returncode, done.stdout) == (4, "")
    assert "there is no cluster 'svd-02'" in done.stderr


def test_commands_that_end_or_change_a_cluster_exit_with_4_for_a_part_of_its_id(
    run, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    submitted(tmp_path, "svd-0001")
    for words in (["cancel", "svd"], ["scale", "svd", "4"]):
        done = run(*words)
        assert (done.returncode, done.stdout) == (4, "")
        assert "there is no cluster 'svd'" in done.stderr
        assert "did you mean svd-0001?" in done.stderr


def test_commands_that_only_read_take_the_beginning_of_an_id(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    record = submitted(tmp_path, "svd-0001").get("svd-0001")
    (record.path / "ended").write_text(Ended(EndKind.CANCELLED, 143, "cancelled").json())
    (tmp_path / "svd").mkdir()  # where its program is
    for words in (["status"], ["report"]):
        done = run(*words, "svd")
        assert done.returncode == 0 and "svd-0001" in done.stdout
    assert "there was no output" in run("logs", "svd").stderr
    assert "svd-0001" in run("connect", "svd").stderr  # it has ended


def test_logs_says_why_a_cluster_ended_without_output(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    record = submitted(tmp_path, "svd-0001").get("svd-0001")
    assert "there is no output yet" in run("logs", record.id).stderr
    ended = Ended(EndKind.CANCELLED, 143, "cancelled by gpujobs")
    (record.path / "ended").write_text(ended.json())
    for options in ((), ("-f",)):
        shown = run("logs", record.id, *options).stderr
        assert shown.count("there was no output: cancelled by gpujobs") == 1
        assert "yet" not in shown


def test_a_missing_batch_scheduler_exits_with_3_and_nothing_is_lost(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ledger = submitted(tmp_path, "svd-0001")
    before = ledger.get("svd-0001")
    for arguments in (["cancel", "svd-0001"], ["cancel", "--all"]):
        done = run(*arguments)
        assert done.returncode == 3, done.stderr
        assert (
            "the command scancel was not found" in done.stderr
            and "commands: {scancel:" in done.stderr
        )
    assert ledger.get("svd-0001") == before
    seen = run("status", "svd-0001", "--json")  # what is known without it
    assert seen.returncode == 0 and "squeue was not found" in seen.stderr
    assert json.loads(seen.stdout)["clusters"][0]["jobs"][0]["state"] == "UNKNOWN"
    profile = tmp_path / "p.yaml"
    profile.write_text(text_of({"gpus": 4, "account": "p12345"}))
    done = run("submit", str(profile), "--site", "example-slurm")
    assert done.returncode == 3 and done.stdout == ""


def test_the_others_are_cancelled_after_one_that_cannot_be(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    submitted(tmp_path, "a-0001")
    submitted(
        tmp_path,
        "b-0001",
        scheduler="local",
        created=2.0,
        submissions=(Submission("elsewhere:1@1", 0, 1),),
    )
    done = run("cancel", "--all")
    assert done.returncode == 3 and "the command scancel was not found" in done.stderr
    assert "b-0001 is cancelled" in done.stderr


def test_clusters_are_cancelled_at_the_same_time(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """This scancel succeeds only while another one runs."""
    bin_folder, running = tmp_path / "bin", tmp_path / "running"
    bin_folder.mkdir()
    running.mkdir()
    (bin_folder / "scancel").write_text(
        f"#!/bin/bash\ntouch {running}/$$\nfor n in {{1..100}}; do\n"
        f"  set -- {running}/*; [ $# -ge 2 ] && exit 0; sleep 0.1\ndone\nexit 1\n"
    )
    (bin_folder / "scancel").chmod(0o755)
    for number, name in enumerate(("a-0001", "b-0001")):
        submitted(tmp_path, name, created=float(number))
    done = run("cancel", "--all", PATH=f"{bin_folder}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "0001" in line]
    assert told == ["a-0001 is cancelled", "b-0001 is cancelled"]


@pytest.mark.parametrize(
    "arguments", [["cancel"], ["nosuch"], ["scale", "x-0000", "-1"], ["submit", "nosuch.yaml"], ["render"], ["plan", "p", "--nosuch"]], ids=" ".join
)  # fmt: skip
def test_wrong_usage_exits_with_2(run, arguments: list[str]) -> None:  # type: ignore[no-untyped-def]
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr


def test_a_record_that_is_not_valid_is_named_and_hides_no_other(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ledger = submitted(tmp_path, "svd-0001")
    (ledger.folder / "half-0000.json").write_text('{"id": "ha')
    done = run("status", "--all")
    assert (
        done.returncode == 0
        and "svd-0001" in done.stdout
        and "half-0000.json is not a valid record" in done.stderr
    )
    done = run("cancel", "half-0000")
    assert (
        done.returncode == 1
        and "jobs called half-0000" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_a_removed_folder_causes_no_traceback(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    submitted(tmp_path, "svd-0001")
    (tmp_path / ".gpujobs" / "svd-0001").rmdir()
    for arguments in (
        ["status", "svd-0001"],
        ["logs", "svd-0001"],
        ["connect", "svd-0001"],
        ["cancel", "svd-0001"],
    ):
        done = run(*arguments)
        assert "Traceback" not in done.stderr, done.stderr


def test_examples_are_valid(run) -> None:  # type: ignore[no-untyped-def]
    at_site = ["--site", "example-slurm", "--set", "account=p12345"]
    others = {ROOT / "examples" / "notebook" / "labextension.yaml"}  # of dask-labextension
    for path in set((ROOT / "examples").rglob("*.yaml")) - others:
        words = [] if re.search("^site: local$", path.read_text(), re.M) else at_site
        done = run("render", str(path), *words)
        assert done.returncode == 0, f"{path}: {done.stderr}"


# -- messages -----------------------------------------------------------------------------------------------------
class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def handler() -> Iterator[None]:
    live.install_handler()
    live.install_handler()  # the second call changes nothing
    yield
    for installed in [item for item in live.logger.handlers if type(item) is live.MessageHandler]:
        live.logger.removeHandler(installed)


def test_messages_are_above_the_line_of_progress(
    handler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = live.ReportProgress()
    progress.show("1/2 workers", "00:01")
    logging.getLogger("gpujobs").warning("Slurm is %s", "away")
    progress.show("x" * 200, "00:02")
    clear = "\r\x1b[K"
    shown = terminal.getvalue()
    assert shown == f"{clear}1/2 workers, 00:01{clear}Slurm is away\n{clear}{'x' * 71}…, 00:02"


def test_progress_without_a_terminal_has_a_line_for_each_change(
    handler: None, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = live.ReportProgress()
    for clock in ("00:01", "00:02"):
        progress.show("1/2 workers", clock)
    progress.show("2/2 workers", "00:03")
    logging.getLogger("gpujobs").info("all are there")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "1/2 workers, 00:01\n2/2 workers, 00:03\nall are there\n"


def test_progress_comes_before_the_output(
    handler: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = replace(RECORD, folder=str(tmp_path / "svd-0000"), run=("python", "p.py"))
    workers = {name: RegisteredWorker(address=name, threads=1) for name in WORKERS[:4]}
    running = judge(record, folder_state(workers=workers), {}, now=1.0)
    done = judge(record, FolderState(ended=Ended(EndKind.DONE, 0)), {}, now=1.0)
    (record.path / "logs").mkdir(parents=True)
    record.path.chmod(0o700)
    (record.path / "logs" / "run.log").write_text("a result\n")

    class Waits:
        id = record.id

        def wait(self, watch: Callable[[ClusterReport], None]) -> None:
            watch(running)
            watch(done)
            raise KeyboardInterrupt

    Waits.record = record  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        wait_for_cluster(Waits())  # type: ignore[arg-type]
    first, second, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("4/") and second == "a result"
    assert not any(" workers" in line for line in rest)
    assert re.search(r"^svd-0000 +here +DONE +- +", status_table([done]), re.M)


def test_the_demo_ends_with_what_to_read_next() -> None:
    done = subprocess.run(
        ["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (page,) = re.findall(r"Next: (\S+\.md)", done.stdout)
    assert (ROOT / page).is_file()


# -- JSON ----------------------------------------------------------------------------------------------------------
def documented(section: str, number: int) -> list[str]:
    """Return the keys in a table of JSON keys of docs/json.md; ``number`` counts them, from 0."""
    text = (ROOT / "docs" / "json.md").read_text()
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert body
    tables = re.findall(r"^\| Key \| Type \| Meaning \|\n\|.*\n((?:\|.*\n)+)", body[1], re.M)
    rows = tables[number].splitlines()
    return sorted(key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1]))


def test_keys_of_status_are_documented(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    submitted(tmp_path, "svd-0001")
    value = json.loads(run("status", "--json").stdout)
    cluster = value["clusters"][0]
    assert value["version"] == 2
    assert sorted(cluster) == documented("status", 0)
    assert sorted(cluster["jobs"][0]) == documented("status", 1)
    assert cluster["jobs"][0]["workers"] == [f"svd-0001-0-{gpu}" for gpu in range(4)]


def test_keys_of_plan_and_submit_are_documented(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    profile = tmp_path / "p.yaml"
    profile.write_text(text_of({"gpus": 4, "account": "p12345"}))
    plan = json.loads(run("plan", str(profile), "--site", "example-slurm", "--json").stdout)
    assert sorted(plan) == documented("plan", 0)
    assert sorted(plan["jobs"][0]) == documented("plan", 1)
    groups = {"gpu": {"gpus": 4}, "prep": {"gpus": 0}}
    grouped = tmp_path / "groups.yaml"
    grouped.write_text(text_of({"groups": groups, "account": "p12345"}))
    found = json.loads(run("plan", str(grouped), "--site", "example-slurm", "--json").stdout)
    assert sorted(found) == sorted([*documented("plan", 0), "groups"])
    assert sorted(found["groups"][0]) == documented("plan", 2)
    record = submitted(tmp_path, "svd-0001").get("svd-0001")
    spec = load_spec(profile, site="example-slurm")
    value = submitted_json(plan_json(make_cluster_plan(spec), record.id), record)
    own = {*documented("plan", 0), *documented("submit", 0)} - {"estimated_start"}
    assert sorted(value) == sorted(own) and value["cluster"] == "svd-0001"
    assert value["submissions"] == [{"id": "7", "first": 0, "count": 1}]


def test_keys_of_doctor_and_sites_are_documented(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    site(tmp_path, "here", "x")
    done = run("doctor", "--site", "./here.yaml", "--json")
    value = json.loads(done.stdout)
    assert done.returncode == 1 and value["version"] == 2  # there is no sbatch
    assert all(sorted(check) == documented("doctor", 0) for check in value["checks"])
    failed = [check for check in value["checks"] if check["state"] == "failed"]
    assert [check["name"] for check in failed] == ["commands"]
    assert failed[0]["result"] == "not found: sbatch, scancel, squeue" and failed[0]["remedy"]
    listed = json.loads(run("sites", "list", "--json").stdout)["sites"]
    assert sorted(listed[0]) == documented("sites", 0)


def test_a_profile_that_is_not_utf8_is_an_error_of_one_line(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Also before the profile is read: a command looks into it for the site's login node."""
    path = tmp_path / "svd.yaml"
    path.write_bytes(b"gpus: 1\nsite: local\nname: caf\xe9\n")
    done = run("plan", str(path))
    assert done.returncode == 2
    assert done.stderr == f"error: {path}:3:10: not UTF-8 text\n"


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_while_modules_are_imported_has_no_traceback(tmp_path: Path, ignored: bool) -> None:
    """It ends the command at once, without a traceback; in the background of a script it does nothing."""
    text = "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\nsys.exit('went on')\n"
    (tmp_path / "click.py").write_text(text)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gpujobs", "--version"], env={"PYTHONPATH": str(tmp_path)},
            cwd=ROOT, text=True, capture_output=True, check=False,
        )  # fmt: skip
    finally:
        if ignored:
            signal.signal(signal.SIGINT, before)
    found = (done.returncode, done.stdout, done.stderr)
    assert found == ((1, "", "went on\n") if ignored else (-signal.SIGINT, "", ""))
