"""Orders and plans from text, without files of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpujobs.config.spec import ClusterSpec, load_spec
from gpujobs.planning.plan import Machine, Plan, make_plan

from ..support.cli import text_of

SITES = Path(__file__).parents[1] / "data" / "sites"
MACHINE = Machine(gpus=(), cpus=8, memory=32 * 2**30, busy={})
PYTHON = "/opt/env/bin/python"


def make_spec(
    folder: Path, profile: Any, site: str, name: str = "svd.yaml", **settings: str
) -> ClusterSpec:
    """Return the order of a profile (text or mapping) on a worked site, or a site of the package."""
    path = folder / name
    path.write_text(text_of(profile))
    own = SITES / f"{site}.yaml"
    words = tuple(f"{key}={value}" for key, value in settings.items())
    return load_spec(path, site=str(own) if own.exists() else site, settings=words)


def plan(
    folder: Path, profile: Any, site: str, machine: Machine = MACHINE, **settings: str
) -> Plan:
    """Return the plan of a profile."""
    return make_plan(make_spec(folder, profile, site, **settings), python=PYTHON, machine=machine)
