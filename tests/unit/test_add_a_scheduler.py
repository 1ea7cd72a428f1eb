"""The page about adding a batch scheduler is true: it names the whole contract, and quotes the code."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from gpujobs.schedulers import Scheduler

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-scheduler.md").read_text()
INTERNAL = {"on_this_machine", "cluster"}
QUOTED = "\n".join(
    (ROOT / path).read_text()
    for path in ("gpujobs/schedulers/sge.py", "tests/fakes/demo/demo_batch.py")
)


def test_every_name_of_the_contract_is_explained() -> None:
    names = {
        name for name in (*vars(Scheduler), *Scheduler.__annotations__) if not name.startswith("_")
    }
    explained = set(re.findall(r"`(\w+)(?:\(\))?`", PAGE))
    assert sorted(names - INTERNAL - explained) == []


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S))
def test_quoted_code_is_the_code(code: str) -> None:
    assert code in QUOTED or textwrap.indent(code, "    ") in QUOTED


def test_entry_points_have_the_group() -> None:
    from gpujobs.schedulers.base import ENTRY_POINTS

    assert f'[project.entry-points."{ENTRY_POINTS}"]' in PAGE


def test_files_exist() -> None:
    paths = re.findall(r"`((?:gpujobs|tests|templates|tools|site_configs)/[\w./-]+)`", PAGE)
    assert len(paths) > 10
    for path in paths:
        if "NAME" not in path:
            assert (ROOT / path).exists(), path
