"""The documentation as a site: `make docs` has no warnings, and its pages need no network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.cli import ROOT
from ..support.processes import patience

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with the options of `make docs`."""
    folder = tmp_path_factory.mktemp("site")
    makefile = (ROOT / "Makefile").read_text()
    options = re.search(r"/sphinx-build (.*) \. build/docs$", makefile, re.M)
    assert options
    places = ["-d", folder / "doctrees", ROOT, folder / "html"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options[1].split(), *places],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(200),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_it_has_a_page_for_each_document(site: Path) -> None:
    documents = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("**/README.md")]
    pages = [path.relative_to(ROOT).with_suffix(".html") for path in documents]
    assert len(pages) > 15
    assert not [page for page in pages if not (site / page).exists()]
    assert "docs/index.html" in (site / "index.html").read_text()


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    loaded = r"""<(?:script|link|img|iframe|object|source)\b[^>]*\b(?:src|href|data)=["'](?:https?:)?//[^>]*>"""
    styles = r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^)]*"""
    pages, sheets = [*site.rglob("*.html")], [*site.rglob("*.css")]
    assert pages and sheets
    found = [item for path in pages for item in re.findall(loaded, path.read_text())]
    found += [item for path in sheets for item in re.findall(styles, path.read_text())]
    assert not found
