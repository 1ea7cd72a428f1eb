"""Print how dense the code of the package is and how plain its English, against the aims.

``python tools/measure.py [PATH...]``: the package, or only these files and folders. Exit code 1 if
an aim is missed. Lengths, branches and words are counted over comments, docstrings and messages.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gpujobs"

LARGEST_MODULE = 300
TOKENS, BRANCHES = 140, 6
"""Of the 90th percentile of all functions."""
PER_1000_LINES = {"conditional expressions": 15.0, "Any": 7.0}
FILES_AT_ROOT = 8
WORDS = {
    "what": (r"\b[Ww]hat\b", 1.5),
    "tell, told": (r"\b([Tt]ells?|[Tt]old|[Tt]elling)\b", 0.3),
    "nobody, somebody, everybody": (r"\b([Nn]obody|[Ss]omebody|[Ee]verybody)\b", 0.0),
}
"""Most per 1,000 words: where these are frequent, a noun or a technical verb is missing."""

_CODE = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)


@dataclass
class Counts:
    """The figures of some modules."""

    lines: int = 0
    modules: dict[str, int] = field(default_factory=dict)
    tokens: list[tuple[int, str]] = field(default_factory=list)
    branches: list[tuple[int, str]] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PER_1000_LINES, 0))
    prose: list[str] = field(default_factory=list)


def measure(paths: list[Path]) -> Counts:
    """Return the figures of the Python files ``paths``."""
    counts = Counts()
    for path in paths:
        _measure_file(path, counts)
    return counts


def _measure_file(path: Path, counts: Counts) -> None:
    text = path.read_text(encoding="utf-8")
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    code_lines = [token.start[0] for token in tokens if token.type in _CODE]
    counts.prose += [token.string for token in tokens if token.type == tokenize.COMMENT]
    counts.lines += text.count("\n")
    counts.modules[str(path)] = text.count("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.IfExp):
            counts.found["conditional expressions"] += 1
        elif isinstance(node, ast.Name) and node.id == "Any":
            counts.found["Any"] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            counts.prose.append(node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            place = f"{path}:{node.lineno} {node.name}"
            last = node.end_lineno or node.lineno
            size = sum(node.lineno <= line <= last for line in code_lines)
            counts.tokens.append((size, place))
            counts.branches.append((_branches(node), place))


def _branches(function: ast.AST) -> int:
    number = 1
    for node in ast.walk(function):
        if isinstance(node, _BRANCHES):
            number += 1
        elif isinstance(node, ast.BoolOp):
            number += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            number += 1 + len(node.ifs)
    return number


def percentile(values: list[tuple[int, str]]) -> int:
    """Return the 90th percentile."""
    ordered = sorted(value for value, _ in values)
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def word_rates(text: str) -> dict[str, float]:
    """Return how often the words of `WORDS` occur per 1,000 words of ``text``."""
    thousands = max(1, len(re.findall(r"[A-Za-z']+", text))) / 1000
    return {
        name: len(re.findall(pattern, text)) / thousands for name, (pattern, _) in WORDS.items()
    }


def report(counts: Counts, root_files: int | None) -> list[tuple[str, float, float]]:
    """Return name, figure and aim of each measure."""
    largest = max(counts.modules.values())
    rows: list[tuple[str, float, float]] = [
        ("lines of the largest module", largest, LARGEST_MODULE),
        ("tokens of a function (90 %)", percentile(counts.tokens), TOKENS),
        ("branches of a function (90 %)", percentile(counts.branches), BRANCHES),
    ]
    for name, aim in PER_1000_LINES.items():
        rate = 1000 * counts.found[name] / counts.lines
        rows.append((f"{name} per 1,000 lines", round(rate, 1), aim))
    for name, rate in word_rates(" ".join(counts.prose)).items():
        rows.append((f"{name} per 1,000 words", round(rate, 2), WORDS[name][1]))
    if root_files is not None:
        rows.append(("files at the root of the package", root_files, FILES_AT_ROOT))
    return rows


def main(arguments: list[str]) -> int:
    """Print the table, and the densest functions where an aim is missed."""
    chosen = [Path(argument) for argument in arguments] or [PACKAGE]
    paths = sorted(
        {file for path in chosen for file in ([path] if path.is_file() else path.rglob("*.py"))}
    )
    counts = measure(paths)
    rows = report(counts, None if arguments else len(list(PACKAGE.glob("*.*"))))
    missed = False
    for name, figure, aim in rows:
        missed = missed or figure > aim
        print(f"{'MISSED' if figure > aim else 'ok':<7} {name:<45} {figure:>8} (aim: {aim})")
    if missed:
        print("densest functions:")
        for size, place in sorted(counts.tokens, reverse=True)[:10]:
            print(f"  {size:4d} tokens  {place}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
