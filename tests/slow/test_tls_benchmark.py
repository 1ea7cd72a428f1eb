"""The benchmark of TLS: every row finishes, and no row has a weak cipher."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..support.cli import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_each_row_is_encrypted_with_its_cipher() -> None:
    argv = [sys.executable, ROOT / "benchmarks" / "tls.py", "--size=800000", "--seconds=0"]
    argv += ["--only", "AES-128", "--variables", "DASK_DISTRIBUTED__COMM__TLS__MIN_VERSION=1.3"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    ciphers = {
        line[:34].strip(): line.split("  ")[-1].split(",")[0]
        for line in done.stdout.splitlines()[2:]
    }
    assert ciphers.pop("plain tcp") == "none"
    assert ciphers.pop("TLS, as gpujobs sets it").startswith("TLS_")  # TLS 1.3
    assert ciphers.pop("TLS with --variables").startswith("TLS_")
    assert ciphers.pop("TLS 1.3, AES-128 (OPENSSL_CONF)") == "TLS_AES_128_GCM_SHA256"
    assert ciphers.pop("TLS 1.2, AES-128") == "ECDHE-ECDSA-AES128-GCM-SHA256"
    assert set(ciphers) <= {"kernel TLS, 1.2, AES-128"}
