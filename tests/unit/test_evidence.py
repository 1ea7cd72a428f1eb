"""Records of `gpujobs sites verify`: redaction, marked lines, and where they are shown."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpujobs.cli.main import main
from gpujobs.doctor.checks import (
    CONFIRMED,
    Evidence,
    evidence_path,
    failed,
    marked_lines,
    not_verified,
    passed,
    read_evidence,
    redactor,
)
from gpujobs.schedulers import get_scheduler

from ..support.cli import ROOT
from ..support.transcripts import recorded
from .support import SLURM

RECORD = Evidence(
    site="s", date="2026-11-24", gpujobs="0.2.0", scheduler="slurm 26.05.3", software={"driver": "570.1"},
    gpus=["A100"], interface="ib0", rates={"between nodes": "ucxx, 24 GB/s"}, seconds={"job": 30.0},
    checks=[passed("job", "ok"), failed("cancel", "its job is still in the queue")], findings=[], marked=[],
)  # fmt: skip


def record(path: Path, evidence: Evidence = RECORD) -> None:
    evidence_path(path).parent.mkdir(exist_ok=True)
    evidence_path(path).write_text(evidence.json())


def test_names_paths_and_addresses_are_replaced() -> None:
    names = {"user": ["ann"], "account": ["p1", ""], "host": ["n1", "n1.example.org"]}
    redact = redactor(names)
    text = "ann's doctor-7f3a ran on n1.example.org, n1: /home/ann/x, ~/.gpujobs; p1 tls://10.0.0.7:80 (ib0)"
    assert redact(text) == (
        "<user>'s doctor-7f3a ran on <host>, <host>: <path>, <path>; <account> tls://<address> (ib0)"
    )
    kept = "annual p12 n10 xn1-x, 12.5 GB/s; a100/h100; ~5 GB, tls://x / y"
    assert redact(kept) == kept
    assert redactor({})("n1 in /tmp") == "n1 in <path>"


def test_other_forms_of_names_and_paths_are_replaced() -> None:
    names = {
        "user": ["ann"],
        "account": ["p1"],
        "host": ["gpu01", "login.hpc.uni.edu", "hpc.uni.edu"],
    }
    redact = redactor(names)
    for text, redacted in (
        ("gpu01.hpc.uni.edu: GPU01.HPC.UNI.EDU, gpu01.other.org.", "<host>: <host>, <host>."),
        ("gpu99.cluster.hpc.uni.edu, hpc.uni.edu", "<host>, <host>"),
        ("gpu01-ib0 and gpu01-ib0.hpc.uni.edu:80", "<host> and <host>:80"),
        ("Ann, ANN@login.hpc.uni.edu, <ann>, P1", "<user>, <user>@<host>, <<user>>, <account>"),
        ("file:///proj/x/y, dir:/proj/x, //proj/x", "file://<path>, dir:<path>, <path>"),
        ("~bob, ~bob/x/y; ~ann/x", "<path>, <path>; ~<user><path>"),
        ("https://gpu01/proj/x", "https://<host><path>"),
    ):
        assert redact(text) == redacted
    assert redactor({"host": ["n1"], "user": ["n1"]})("n1-x") == "<host>"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("tls://[2001:db8::17]:8786, a link", "tls://<address>, a link"),
        ("fe80::1%eth0: refused (FE80:0:0:0:1:2:3:4)", "<address>: refused (<address>)"),
        ("tcp://[::1]:80, [::]:81, 2001:db8::", "tcp://<address>, <address>, <address>"),
        ("::ffff:10.0.0.7", "<address>:<address>"),
        ("at 12:34:56, std::vector, GPU 00000000:3B:00.0", None),
    ],
)
def test_addresses_of_ipv6_are_replaced(text: str, redacted: str | None) -> None:
    assert redactor({})(text) == (redacted or text)


def test_a_record_is_read_as_it_was_written(home: Path) -> None:
    path = home / "s.yaml"
    record(path)
    assert read_evidence(evidence_path(path)) == RECORD
    assert RECORD.summary == "2026-11-24, gpujobs 0.2.0; failed: cancel"
    assert replace(RECORD, findings=["line 3: x"]).failed == ["site file", "cancel"]
    assert RECORD.json() in RECORD.issue() and "failed   cancel" in RECORD.issue()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"checks": [{}]}', '{"checks": [], "marked": []}']
)
def test_a_damaged_record_is_none(home: Path, text: str) -> None:
    path = home / "s.yaml"
    assert read_evidence(path) is None, "no file"
    path.write_text(text)
    assert read_evidence(path) is None


def test_a_strange_record_does_not_stop_the_list(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe, a value of another type, or one that is nested deeply."""
    sites = home / "sites"
    sites.mkdir(mode=0o700)
    monkeypatch.setenv("GPUJOBS_SITE_PATH", str(sites))
    value = json.loads(RECORD.json())
    strange = [
        "[" * 100_000,
        json.dumps({**value, "checks": [{"name": [], "state": "failed", "result": ""}]}),
        json.dumps({**value, "checks": [{"name": "job", "state": "odd", "result": ""}]}),
        json.dumps({**value, "findings": 3}),
        " " * 2**24 + RECORD.json(),
    ]
    for number, text in enumerate(["", *strange]):
        (sites / f"s{number}.yaml").write_text(SLURM)
        path = evidence_path(sites / f"s{number}.yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text) if text else os.mkfifo(path)
    (sites / "good.yaml").write_text(SLURM)
    record(sites / "good.yaml")
    listed = CliRunner().invoke(main, ["sites", "list", "--json"]).stdout
    found = {site["name"]: site["verified"] for site in json.loads(listed)["sites"]}
    names = ["good", *(f"s{number}" for number in range(6))]
    assert [name for name in names if found[name]] == ["good"]


def test_confirmed_lines_count_until_they_change(home: Path) -> None:
    path = home / "s.yaml"
    text = SLURM.replace("max_nodes: 1}", "max_nodes: 1}   # not verified: limits")
    text += "contact: a@example.org   # not verified\n"
    path.write_text(text)
    (_, queue), (number, contact) = marked_lines(text)
    assert (queue.key, contact.key, number) == ("gpu", "contact", text.count("\n"))
    assert not_verified(path, None) == not_verified(path, RECORD) == 2
    found = replace(RECORD, marked=[replace(queue, state=CONFIRMED), contact])
    assert not_verified(path, found) == 1
    path.write_text(text.replace("# not verified: limits", "# not verified: the shape"))
    assert not_verified(path, found) == 1, "the value is the same"
    path.write_text(text.replace("480GiB", "481GiB"))
    assert not_verified(path, found) == 2


def test_the_list_and_the_documentation_show_records(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "records"
    folder.mkdir(mode=0o755)
    for name in ("s", "t"):
        (folder / f"{name}.yaml").write_text(SLURM)
    record(folder / "s.yaml")
    monkeypatch.setenv("GPUJOBS_SITE_PATH", str(folder))
    listed = CliRunner().invoke(main, ["sites", "list", "--json"]).stdout
    found = {site["name"]: site["verified"] for site in json.loads(listed)["sites"]}
    assert (found["s"], found["t"]) == (RECORD.summary, None)
    assert RECORD.summary in CliRunner().invoke(main, ["sites", "list"]).stdout
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec and spec.loader
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    row = (
        "| s | 2026-11-24 | 0.2.0 | slurm 26.05.3 | A100 | between nodes: ucxx, 24 GB/s | cancel |"
    )
    assert reference.verified_sites(folder).splitlines()[2:] == [row]


def test_the_version_of_each_batch_scheduler_is_read() -> None:
    answers = {
        "slurm": ("slurm 22.05.8\n", "22.05.8"),
        "sge": ("SGE 8.1.9+dfsg\nusage: qstat [options]\n", "8.1.9+dfsg"),
        "lsf": ("IBM Spectrum LSF Standard 10.1.0.11, Nov 12 2020\nMy cluster name is c1\n", "10.1.0.11"),
        "pbs": (recorded("pbs", "03-status.txt", "server, json").stdout, "23.06.06"),
        "torque": ("Server: host\n    pbs_version = 6.1.3\n", "6.1.3"),
    }  # fmt: skip
    for name, (answer, version) in answers.items():
        kind = get_scheduler(name).inventory
        assert kind and kind().version(lambda _, answer=answer: answer) == version
        assert kind().version(lambda _: "") == ""
