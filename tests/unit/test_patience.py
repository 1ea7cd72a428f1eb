"""Tests that wait scale their patience with the slowness of the machine: none has a fixed number of seconds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ..support.each import each

TESTS = Path(__file__).parents[1]
FILES = sorted(
    path
    for folder in ("real", "simulated", "slow", "support")
    for path in (TESTS / folder).glob("*.py")
)
SCALED = {"cli", "local", "run", "attempt", "until", "python_run"}
"""Functions of tests/support that scale their time limit themselves."""
WAITS = {"wait", "join", "communicate", "result"}
"""Methods whose first argument may be a time limit."""


def called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def fixed_waits(tree: ast.Module) -> Iterator[ast.expr]:
    """Return the numbers of seconds for which a call waits."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in WAITS:
            yield from filter(is_number, node.args[:1])


def fixed_limits(tree: ast.Module) -> Iterator[ast.expr]:
    """Return the numbers that limit a call, and the programs in text that have such calls."""
    yield from fixed_waits(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.search(r"(?<!-)\btimeout=\d", node.value):
                yield node
        elif isinstance(node, ast.Call) and called(node) not in SCALED:
            limits = [word.value for word in node.keywords if word.arg == "timeout"]
            yield from filter(is_number, limits)


@each("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_time_limit_is_scaled(path: Path) -> None:
    found = fixed_limits(ast.parse(path.read_text()))
    assert [f"{path.name}:{limit.lineno}: {ast.unparse(limit)}" for limit in found] == []


@each("path", sorted((TESTS / "unit").glob("*.py")), ids=lambda path: path.name)
def test_every_wait_of_a_unit_test_is_scaled(path: Path) -> None:
    """Other time limits there are those of the code, which is to exceed them."""
    found = fixed_waits(ast.parse(path.read_text()))
    assert [f"{path.name}:{limit.lineno}: {ast.unparse(limit)}" for limit in found] == []
