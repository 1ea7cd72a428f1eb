"""Code and documents are in plain technical English; CONTRIBUTING.md says how to write."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from ..support.cli import ROOT
from ..support.each import each

_spec = importlib.util.spec_from_file_location("measure", ROOT / "tools" / "measure.py")
assert _spec and _spec.loader
measure = importlib.util.module_from_spec(_spec)
sys.modules["measure"] = measure
_spec.loader.exec_module(measure)

GROUPS = {
    "code": ["gpujobs/**/*.py"],
    "documents": ["*.md", "docs/*.md", "benchmarks/gpu/*.md", "examples/**/*.md"],
    "templates": ["templates/*.j2"],
    "site files": ["site_configs/*.yaml", "examples/**/*.yaml", "tests/data/sites/*.yaml"],
    "tools": ["Makefile", "tools/install*", "benchmarks/**/*.py", "examples/**/*.py"],
}
"""Files by the kind of their text; each group must reach the aims of `measure.WORDS`."""

PHRASES = {
    r"typing error": "typo",
    r"fenced? off": "isolated",
    r"living": "active",
    r"further (lines|ones|arguments|options|directives|jobs?)": "extra",
    r"(is|are) right": "is valid",
    r"mend(s|ed|ing)?": "fix",
    r"hand(s|ed|ing)?( \w+){0,3} over": "drain, transfer",
    r"without a word": "without an exit status, without a message",
    r"for good": "cannot be resized, permanently",
    r"though it be": "even if",
    r"none knows": "no … matches",
    r"(talks?|talked|talking) over": "protocol, communicate",
    r"who (finds|ends|wants) (that|a|it)": "a noun, the passive",
    r"is talk": "messages go to stderr",
}
"""Phrases that read as translated, and their replacements."""


def files(group: str) -> list[Path]:
    """Return the files of a group."""
    found = {path for pattern in GROUPS[group] for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(found)


def prose(path: Path) -> str:
    """Return the comments and texts of a Python file, or the whole of another file."""
    text = path.read_text(encoding="utf-8")
    return str(measure.python_prose(text)) if path.suffix == ".py" else text


def number_of_words(text: str) -> int:
    """Return how often the words occur that should be rare."""
    return sum(len(re.findall(pattern, text, re.I)) for pattern, _ in measure.WORDS.values())


@each("group", GROUPS)
def test_words_that_replace_a_noun_or_a_verb_are_rare(group: str) -> None:
    texts = {path: prose(path) for path in files(group)}
    missed = [
        str(row) for row in measure.word_rows("\n".join(texts.values())) if row.figure > row.aim
    ]
    counts = {str(path.relative_to(ROOT)): number_of_words(text) for path, text in texts.items()}
    most = sorted(counts, key=lambda name: -counts[name])[:10]
    lines = [*missed, *(f"{counts[name]:4d} in {name}" for name in most if counts[name])]
    assert texts
    assert not missed, "\n".join(lines)


@each("group", GROUPS)
def test_phrases_that_read_as_translated_do_not_come_back(group: str) -> None:
    found = []
    for path in files(group):
        text = path.read_text(encoding="utf-8")
        for phrase, better in PHRASES.items():
            # A phrase may go on in the next line, behind the sign of a comment.
            pattern = rf"\b{phrase}\b".replace(" ", r"[\s#]+")
            for match in re.finditer(pattern, text, re.I):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r}; write: {better}")
    assert not found, "\n".join(found)
