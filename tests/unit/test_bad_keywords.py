"""Keywords of a cluster class that are refused before anything is submitted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import gpujobs
from gpujobs.errors import GpujobsError

from ..support.cli import text_of
from ..support.each import each

pytestmark = pytest.mark.filterwarnings("default")

SHAPE = {"gpus_per_node": 4, "cpus_per_node": 16, "memory_per_node": "16GiB"}


@pytest.fixture
def counted_site(home: Path) -> Path:
    """The site file of a Slurm whose commands only write that they were called, and fail."""
    commands = {}
    for name in ("sbatch", "squeue", "scancel"):
        program = home / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {home}/calls\nexit 1\n')
        program.chmod(0o755)
        commands[name] = str(program)
    queues = {"main": SHAPE | {"max_walltime": "2d"}}
    site = {"description": "test", "scheduler": "slurm", "queues": queues, "commands": commands}
    path = home / "counted.yaml"
    path.write_text(text_of(site | {"defaults": {"walltime": "10m"}}))
    return path


@each(
    ("keywords", "said"),
    [
        ({"memory": 16}, "a job of 16B; it needs at least 1MiB"), ({"memory": "-1GB"}, "is not a size"), ({"cores": 0}, "at least 1"), ({"cores": "x"}, "not a whole number"),
        ({"processes": 0}, "at least 1"), ({"processes": 3, "gpus_per_job": 2}, "no whole number of workers"), ({"cores": 1, "processes": 2}, "too few"),
        ({"walltime": "forever"}, "is not a time"), ({"walltime": 30}, "needs a unit"), ({"directives": "--x"}, "must be a list"),
        ({"job_extra_directives": "--x"}, "must be a list"), ({"queue": "a\n#SBATCH --x"}, "control character"), ({"account": "a\nrm"}, "control character"),
        ({"name": "x\ny"}, "control character"), ({"gpus_per_job": -1}, "less than 0"), ({"waltime": "1h"}, "did you mean `walltime`?"),
        ({"job_extra": ["x"]}, "does not start with"), ({"security": True}, "network="), ({"n_workers": -1}, "n_workers"), ({"n_workers": "4"}, "n_workers"),
        ({"scheduler": "remote"}, "neither 'local' nor 'job'"), ({"scheduler": "job"}, "not used with scheduler='job'"), ({"job_mem": "4"}, "a job of 4B"), ({"nanny": "x"}, "use worker_class"), ({"run": ["x"]}, "gpujobs submit"),
        ({"worker_options": {"name": "x"}}, "is set by gpujobs"), ({"worker_extra_args": ["x"]}, "does not follow an option"),
    ],
    ids=lambda keywords: json.dumps(keywords, default=str)[:40],
)  # fmt: skip
def test_a_bad_keyword_is_refused_by_its_name(
    counted_site: Path, home: Path, keywords: dict[str, Any], said: str
) -> None:
    usual = {"quiet": True, "scheduler_options": {"dashboard_address": ":0"}}
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        gpujobs.GPUSLURMCluster(str(counted_site), **usual | keywords)
    assert isinstance(caught.value, GpujobsError)
    assert next(iter(keywords)) in str(caught.value)  # it names the keyword
    assert not (home / "calls").exists()
    folder = home / "home" / ".gpujobs"
    assert not folder.exists() or not list(folder.iterdir())
