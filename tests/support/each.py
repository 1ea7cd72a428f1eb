"""One test for one rule that holds for many files, sites or values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]
Titles = Callable[[Any], str] | Sequence[str]

ParameterSet = type(pytest.param())


def each(
    names: str | tuple[str, ...], cases: Iterable[Any], ids: Titles = ()
) -> Callable[[Test], Test]:
    """Call a test once for each case, and list all cases that fail.

    The arguments are those of `pytest.mark.parametrize`, which makes an item of each case: every test process collects
    them all. Each case has its own ``tmp_path`` and ``monkeypatch``. Other fixtures are shared.
    """
    keys = (names,) if isinstance(names, str) else names
    given = [_case(case, len(keys)) for case in cases]
    if callable(ids):
        titles = [ids(values[0]) for _, values in given]
    else:
        titles = ids or [title for title, _ in given]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def every_case(subtests: pytest.Subtests, **fixtures: Any) -> None:
            assert given, "the rule has no case"
            for title, (_, values) in zip(titles, given, strict=True):
                with subtests.test(msg=title), ExitStack() as stack:
                    own = _own_fixtures(fixtures, stack)
                    test(**own, **dict(zip(keys, values, strict=True)))

        parameters = inspect.signature(test).parameters
        kept = [parameter for name, parameter in parameters.items() if name not in keys]
        subtests = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        every_case.__signature__ = inspect.Signature([subtests, *kept])  # type: ignore[attr-defined]
        return every_case

    return decorate


def _case(case: Any, number: int) -> tuple[str, tuple[Any, ...]]:
    """Return the title and the values of a case."""
    if isinstance(case, ParameterSet):
        return str(case.id), case.values
    values = tuple(case) if number > 1 else (case,)
    return "-".join(str(value)[:60] for value in values), values


def _own_fixtures(fixtures: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """Return the fixtures of one case."""
    own = dict(fixtures)
    if "tmp_path" in own:
        parent: Path = own["tmp_path"]
        own["tmp_path"] = parent / f"case-{len(list(parent.iterdir()))}"
        own["tmp_path"].mkdir()
    if "monkeypatch" in own:
        own["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
    return own
