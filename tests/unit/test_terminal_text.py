"""What a terminal shows: tables that fit, folded rows, times, colours, and the commands in groups."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gpujobs.cli.live import has_colors, with_labels, with_states
from gpujobs.cli.main import GROUPS, main
from gpujobs.cli.status import clock_of, folded
from gpujobs.text import age_text, table

from ..support.each import each

HEADER = ("CLUSTER", "SITE", "STATE", "")
ROWS = [
    ("svd-1a2b", "leonardo", "RUNNING", "2 missing"),
    ("lasso-77aa", "leonardo", "FAILED", "run: ended with exit code 1: ValueError: no data"),
]
WIDE = """\
CLUSTER     SITE      STATE
svd-1a2b    leonardo  RUNNING  2 missing
lasso-77aa  leonardo  FAILED   run: ended with exit code 1: ValueError: no data"""
MIDDLE = """\
CLUSTER     SITE      STATE
svd-1a2b    leonardo  RUNNING  2 missing
lasso-77aa  leonardo  FAILED   run: ended wit…"""
NARROW = """\
CLUSTER     STATE
svd-1a2b    RUNNING  2 missing
lasso-77aa  FAILED   run: end…"""


@pytest.mark.parametrize(("columns", "shown"), [(None, WIDE), (100, WIDE)])
def test_a_table_that_fits_is_whole(columns: int | None, shown: str) -> None:
    assert table(HEADER, ROWS, columns, spare=("SITE",)) == shown


def test_a_narrow_table_loses_spare_columns_and_the_end_of_the_last_one() -> None:
    assert table(HEADER, ROWS, 46) == MIDDLE
    assert table(HEADER, ROWS, 30, spare=("SITE",)) == NARROW
    assert max(map(len, table(HEADER, ROWS, 46).splitlines())) <= 46


def test_colours_change_no_letter() -> None:
    for text in (WIDE, MIDDLE, NARROW):
        assert click.unstyle(with_states(text)) == text


def test_states_have_colours_and_headers_have_none() -> None:
    header = "WORKER  NODE  RUNNING  WAITING"
    green, red = click.style("RUNNING", fg="green"), click.style("FAILED", fg="red")
    assert with_states(f"{header}\n0  7_0  RUNNING\n1  7_1  FAILED") == (
        f"{header}\n0  7_0  {green}\n1  7_1  {red}"
    )


def test_labels_and_places_have_colours() -> None:
    text = "error: profile.yaml:3:5: no such key\n  hint: did you mean gpus?\nnote: an error: it is"
    shown = with_labels(text)
    assert click.unstyle(shown) == text
    assert click.style("error:", fg="red", bold=True) in shown
    assert click.style("hint:", fg="cyan", bold=True) in shown
    assert click.style("profile.yaml:3:5", bold=True) in shown
    assert shown.endswith(" an error: it is")


def test_equal_jobs_are_one_row() -> None:
    waiting = [(str(n), f"100_{n}", "PENDING", "-", "Resources") for n in range(2, 85)]
    rows = [("0", "100_0", "RUNNING", "node1", ""), *waiting, ("85", "101", "FAILED", "-", "x")]
    assert folded(rows) == [
        ("0", "100_0", "RUNNING", "node1", ""),
        ("2..84", "100_2..100_84", "PENDING", "-", "83 jobs, Resources"),
        ("85", "101", "FAILED", "-", "x"),
    ]
    assert folded(rows[:3]) == rows[:3]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (41.9, "41s"),
        (754, "12m"),
        (5430, "1h30m"),
        (216100, "2d12h"),
        (172799, "47h59m"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_a_moment_before_today_has_its_date() -> None:
    now = 1.8e9
    assert re.fullmatch(r"\d\d:\d\d", clock_of(now, now))
    assert re.fullmatch(r"\d\d-\d\d \d\d:\d\d", clock_of(now + 20 * 86400, now + 30 * 86400))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", clock_of(now - 40 * 86400, now))


def test_every_command_is_in_one_group_of_the_help() -> None:
    shown = [name for name, command in main.commands.items() if not command.hidden]
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(shown)


@pytest.mark.parametrize(("words", "coloured"), [((), False), (("--color", "always"), True)])
def test_the_option_color_decides(words: tuple[str, ...], coloured: bool) -> None:
    done = CliRunner().invoke(main, [*words, "status", "nothing-0000"], color=True)
    assert done.exit_code == 4
    assert ("\x1b[31m" in done.stderr) is coloured, repr(done.stderr)
    done = CliRunner().invoke(main, ["--color", "never", "status", "nothing-0000"], color=True)
    assert "\x1b" not in done.stderr


def test_sites_are_found_by_words() -> None:
    done = CliRunner().invoke(main, ["sites", "list", "OLCF", "slurm"])
    names = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert "frontier" in names and "derecho" not in names
    done = CliRunner().invoke(main, ["sites", "list", "OLCF", "nowhere"])
    assert done.exit_code == 0 and done.stderr == "no site has all of: OLCF nowhere\n"


@each(
    ("variables", "coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({}, True),
    ],
)
def test_a_terminal_has_colours_unless_it_is_dumb_or_the_user_wants_none(
    variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    master, slave = os.openpty()
    with os.fdopen(master, "rb"), os.fdopen(slave, "w") as terminal:
        assert has_colors(terminal) is coloured
    with Path(os.devnull).open("w") as file:
        assert not has_colors(file)
