"""Configuration of Sphinx: `make docs` builds the site in build/docs.

The source folder is the top of the repository. Therefore links to the examples and to files of the
code have the same targets on the site and in the repository.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

from gpujobs.version import __version__

sys.path.insert(0, str(Path(__file__).parent))

project = "gpujobs"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
_PAGES = ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT")
include_patterns = ["docs/**", "examples/**", *(f"{name}.md" for name in _PAGES)]
exclude_patterns = [".*", "**/.*", "build", "dist", "gpujobs", "tests", "tools"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
nitpicky = True
# Types of other packages and of gpujobs' own modules have no page here.
nitpick_ignore_regex = [("py:.*", ".*")]
default_role = "code"  # docstrings write names in single backticks
autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "given"}

html_theme = "pydata_sphinx_theme"
html_title = f"gpujobs {version}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_sidebars = {"**": ["globaltoc.html"]}  # all pages, not only those below the current one
html_theme_options = {
    "navigation_with_keys": False,
    "navbar_center": [],
    "footer_start": [],
    "footer_end": [],
}

_LINK = re.compile(r"\[([^\]\n]+)\]\((?!https?:|#)([^)\s]+)\)")
_START_PAGE = '<!DOCTYPE html><meta http-equiv="refresh" content="0; url=docs/index.html">\n'


def setup(app: Sphinx) -> None:
    """Register the handlers."""
    app.connect("doctree-read", _keep_background)
    app.connect("source-read", _insert_reference)
    app.connect("source-read", _resolve_folders)
    app.connect("build-finished", _write_start_page)


def _insert_reference(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace comments such as ``<!-- generated site-keys -->`` by that part of the reference."""
    from reference import PARTS

    source[0] = re.sub(r"<!-- generated ([a-z-]+) -->", lambda name: PARTS[name[1]](), source[0])


def _resolve_folders(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace links to folders: by one to the folder's README.md, or without it by their text."""
    here = (Path(app.srcdir) / page).parent

    def resolved(link: re.Match[str]) -> str:
        if not (here / link[2]).is_dir():
            return link[0]
        readme = here / link[2] / "README.md"
        return f"[{link[1]}]({link[2]}/README.md)" if readme.exists() else link[1]

    source[0] = _LINK.sub(resolved, source[0])


def _keep_background(app: Sphinx, page: nodes.document) -> None:
    """Tell the theme that the pictures need no white background in the dark mode."""
    for image in page.findall(nodes.image):
        image["classes"].append("dark-light")


def _write_start_page(app: Sphinx, error: Exception | None) -> None:
    """Write index.html at the top of the site, which leads to the first page."""
    if not error:
        (Path(app.outdir) / "index.html").write_text(_START_PAGE)
