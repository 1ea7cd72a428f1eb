"""`gpujobs sites verify` on a real Slurm and Grid Engine: its trials, and the record that it writes."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..conftest import nothing_left
from ..support.backend import Backend
from ..support.cli import Cli

pytestmark = [pytest.mark.slurm, pytest.mark.sge, pytest.mark.timeout(900)]


@pytest.fixture(params=["slurm", "sge"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    found: Backend = request.getfixturevalue(f"{request.param}_backend")
    yield found
    nothing_left(found)


def marked_site(cli: Cli, name: str, **changes: str) -> Path:
    """Write the site with marks; ``changes``: other limits of the queue `short`."""
    site = {key: value for key, value in cli.site.items() if key != "queues"}
    short = {**cli.site["queues"]["short"], **changes}
    lines = [f"{key}: {json.dumps(value)}   # not verified" for key, value in site.items()]
    queues = {"main": cli.site["queues"]["main"], "short": short}
    lines += ["queues:", *(f"  {key}: {json.dumps(queue)}   # not verified: limits" for key, queue in queues.items())]  # fmt: skip
    path = cli.home / "sites" / f"{name}.yaml"
    path.write_text("\n".join([*lines, ""]))
    if cli.user:
        shutil.chown(path.parent, cli.user)
    return path


def listed(cli: Cli, name: str) -> dict[str, Any]:
    done = cli("sites", "list", "--json")
    (found,) = [site for site in json.loads(done.stdout)["sites"] if site["name"] == name]
    return dict(found)


def states(record: dict[str, Any]) -> dict[str, str]:
    return {line["key"]: line["state"] for line in record["marked"]}


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.conformance
def test_all_trials_of_a_good_site_succeed_and_are_recorded(cli: Cli, backend: Backend) -> None:
    path = marked_site(cli, "good")
    before = listed(cli, "good")["not_verified"]
    done = cli("sites", "verify", str(path), "--yes", timeout=600)
    text = (path.parent / "evidence" / "good.json").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert re.search(r"\d+ jobs, at most \d+ GPU minutes", done.stderr)
    record = json.loads(text)
    checks = {check["name"]: check for check in record["checks"]}
    trials = ("job", "array", "cancel", "walltime", "live", "GPUs")
    assert {name: checks[name]["state"] for name in trials} == dict.fromkeys(trials, "ok")
    assert re.fullmatch(rf"{backend.name} \d+\.\d+\.\d.*", record["scheduler"])
    assert record["gpus"] == ["Fake GPU"] and record["software"].keys() >= {"dask", "driver"}
    assert re.fullmatch(r"tls, [\d.]+ GB/s .*", record["rates"]["between nodes"])
    assert all(record["seconds"][name] > 0 for name in trials[:4])
    assert states(record)["queues.main"] == states(record)["queues.short"] == "confirmed"
    assert states(record)["description"] == "open"
    for secret in (socket.gethostname(), cli.env["USER"], str(cli.home), "node1"):
        assert secret not in text
    found = listed(cli, "good")
    confirmed = [line for line in record["marked"] if line["state"] == "confirmed"]
    assert found["not_verified"] == before - len(confirmed)
    assert found["verified"] == f"{record['date']}, gpujobs {record['gpujobs']}"
    assert f"verified: {found['verified']}" in cli("sites", "show", "good").stderr
    issue = cli("sites", "verify", "good", "--issue").stdout
    assert text in issue and issue.startswith("# Evidence of the site good")
    path.write_text(path.read_text().replace("10m", "9m"))
    assert listed(cli, "good")["not_verified"] == found["not_verified"] + 1, "another value"


@pytest.mark.conformance("sge")
def test_wrong_values_are_found(cli: Cli, backend: Backend) -> None:
    cli.site["network"] = {"interface": "ib7"}
    path = marked_site(cli, "bad", max_walltime="20m")
    done = cli("sites", "verify", str(path), "--yes", "--hosts", "-o", "bad.json", timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    record = json.loads((cli.work / "bad.json").read_text())
    found = {line["key"]: (line["state"], line["found"]) for line in record["marked"]}
    assert found["queues.short"][0] == found["network"][0] == "corrected"
    assert "the walltime in queue short is at most 10m" in found["queues.short"][1]
    assert "has no interface ib7; it has lo" in found["network"][1]
    assert found["queues.main"][0] == "confirmed"
    assert {check["name"] for check in record["checks"]}.isdisjoint({"array", "cancel"})
    assert record["findings"] and "failed: site file, job" in done.stderr


@pytest.mark.parametrize("backend", ["slurm"], indirect=True)
def test_it_asks_before_jobs_are_submitted(cli: Cli, backend: Backend) -> None:
    path = marked_site(cli, "asked")
    done = cli("sites", "verify", str(path), stdin="n\n")
    assert done.returncode != 0 and "GPU minutes" in done.stderr and backend.queue() == []
    assert not (path.parent / "evidence").exists()
    done = cli("sites", "verify", str(path), "--issue")
    assert done.returncode == 2 and "is no record" in done.stderr
