"""Rates that `doctor --run` has measured: kept beside the records, copied to clusters, used by a start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpujobs.clusters import rates
from gpujobs.clusters.ledger import Ledger
from gpujobs.injob.folder import RATES, DamagedError, Folder
from gpujobs.injob.options import SuperviseOptions
from gpujobs.injob.transport import HeadsChoice, Measured, node_kind, rates_of

NOW = 1795421999.0
BOTH = ("ucxx", "tls")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return Ledger(folder)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (tmp_path / "p-1" / "logs").mkdir(parents=True)
    return tmp_path / "p-1"


def kept(ledger: Ledger, kind: str = "a") -> dict[str, Measured]:
    return rates_of(rates.read(ledger), kind)


def test_measurements_of_a_kind_of_node_complete_each_other(ledger: Ledger) -> None:
    assert rates.read(ledger) == {}
    rates.keep(ledger, "a", {"ucxx": Measured(107), "tls": Measured(1.2)}, NOW)
    rates.keep(ledger, "a", {"ucxx": Measured(between=12), "tls": Measured(between=1.1)}, NOW)
    rates.keep(ledger, "b", {"ucxx": Measured(problem="no rmm")}, NOW)
    assert kept(ledger) == {"ucxx": Measured(107, 12), "tls": Measured(1.2, 1.1)}
    assert kept(ledger, "b") == {"ucxx": Measured(problem="no rmm")}
    assert kept(ledger, "c") == {}
    rates.keep(ledger, "b", {"ucxx": Measured(100)}, NOW)
    assert kept(ledger, "b") == {"ucxx": Measured(100)}
    assert (ledger.folder / RATES).stat().st_mode & 0o777 == 0o600


def test_the_oldest_kinds_of_nodes_are_left_out(ledger: Ledger) -> None:
    for number in range(60):
        rates.keep(ledger, f"kind {number}", {"tls": Measured(1)}, NOW + number)
    assert list(rates.read(ledger)) == [f"kind {number}" for number in range(59, 9, -1)]


@pytest.mark.parametrize(
    ("measured", "scheme", "reason"),
    [
        ({"ucxx": Measured(107), "tls": Measured(1.2)}, "ucxx", ""),
        ({"ucxx": Measured(0.4), "tls": Measured(1.2)}, "tls", "tls is faster here than ucxx"),
        ({"ucxx": Measured(problem="ucxx hangs"), "tls": Measured(1.2)}, "tls", "ucxx hangs"),
    ],
)
def test_a_start_uses_the_rates_of_its_kind_of_node(
    ledger: Ledger, cluster: Path, measured: dict[str, Measured], scheme: str, reason: str
) -> None:
    rates.keep(ledger, node_kind(None, {}), measured, NOW)
    assert rates.copy(ledger, cluster) == []
    options = SuperviseOptions(folder=str(cluster), job=0, started=0, schemes=BOTH, gpus=0)
    choice = HeadsChoice(options, {}).settle(pause=lambda seconds: None)
    assert (choice.scheme, choice.reason, choice.measured) == (scheme, reason, measured)
    assert not (cluster / "logs" / "try-ucxx.log").exists()  # it is known whether it works
    other = HeadsChoice(options, {"UCX_TLS": "tcp"}).settle(pause=lambda seconds: None)
    assert (cluster / "logs" / "try-ucxx.log").exists()
    assert other.measured.keys() == {"ucxx"}


def test_a_start_needs_no_check_of_a_single_protocol_without_ucxx(cluster: Path) -> None:
    options = SuperviseOptions(folder=str(cluster), job=0, started=0, schemes=("tls",))
    choice = HeadsChoice(options, {}).settle(pause=lambda seconds: None)
    assert (choice.scheme, choice.measured, choice.kind) == ("tls", {}, "")


# -- the file is data ------------------------------------------------------------------------------
def _foreign(path: Path) -> None:
    path.write_text("{}")
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, 65534, 65534)


def _linked(path: Path) -> None:
    path.symlink_to(path.parent / "other")
    (path.parent / "other").write_text("{}")


ENTRY = {"time": NOW, "measured": {"ucxx": {"within": 1.0}}}
DAMAGED: dict[str, Callable[[Path], object]] = {
    "foreign": _foreign,
    "link": _linked,
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "endless": lambda path: path.write_bytes(b" " * 2**19),
    "half": lambda path: path.write_text('{"a": {"time": 1'),
    "zeros": lambda path: path.write_bytes(bytes(200)),
    "deep": lambda path: path.write_text("[" * 100_000),
    "list": lambda path: path.write_text("[]"),
    "rate": lambda path: path.write_text('{"a": {"time": 1, "measured": {"ucxx": {"within": "x"}}}}'),
    "negative": lambda path: path.write_text('{"a": {"time": 1, "measured": {"ucxx": {"within": -1}}}}'),
    "number": lambda path: path.write_text('{"a": 1}'),
}  # fmt: skip


@pytest.mark.parametrize("attack", DAMAGED)
def test_a_damaged_file_is_ignored_with_a_note(ledger: Ledger, cluster: Path, attack: str) -> None:
    path = ledger.folder / RATES
    DAMAGED[attack](path)
    with pytest.raises(DamagedError, match=str(path)):
        rates.read(ledger)
    [note] = rates.copy(ledger, cluster)
    assert note.startswith(f"the measured rates of protocols are ignored: {path} ")
    assert not (cluster / RATES).exists()


def test_a_damaged_copy_is_not_used(cluster: Path) -> None:
    (cluster / RATES).write_text('{"a": {"measured": 7}}')
    assert Folder(str(cluster)).read(RATES) == {}


def test_unknown_keys_of_an_entry_are_left_out(ledger: Ledger) -> None:
    entry = {**ENTRY, "measured": {"ucxx": {"within": 1.0, "run": "rm -r ~"}}, "command": ["x"]}
    (ledger.folder / RATES).write_text(json.dumps({"a": entry}))
    assert kept(ledger) == {"ucxx": Measured(1.0)}
