#!/usr/bin/env python3
"""Print the table of the sites that are included in gpujobs, for docs/sites.md.

``tools/site_table.py --write`` replaces the table in the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gpujobs.config.site import Site
from gpujobs.config.sitefiles import load_site
from gpujobs.doctor.checks import evidence_path, not_verified, read_evidence

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "sites.md"
TABLE = re.compile(r"(?<=<!-- included sites -->\n)(?:[^|\n].*\n)*\n*(\|.*\n)+")
HEADER = (
    "| Site | Machine | Batch scheduler | Selected by | Not verified | Source |\n"
    "|---|---|---|---|---|---|\n"
)
PATTERNS = ("environment_variables", "hostnames", "cluster_names")
"""Keys by which a site is selected on its own hosts."""


def shipped() -> list[Path]:
    """Return the site files of real machines."""
    files = sorted((ROOT / "site_configs").glob("*.yaml"))
    return [file for file in files if file.stem != "local" and "example-" not in file.stem]


def site_table() -> str:
    """Return the number of sites that users must name, and the table, a row for each site."""
    files = shipped()
    named = sum(not _patterns(load_site(str(file)).site) for file in files)
    text = (
        f"{named} of these {len(files)} sites have no pattern of their hosts: their users write\n"
        "`--site NAME`, or `site: NAME` in the profile.\n\n"
    )
    return text + HEADER + "".join(_row(file) for file in files)


def _patterns(site: Site) -> str:
    return ", ".join(f"`{name}`" for name in PATTERNS if getattr(site, name))


def _row(file: Path) -> str:
    site, marked = load_site(str(file)).site, not_verified(file, read_evidence(evidence_path(file)))
    link = f"[{file.stem}](../site_configs/{file.name})"
    source = re.sub(
        r"(https?://)(github\.com/[^\s;,]+|[^\s;,/]+)([^\s;,]*)", r"[\2](\1\2\3)", site.source or ""
    )
    selected = _patterns(site) or "`--site`"
    cells = [link, site.description, f"`{site.scheduler}`", selected, str(marked), source]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(TABLE.sub(lambda _: site_table(), PAGE.read_text()))
    else:
        sys.stdout.write(site_table())
