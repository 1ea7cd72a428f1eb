"""The changes of the target size of a cluster: a file beside its record."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.clusters.ledger import ClusterRecord, Ledger
from gpujobs.clusters.targets import Target, append_targets, read_targets
from gpujobs.clusters.verdict import write_record
from gpujobs.errors import GpujobsError

from .report_data import NAME, RECORD
from .test_damaged_files import KINDS, bounds  # noqa: F401 - a fixture

START = 1000.0
FIRST = Target(START, 4)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A ledger with a cluster of one group of four workers."""
    ledger = Ledger(tmp_path)
    ledger.add(replace(RECORD, created=START))
    return ledger


def scale(ledger: Ledger, workers: int) -> ClusterRecord:
    return ledger.update(NAME, groups=ledger.get(NAME).with_target("", workers))


def file_of(ledger: Ledger) -> Path:
    return ledger.folder / f"{NAME}.targets.jsonl"


def workers(ledger: Ledger) -> list[int]:
    return [target.workers for target in ledger.targets(ledger.get(NAME)).changes]


def older(ledger: Ledger, *targets: Target) -> None:
    """Write the record as an older gpujobs does, with its targets inside."""
    path = ledger.folder / f"{NAME}.json"
    value = json.loads(path.read_text())
    value["targets"] = [vars(target) for target in targets]
    path.write_text(json.dumps(value))


def test_the_ledger_remembers_the_first_target_and_each_change(ledger: Ledger) -> None:
    ledger.update(NAME, notes=("a note",))
    assert ledger.targets(ledger.get(NAME)).changes == (FIRST,)
    assert not file_of(ledger).exists()
    for number in (8, 8, 2):
        scale(ledger, number)
    group = replace(RECORD.groups[0], workers=2, error="refused")
    ledger.update(NAME, groups=(group,))
    first, *_ = ledger.targets(ledger.get(NAME)).changes
    assert first == FIRST and workers(ledger) == [4, 8, 2]
    assert file_of(ledger).stat().st_mode & 0o777 == 0o600


def test_the_size_of_a_record_does_not_grow_with_the_changes(ledger: Ledger) -> None:
    size = (ledger.folder / f"{NAME}.json").stat().st_size
    append_targets(file_of(ledger), [FIRST, *(Target(START + i, i % 9) for i in range(10_000))])
    scale(ledger, 8)
    assert (ledger.folder / f"{NAME}.json").stat().st_size == size
    assert workers(ledger)[0] == 4 and workers(ledger)[-1] == 8


def test_targets_in_the_record_of_an_older_gpujobs_move_at_the_next_change(ledger: Ledger) -> None:
    older(ledger, Target(START, 2), Target(START + 60, 4))
    assert workers(ledger) == [2, 4]
    write_record(replace(ledger.get(NAME), folder=str(ledger.folder)))
    assert json.loads((ledger.folder / "record.json").read_text())["targets"] == []
    ledger.update(NAME, notes=("a note",))
    assert workers(ledger) == [2, 4] and not file_of(ledger).exists()
    scale(ledger, 8)
    assert ledger.get(NAME).targets == ()
    assert workers(ledger) == [2, 4, 8]


def test_targets_that_are_in_the_file_and_in_the_record_count_once(ledger: Ledger) -> None:
    """As after a crash between both writes."""
    targets = [Target(START, 2), Target(START + 60, 4)]
    append_targets(file_of(ledger), [*targets, Target(START + 70, 6)])
    older(ledger, *targets)
    assert workers(ledger) == [2, 4, 6]


def test_a_line_that_a_full_disk_has_cut_off_damages_no_other(ledger: Ledger) -> None:
    scale(ledger, 8)
    with file_of(ledger).open("a") as file:
        file.write('\n{"time": 5.0, "wor')
    assert not ledger.targets(ledger.get(NAME)).problem  # it may be being written
    scale(ledger, 2)
    found = ledger.targets(ledger.get(NAME))
    assert [target.workers for target in found.changes] == [4, 8, 2]
    assert found.problem == f"{file_of(ledger)} is damaged: lines are left out (1)"


LINES = (
    "5", "[]", "{}", "null", '{"time": 1}', '{"time": "x", "workers": 1}', '{"time": 1, "workers": -1}',
    '{"time": 1, "workers": 1000001}', '{"time": 1e400, "workers": 1}', '{"time": -5, "workers": 1}',
    '{"time": 1, "workers": 1, "group": "other"}', '{"time": 1, "workers": 1, "more": 1}',
    '{"time": NaN, "workers": 1}', '{"time": 1, "workers": true}', "\x1b[31m", "[" * 10_000, "9" * 10_000,
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_line_is_left_out_and_named(ledger: Ledger, line: str) -> None:
    scale(ledger, 8)
    with file_of(ledger).open("a") as file:
        file.write(f"\n{line}")
    scale(ledger, 2)
    found = ledger.targets(ledger.get(NAME))
    assert [target.workers for target in found.changes] == [4, 8, 2]
    assert "lines are left out (1)" in found.problem


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"unreadable", "others"}))
@pytest.mark.usefixtures("bounds")
def test_a_file_of_a_wrong_kind_stops_no_change(
    ledger: Ledger, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not written where it leads to; the change is in the record."""
    KINDS[kind](file_of(ledger))
    assert scale(ledger, 8).workers == ledger.get(NAME).workers == 8
    refused = kind in ("pipe", "folder", "endless", "foreign")
    assert (str(file_of(ledger)) in caplog.text) == refused
    found = ledger.targets(ledger.get(NAME))
    assert found.problem and found.changes
    if os.path.lexists("/etc/shadow") and os.access("/etc/shadow", os.R_OK):
        assert NAME not in Path("/etc/shadow").read_text()


def test_what_the_disk_refuses_stays_in_an_older_record(ledger: Ledger) -> None:
    older(ledger, Target(START, 2))
    os.mkfifo(file_of(ledger))
    scale(ledger, 8)
    assert ledger.get(NAME).targets == (Target(START, 2),)


def test_a_very_large_file_grows_no_more_and_is_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "targets.jsonl"
    line = "\n" + json.dumps({"time": START, "workers": 7, "group": ""})
    path.write_text(line * (2**24 // len(line) + 1))
    size = path.stat().st_size
    append_targets(path, [Target(START + 1, 8)])
    assert path.stat().st_size == size
    path.write_text("".join(f'\n{{"time": {number}, "workers": 1}}' for number in range(20_001)))
    found = read_targets(path, (), [""]).changes
    assert len(found) == 10_001 and (found[0].time, found[-1].time) == (0, 20_000)


def test_both_files_are_removed(ledger: Ledger) -> None:
    scale(ledger, 8)
    ledger.remove(NAME)
    assert list(ledger.folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(GpujobsError, match="cannot write in"):
        append_targets(tmp_path / "nosuch" / "targets.jsonl", [FIRST])
