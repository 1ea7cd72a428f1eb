"""The page about adding a batch scheduler is true: it names the whole contract, and quotes the code."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from gpujobs import schedulers
from gpujobs.schedulers import base

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-scheduler.md").read_text()
INTERNAL = {"on_this_machine", "cluster"}


def test_every_name_of_the_contract_is_told() -> None:
    names = {
        name
        for name in (*vars(base.Scheduler), *base.Scheduler.__annotations__)
        if not name.startswith("_")
    }
    told = set(re.findall(r"`(\w+)(?:\(\))?`", PAGE))
    assert sorted(names - INTERNAL - told) == []


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S))
def test_quoted_code_is_the_code(code: str) -> None:
    text = (Path(str(schedulers.__file__)).parent / "sge.py").read_text()
    assert code in text or textwrap.indent(code, "    ") in text


def test_files_exist() -> None:
    for path in re.findall(r"`((?:gpujobs|tests|templates|tools|site_configs)/[\w./-]+)`", PAGE):
        if "NAME" not in path:
            assert (ROOT / path).exists(), path
