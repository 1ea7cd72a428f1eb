"""Single checks of `gpujobs doctor`; tests/real/test_doctor.py has the command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpujobs.clusters.judge import judge
from gpujobs.doctor import jobcheck
from gpujobs.doctor.checks import CheckState
from gpujobs.doctor.facts import _check_scratch, _check_transport, _check_versions, rate_text
from gpujobs.doctor.jobcheck import JobFacts
from gpujobs.doctor.trial import read_facts
from gpujobs.injob.folder import Gpu, RegisteredWorker
from gpujobs.injob.transport import Choice

from ..support.folderstate import folder_state
from .report_data import RECORD

NVLINK: Gpu = {"node": "n1", "uuid": "GPU-1", "model": "A100", "memory": 1, "fast": ["NVLink"]}


def test_free_space_is_readable() -> None:
    free = 76629564 * 1024  # no whole number of MiB
    check = _check_scratch({"path": "/s", "free": free, "filesystem": "xfs", "writable": True})
    assert check.result == "/s: 73.1 GiB free (xfs)"


def test_a_host_without_a_route_is_no_reason_for_a_warning() -> None:
    """Dask looks for its address by a route to 8.8.8.8."""
    unshare = [shutil.which("unshare") or "unshare", "--map-root-user", "--net"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot make a network namespace")
    argv = [*unshare, sys.executable, "-W", "always", "-c"]
    dask = "from distributed.utils import get_ip; get_ip()"
    warned = subprocess.run([*argv, dask], capture_output=True, text=True, check=False)
    assert "8.8.8.8" in warned.stderr
    code = "from gpujobs.doctor.trial import _listener\nwith _listener() as found: print(found)"
    done = subprocess.run([*argv, code], capture_output=True, text=True, check=False)
    assert "8.8.8.8" not in done.stderr and ":" in done.stdout, done.stderr


def test_dask_cuda_in_the_job_is_too_old() -> None:
    check = _check_versions({**jobcheck.versions(), "dask-cuda": "24.10.0"})
    assert (check.state, check.result) == (
        CheckState.FAILED,
        "dask-cuda 24.10.0 in the job is too old",
    )
    assert "gpujobs[cuda12]" in check.remedy
    assert _check_versions(jobcheck.versions()).state is CheckState.OK


@pytest.mark.parametrize(
    ("transport", "workers", "remedy"),
    [
        (Choice("tls", "ucxx: ModuleNotFoundError"), {}, "if ucxx is missing: pip install"),
        (
            Choice("tls"),
            {"a": {"gpu": NVLINK}},
            "list ucxx in `network.protocols` of the site file",
        ),
    ],
)
def test_the_remedy_for_ucxx_depends_on_the_site(
    transport: Choice, workers: dict[str, RegisteredWorker], remedy: str
) -> None:
    facts = JobFacts(address="tls://n1:1", bandwidth=None)  # type: ignore[typeddict-item]
    report = judge(RECORD, folder_state(transport=transport, workers=workers), {}, now=1.0)
    assert _check_transport(facts, report).remedy.startswith(remedy)


def test_a_protocol_whose_rate_was_not_measured_says_why() -> None:
    one = {"rate": 0.0, "problem": "no answer"}
    bandwidth = {"protocols": {"tls": one}, "gpu_memory": False}
    facts = JobFacts(address="tls://n1:1", bandwidth=bandwidth)  # type: ignore[typeddict-item]
    assert rate_text(facts) == "tls, not measured: no answer"
    one["problem"], one["rate"] = "", 1.5
    assert rate_text(facts) == "tls, 1.5 GB/s between two workers (host memory)"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"node": 1}, False),
        ({"scratch": {"path": "/tmp"}}, False),
        ({"ucx": None}, False),
    ],
)
def test_facts_of_a_job_have_the_expected_types(
    tmp_path: Path, change: dict[str, object], found: bool
) -> None:
    facts = {
        "node": "n1", "versions": jobcheck.versions(), "driver": jobcheck.driver(),
        "interfaces": ["lo"], "scratch": jobcheck.scratch(), "client": "", "client_error": "",
        "address": "tls://n1:1", "bandwidth": None, "ucx": "",
    }  # fmt: skip
    (tmp_path / "logs").mkdir()
    text = json.dumps({**facts, **change})
    (tmp_path / "logs" / "run.log").write_text(f"other\n{jobcheck.PREFIX}{text}\n")
    assert (read_facts(tmp_path) == facts) is found
    (tmp_path / "logs" / "run.log").write_text(f"{jobcheck.PREFIX}{text[:-1]}\n")
    assert read_facts(tmp_path) is None
