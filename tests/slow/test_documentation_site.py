"""The documentation as a site: `make docs` has no warnings, and its pages need no network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpujobs
from gpujobs.cli.main import main
from gpujobs.config.model import key_names
from gpujobs.config.profile import Profile
from gpujobs.config.site import Site

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


def test_pictures_have_alternatives_and_need_no_background(site: Path) -> None:
    images = [
        image
        for path in site.rglob("*.html")
        for image in re.findall(r"<img[^>]*>", path.read_text())
        if ".svg" in image
    ]
    assert len(images) >= 2
    for image in images:
        assert re.search(r'alt="[^"]{40,}"', image), image
        assert "dark-light" in image


def test_the_reference_has_every_key_and_command(site: Path) -> None:
    texts = {
        kind: re.sub("<[^>]*>", "", (site / "docs" / f"reference-{kind}.html").read_text())
        for kind in ("profile", "site", "commands", "python")
    }
    for kind, model in (("profile", Profile), ("site", Site)):
        missing = {name.rpartition(".")[2] for name in key_names(model)} - set(
            re.findall(r"\w+", texts["profile"] + texts[kind])
        )
        assert not missing
    assert "--ntasks-per-node=1" in texts["site"] and "must be set" in texts["site"]
    assert not [name for name in main.commands if f"gpujobs {name}" not in texts["commands"]]
    names = [name for name in gpujobs.__all__ if name != "__version__"]
    assert not [name for name in names if f"gpujobs.{name}" not in texts["python"]]
