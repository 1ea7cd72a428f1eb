"""A copy of the site's environment on each node."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.site import Site
from .bash import Bash, with_variables
from .diagnostics import Diagnostics


@dataclass(frozen=True)
class Staging:
    """A tarball that jobs unpack once per node. Both are words of bash, expanded in the job."""

    archive: Bash
    folder: Bash


def choose_staging(diagnostics: Diagnostics) -> Staging | None:
    """Return the site's staging, unless the profile selects a Python of its own."""
    spec = diagnostics.spec
    site, profile = spec.site.site, spec.profile
    archive = site.environment.staging
    if not archive:
        return None
    reason = ""
    if profile.environment.python or profile.environment.setup:
        reason = "the profile selects the Python of the jobs"
    elif profile.layout == "mpi":
        reason = "a job of `layout: mpi` may have several nodes"
    if reason:
        diagnostics.note(f"the environment of the site ({archive}) is not used: {reason}")
        return None
    return Staging(Bash(with_variables(archive)), Bash(_folder(site)))


def _folder(site: Site) -> str:
    folder = site.environment.staging_folder
    return with_variables(folder) if folder else f'"{site.scratch}"'
