"""Specifications and plans from text, without files of the user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gpujobs.config.spec import ClusterSpec, load_spec, settings_document
from gpujobs.errors import InputError
from gpujobs.planning.plan import Machine, Plan, make_plan

from ..support.cli import text_of

SITES = Path(__file__).parents[1] / "data" / "sites"
MACHINE = Machine(gpus=(), cpus=8, memory=32 * 2**30, busy={})
PYTHON = "/opt/env/bin/python"
SLURM = """\
description: test
scheduler: slurm
account: {directive: "--account={account}", required: false, pattern: '[a-z0-9]+'}
queues:
  gpu: {gpus_per_node: 4, cpus_per_node: 64, memory_per_node: 480GiB, max_walltime: 1d, max_nodes: 1}
defaults: {walltime: 1h}
"""
"""The site file s.yaml of the fixture `home`."""

Profile = str | Mapping[str, object]
"""A profile as text or as a mapping."""


def make_spec(
    folder: Path, profile: Profile, site: str, name: str = "svd.yaml", **settings: str
) -> ClusterSpec:
    """Return the specification of a profile on a worked site, or on a site of the package."""
    path = folder / name
    path.write_text(text_of(profile))
    own = SITES / f"{site}.yaml"
    words = tuple(f"{key}={value}" for key, value in settings.items())
    return load_spec(
        path, site=str(own) if own.exists() else site, settings=settings_document(words)
    )


def plan(
    folder: Path, profile: Profile, site: str, machine: Machine = MACHINE, **settings: str
) -> Plan:
    """Return the plan of a profile."""
    return make_plan(make_spec(folder, profile, site, **settings), python=PYTHON, machine=machine)


def made_plan(
    home: Path, profile: Profile, site: str = "s.yaml", machine: Machine = MACHINE
) -> Plan:
    """Return the plan of a profile on the site file ``site`` in ``home``, or on the site of that name."""
    return plan(home, profile, str(home / site) if site.endswith(".yaml") else site, machine)


def error_of(home: Path, profile: Profile, site: str = "s.yaml", machine: Machine = MACHINE) -> str:
    """Return the message of the InputError that planning raises."""
    with pytest.raises(InputError) as caught:
        made_plan(home, profile, site, machine)
    assert caught.value.exit_code == 2
    return str(caught.value)
