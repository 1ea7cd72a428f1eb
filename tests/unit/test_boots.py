"""Daemons that a test boots: each has ports of its own, and one that ends is booted again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..support.cli import ROOT
from ..support.processes import ATTEMPTS, BootError, boot, free_ports, hold_port, put_aside

HOLD = """
import sys
from tests.support.processes import free_ports
print(*free_ports(20), flush=True)
sys.stdin.read()
"""


class Daemons:
    """Daemons of which the first boots fail."""

    def __init__(self, folder: Path, failures: int) -> None:
        self.folder, self.failures, self.boots = folder, failures, 0

    def start(self) -> None:
        self.boots += 1
        self.folder.mkdir()
        (self.folder / "log").write_text(f"boot {self.boots} says this\n")
        assert self.boots > self.failures, "the daemon has ended"

    def undo(self) -> list[Path]:
        return [put_aside(self.folder) / "log"]


def test_a_port_of_a_test_process_is_not_given_to_another_one() -> None:
    words = [sys.executable, "-c", HOLD]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdin and other.stdout
        ports = [int(word) for word in other.stdout.readline().split()]
        for port in ports:  # which nothing listens on yet
            with pytest.raises(OSError, match="unavailable"):
                hold_port(port)
    hold_port(ports[0])  # the other one has ended
    assert len(set(ports)) == 20


def test_a_port_is_given_only_once() -> None:
    (port,) = free_ports(1)
    with pytest.raises(OSError, match="unavailable"):
        hold_port(port)


def test_a_boot_that_fails_is_tried_again_in_a_clean_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemons = Daemons(tmp_path / "s", failures=ATTEMPTS - 1)
    boot(daemons.start, daemons.undo)
    said = capsys.readouterr().out
    assert "boot 1 of 3: the daemon has ended" in said and "boot 2 says this" in said
    assert (tmp_path / "s/log").read_text() == "boot 3 says this\n"


def test_the_third_failure_of_a_boot_is_an_error(tmp_path: Path) -> None:
    daemons = Daemons(tmp_path / "s", failures=ATTEMPTS)
    with pytest.raises(BootError, match="3 boots failed, the last one: the daemon has ended"):
        boot(daemons.start, daemons.undo)
    assert not (tmp_path / "s").exists()
