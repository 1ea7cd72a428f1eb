"""The examples stay small: each folder has a page and a profile, each script at most 60 lines."""

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
def test_a_folder_has_a_page_and_a_profile_and_is_in_the_list(folder: Path) -> None:
    assert (folder / "README.md").exists()
    assert list(folder.glob("profile.y*ml"))
    assert f"]({folder.name})" in (EXAMPLES / "README.md").read_text()
