"""Count the faults that no test notices: change the package at random places, and run their tests.

``python tools/mutants.py [--count 200] [--seed 1] [--processes 2] [PATH...]``, from a checkout that
is not edited meanwhile, with pytest-cov installed. A mutant is one flipped comparison, constant,
`and`, `or` or `not`, or one call that is left out. It survives if the nearest of the unit, golden
and simulated tests that execute its line pass. Prints the survivors. Takes 30 minutes of CPU time.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parents[1]
TESTS = ("tests/unit", "tests/golden", "tests/simulated")
TIMEOUT = 300.0
"""Seconds for the tests of one mutant; one that hangs them is noticed."""
MOST_TESTS = 40
"""Tests of one mutant, the nearest ones: lines of every command are executed by thousands."""

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
LINES_WITHOUT_EFFECT = ("logger.", "warnings.warn")


@dataclass(frozen=True)
class Mutant:
    """``new`` in place of the text between two positions: a line from 1, and a column in bytes."""

    path: str
    start: tuple[int, int]
    end: tuple[int, int]
    new: str

    def apply(self, text: str) -> str:
        """Return the changed text of the file."""
        lines = text.encode().splitlines(keepends=True)
        before = b"".join(lines[: self.start[0] - 1]) + lines[self.start[0] - 1][: self.start[1]]
        after = lines[self.end[0] - 1][self.end[1] :] + b"".join(lines[self.end[0] :])
        return (before + self.new.encode() + after).decode()

    def describe(self, text: str) -> str:
        """Return the place, the line, and its new form."""
        old = text.splitlines()[self.start[0] - 1].strip()
        new = self.apply(text).splitlines()[self.start[0] - 1].strip()
        return f"{self.path}:{self.start[0]}\n    {old}\n    {new}"


def mutants_of(path: str, text: str) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    tree = ast.parse(text)
    ignored = set(_annotations_and_docstrings(tree))
    for node in ast.walk(tree):
        if node in ignored:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield _replaced(path, node, f"({left}) {COMPARISONS[type(node.ops[0])]} ({right})")
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield _replaced(path, node, word.join(f"({ast.unparse(v)})" for v in node.values))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield _replaced(path, node, f"({ast.unparse(node.operand)})")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield _replaced(path, node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield _replaced(path, node, repr(node.value + 1))
        elif _is_call_with_effect(node):
            yield _replaced(path, node, "pass")


def _is_call_with_effect(node: ast.AST) -> TypeGuard[ast.Expr]:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    return not ast.unparse(node).startswith(LINES_WITHOUT_EFFECT)


def _replaced(path: str, node: ast.expr | ast.stmt, new: str) -> Mutant:
    start = (node.lineno, node.col_offset)
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return Mutant(path, start, end, new)


def _annotations_and_docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.append(node)
        if isinstance(
            node, ast.JoinedStr
        ):  # the positions inside of it are wrong before Python 3.12
            parts.append(node)
        for part in filter(None, parts):
            yield from ast.walk(part)


# -- tests -----------------------------------------------------------------------------------------
def copy_of(folder: Path) -> Path:
    """Copy the files of this checkout that git knows into ``folder``."""
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    for name in names.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(folder: Path, arguments: Sequence[str]) -> bool:
    """Run pytest on a copy of the checkout; return whether all tests have passed."""
    command = [sys.executable, "-m", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait(TIMEOUT) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def tests_of_lines(folder: Path, processes: int) -> dict[tuple[str, int], list[str]]:
    """Return the tests that execute each line of the package; not those that fail unchanged."""
    (folder / ".coveragerc").write_text("[run]\nsource = gpujobs\n")
    coverage = ["--cov=gpujobs", "--cov-context=test", "--cov-report="]
    options = ["-q", "-n", str(processes), "-m", "not slow", *coverage]
    command = [sys.executable, "-m", "pytest", *options, *TESTS]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run(command, cwd=folder, env=environ, check=False, stdout=subprocess.DEVNULL)
    kept = folder / ".pytest_cache" / "v" / "cache" / "lastfailed"
    failed = set(json.loads(kept.read_text())) if kept.exists() else set()
    for name in sorted(failed):
        print(f"fails without a mutant, left out: {name}")
    report = [sys.executable, "-m", "coverage", "json", "--show-contexts", "-q", "-o", "lines.json"]
    subprocess.run(report, cwd=folder, env=environ, check=True)
    lines: dict[tuple[str, int], set[str]] = {}
    of_file: dict[str, Counter[str]] = defaultdict(Counter)
    for path, file in json.loads((folder / "lines.json").read_text())["files"].items():
        for line, contexts in file["contexts"].items():
            tests = {one.rpartition("|")[0] for one in contexts} - failed
            lines[path, int(line)] = tests
            of_file[path].update(tests)
    breadth = Counter(test for tests in lines.values() for test in tests)
    return {place: _nearest(tests, of_file[place[0]], breadth) for place, tests in lines.items()}


def _nearest(tests: set[str], of_file: Counter[str], breadth: Counter[str]) -> list[str]:
    """Return the tests of a line, those first of which the most lines are of its file.

    A line that only the import executes has the tests of its file.
    """
    own = tests - {""} or set(of_file) - {""}
    return sorted(own, key=lambda test: (-of_file[test] / breadth[test], test))[:MOST_TESTS]


def survives(mutant: Mutant, tests: Sequence[str]) -> bool:
    """Return whether all of ``tests`` pass on a copy of the checkout with the mutant."""
    with tempfile.TemporaryDirectory(prefix="gpujobs-mutant-") as name:
        folder = copy_of(Path(name))
        file = folder / mutant.path
        file.write_text(mutant.apply(file.read_text()))
        return run_tests(folder, ["pytest", "-q", "-x", "-p", "no:cacheprovider", *tests])


def main() -> None:
    """Print the survivors and their number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("paths", nargs="*", default=["gpujobs"])
    given = parser.parse_args()
    files = [path for root in given.paths for path in sorted((ROOT / root).rglob("*.py"))]
    files = files or [ROOT / path for path in given.paths]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    choice = random.Random(given.seed)  # noqa: S311
    every = [mutant for path, text in texts.items() for mutant in mutants_of(path, text)]
    chosen = choice.sample(every, min(given.count, len(every)))
    with tempfile.TemporaryDirectory(prefix="gpujobs-mutants-") as name:
        executed = tests_of_lines(copy_of(Path(name)), given.processes)
    work = [(mutant, executed.get((mutant.path, mutant.start[0]), [])) for mutant in chosen]
    unseen = [mutant for mutant, tests in work if not tests]
    tested = [(mutant, tests) for mutant, tests in work if tests]
    print(f"{len(chosen)} of {len(every)} mutants; no test executes the line of {len(unseen)}:")
    for mutant in unseen:
        print(mutant.describe(texts[mutant.path]))
    print("survivors:", flush=True)
    alive = 0
    with ThreadPoolExecutor(given.processes) as pool:
        running = {pool.submit(survives, mutant, tests): mutant for mutant, tests in tested}
        for done in as_completed(running):  # one that hangs its tests holds up no other
            if done.result():
                alive += 1
                print(running[done].describe(texts[running[done].path]), flush=True)
    print(f"{len(tested) - alive} of {len(tested)} noticed, {alive} survived")


if __name__ == "__main__":
    main()
