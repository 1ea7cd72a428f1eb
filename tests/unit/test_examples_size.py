"""The examples stay small: each folder has a page, and a profile or a form, each script at most 60 lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.cli import ROOT

EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir())


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_a_script_has_at_most_60_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_is_complete_and_in_the_list(folder: Path) -> None:
    assert (folder / "README.md").exists()
    assert (folder / "profile.yaml").exists() or (folder / "form.yml").exists()
    assert f"]({folder.name})" in (EXAMPLES / "README.md").read_text()
