"""The names of other tools in docs/migrating.md, and what the page says about each.

A comment `<!-- NAMES: PART -->` stands above a sentence with the names that mean the same (PART is
`same`), or above a table of the others: with their meaning (`meaning`), or with the words of the
error or the note (`refused`). A name may have several in its cell, each followed by the batch
schedulers whose classes have it, as in ``job_cpu (Slurm)``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .cli import ROOT

PAGE = (ROOT / "docs" / "migrating.md").read_text()
NOT_USED = "not used"
"""The first words of a note about a keyword without an effect."""


class Row(NamedTuple):
    """What the page says about a name."""

    classes: list[str]
    """Batch schedulers whose classes have it; empty: all."""
    here: str
    """`same`, `meaning`, `refused`, or `noted`: accepted without an effect."""
    text: str


def names(title: str) -> dict[str, Row]:
    """Return all names under ``title``, such as `dask-jobqueue keywords`."""
    found: dict[str, Row] = {}
    for part in ("same", "meaning", "refused"):
        for cell, text in _cells(title, part):
            here = "noted" if part == "refused" and text.startswith(NOT_USED) else part
            for code, classes in re.findall(r"`([^`]+)`(?: \(([\w, ]+)\))?", cell):
                name = code.partition("(")[0]
                assert name not in found, f"{name} has two rows"
                found[name] = Row(classes.split(", ") if classes else [], here, text)
    return found


def _cells(title: str, part: str) -> list[tuple[str, str]]:
    """Return pairs of a text with names, and of what becomes of them."""
    block = re.search(rf"^<!-- {title}: {part} -->\n(.*?)(?:\n\n|\Z)", PAGE, re.M | re.S)
    assert block, f"{title}: {part}"
    if part == "same":
        return [(block[1].replace("\n", " "), "")]
    rows = [row.strip("| ").split(" | ") for row in block[1].splitlines()[2:]]
    return [(cell, text) for cell, text in rows]
