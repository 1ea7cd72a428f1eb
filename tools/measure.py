"""Print how large and dense the package is and how plain its English, against the aims.

``python tools/measure.py [PATH...]``: the package, or only these files and folders. The figures are
for the reader of a change. None of them is a limit: under one, the code became denser, not simpler.
"""

from __future__ import annotations

import ast
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gpujobs"

LARGEST_MODULE = 600
MEDIAN_MODULE = 300
MODULES, LINES = 130, 26_500
"""Aims of the whole package. With every capability that is planned: 145 and 29,000."""
FLOORS = 9
"""Of a room: the longest chain of imports inside it."""
IMPORTS = 6.0
"""Percent of the code lines."""
FILES_AT_ROOT = 8
TOKENS_OF_A_LINE = 7.5
# Of all functions: of the median, and of the 90th percentile.
MEDIAN_TOKENS, TOKENS, BRANCHES = 50, 130, 6
CONDITIONAL_EXPRESSIONS, ANY = 15.0, 7.0  # per 1,000 lines

WORDS = {
    "what": (r"\bwhat\b", 1.5),
    "tell, told": (r"\b(tells?|told|telling)\b", 0.3),
    "nobody, somebody, everybody": (r"\b(nobody|somebody|everybody)\b", 0.0),
}
"""Pattern, and most per 1,000 words: these words often stand for a noun or a technical verb."""

_CODE = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)
_WORST = 10
"""Number of functions that are listed."""


@dataclass(frozen=True)
class Function:
    """The figures of one function."""

    place: str
    tokens: int
    branches: int


@dataclass(frozen=True)
class Module:
    """The figures of one Python file."""

    lines: int
    functions: list[Function]
    conditional_expressions: int
    any_types: int
    tokens: int
    token_lines: int
    """Lines on which a token begins: of a docstring the first one."""
    code_lines: int
    import_lines: int
    prose: str


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    figure: float
    aim: float

    def __str__(self) -> str:
        result = "ok" if self.figure <= self.aim else "above"
        return f"{result:<7} {self.name:<50} {self.figure:>7} (aim: {self.aim})"


def measure(path: Path) -> Module:
    """Return the figures of a Python file."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    code_lines = [token.start[0] for token in _tokens(text) if token.type in _CODE]
    return Module(
        lines=text.count("\n"),
        functions=[
            _function(node, path, code_lines)
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ],
        conditional_expressions=sum(isinstance(node, ast.IfExp) for node in nodes),
        any_types=sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
        tokens=len(code_lines),
        token_lines=len(set(code_lines)),
        code_lines=len(set(code_lines)) - _docstring_lines(nodes),
        import_lines=sum(
            (node.end_lineno or node.lineno) - node.lineno + 1
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
        ),
        prose=python_prose(text),
    )


def _docstring_lines(nodes: Iterable[ast.AST]) -> int:
    """Return the number of lines on which a docstring begins, the only code token of theirs."""
    return sum(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for node in nodes
    )


def floors(room: Path) -> int:
    """Return the longest chain of imports between the modules of a folder."""
    names = {path.stem for path in room.glob("*.py")} - {"__init__"}
    imports = {
        name: {
            target
            for node in ast.walk(ast.parse((room / f"{name}.py").read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.level == 1
            for target in ([node.module] if node.module else [alias.name for alias in node.names])
            if target in names
        }
        for name in names
    }
    height: dict[str, int] = {}
    for name in TopologicalSorter(imports).static_order():
        height[name] = 1 + max((height[target] for target in imports[name]), default=0)
    return max(height.values(), default=0)


def package_rows(modules: Sequence[Module]) -> list[Row]:
    """Return the rows of the package as a whole."""
    lines = sorted(module.lines for module in modules)
    rooms = [
        path for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()
    ]
    imports = sum(module.import_lines for module in modules)
    share = 100 * imports / sum(module.code_lines for module in modules)
    return [
        Row("modules", len(modules), MODULES),
        Row("lines of the package", sum(lines), LINES),
        Row("lines of the median module", lines[len(lines) // 2], MEDIAN_MODULE),
        Row("floors of a room", max(map(floors, rooms)), FLOORS),
        Row("imports (% of code lines)", round(share, 1), IMPORTS),
        Row("files at the root of the package", len(list(PACKAGE.glob("*.*"))), FILES_AT_ROOT),
    ]


def python_prose(text: str) -> str:
    """Return the comments, docstrings and messages of a Python file."""
    comments = [token.string for token in _tokens(text) if token.type == tokenize.COMMENT]
    texts = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    return "\n".join([*comments, *texts])


def word_rates(prose: str) -> dict[str, float]:
    """Return how often the words of `WORDS` occur per 1,000 words of ``prose``."""
    thousands = max(1, len(re.findall(r"[A-Za-z']+", prose))) / 1000
    return {
        name: round(len(re.findall(pattern, prose, re.I)) / thousands, 2)
        for name, (pattern, _) in WORDS.items()
    }


def word_rows(prose: str) -> list[Row]:
    """Return the rows of the words in ``prose``."""
    rates = word_rates(prose)
    return [Row(f"{name} per 1,000 words", rates[name], aim) for name, (_, aim) in WORDS.items()]


def code_rows(modules: Sequence[Module]) -> list[Row]:
    """Return the rows of some Python files."""
    functions = [function for module in modules for function in module.functions]
    thousands = max(1, sum(module.lines for module in modules)) / 1000
    conditionals = sum(module.conditional_expressions for module in modules) / thousands
    any_types = sum(module.any_types for module in modules) / thousands
    tokens = [function.tokens for function in functions]
    lines = max(1, sum(module.token_lines for module in modules))
    of_a_line = round(sum(module.tokens for module in modules) / lines, 1)
    return [
        Row("lines of the largest module", max(module.lines for module in modules), LARGEST_MODULE),
        Row("tokens of a line", of_a_line, TOKENS_OF_A_LINE),
        Row("tokens of a function (50 %)", _percentile(tokens, 0.5), MEDIAN_TOKENS),
        Row("tokens of a function (90 %)", _percentile(tokens, 0.9), TOKENS),
        Row(
            "branches of a function (90 %)",
            _percentile([f.branches for f in functions], 0.9),
            BRANCHES,
        ),
        Row(
            "conditional expressions per 1,000 lines",
            round(conditionals, 1),
            CONDITIONAL_EXPRESSIONS,
        ),
        Row("Any per 1,000 lines", round(any_types, 1), ANY),
        *word_rows("\n".join(module.prose for module in modules)),
    ]


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


def _function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, path: Path, code_lines: Sequence[int]
) -> Function:
    last = node.end_lineno or node.lineno
    return Function(
        place=f"{os.path.relpath(path)}:{node.lineno} {node.name}",
        tokens=sum(node.lineno <= line <= last for line in code_lines),
        branches=1 + sum(map(_branches, ast.walk(node))),
    )


def _branches(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, _BRANCHES))


def _percentile(values: Sequence[int], part: float) -> int:
    """Return the value below which this ``part`` of them is."""
    ordered = sorted(values)
    return ordered[int(part * len(ordered))] if ordered else 0


def main(arguments: list[str]) -> None:
    """Print the table and the longest functions."""
    files: set[Path] = set()
    for path in map(Path, arguments or [str(PACKAGE)]):
        files.update([path] if path.is_file() else path.rglob("*.py"))
    modules = [measure(path) for path in sorted(files)]
    rows = code_rows(modules)
    if not arguments:
        rows += package_rows(modules)
    print(*rows, sep="\n")
    functions = [function for module in modules for function in module.functions]
    print("longest functions:")
    for function in sorted(functions, key=lambda function: -function.tokens)[:_WORST]:
        print(f"{function.tokens:7d} tokens, {function.branches:3d} branches  {function.place}")


if __name__ == "__main__":
    main(sys.argv[1:])
