"""Single checks of `gpujobs doctor`; tests/real/test_doctor.py has the command."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from gpujobs.doctor.job import _check_scratch


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
    code = "from gpujobs.doctor.job import _listener\nwith _listener() as found: print(found)"
    done = subprocess.run([*argv, code], capture_output=True, text=True, check=False)
    assert "8.8.8.8" not in done.stderr and ":" in done.stdout, done.stderr
