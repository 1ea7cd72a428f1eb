"""Checks the bash text of a site and the scripts of its trials with ``bash -n``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..clusters.prepare import bash_error, bash_problems
from ..config.document import Loc
from ..config.sitefiles import SiteFile
from ..errors import Problem
from ..planning.sitecheck import Tried

_TEXTS: tuple[Loc, ...] = (
    ("setup",),
    ("mpi", "setup"),
    ("defaults", "environment", "setup"),
)
"""The keys of a site file that have bash text."""


def syntax_problems(site_file: SiteFile, results: Sequence[Tried]) -> Iterator[Problem]:
    """Return the syntax errors of the site's bash text; if it has none, those of its scripts."""
    texts = [*_TEXTS, *(("queues", key, *loc) for key in site_file.site.queues for loc in _TEXTS)]
    problems = list(bash_problems(site_file.document, texts))
    return iter(problems or _script_problems(results))


def _script_problems(results: Sequence[Tried]) -> Iterator[Problem]:
    seen: set[str] = set()
    for result in results:
        for script in result.scripts:
            # Directives are comments for bash, so most scripts of a site are the same program.
            program = re.sub(r"^#.*$", "", script.text, flags=re.M)
            if program not in seen and (message := bash_error(program)):
                yield Problem(f"{result.trial}: bash -n refuses the script: {message}")
            seen.add(program)
