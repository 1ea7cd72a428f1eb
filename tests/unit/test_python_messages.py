"""What the Python classes say where another class of dask would go on, or print its inside."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import dask.config
import pytest

import gpujobs
from gpujobs.errors import InputError, RefusedError
from gpujobs.schedulers import get_scheduler

from ..support.each import each

OPTIONS: dict[str, Any] = {
    "scheduler_options": {"host": "127.0.0.1"},
    "network": {"dashboard": "off"},
    "quiet": True,
}


@pytest.fixture
def refusing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper of sbatch that fails."""
    programs = home / "bin"
    programs.mkdir()
    texts = {"sbatch": "echo 'wrapper: no project' >&2\nexit 1\n", "squeue": "", "scontrol": ""}
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")


def lines_of(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()


def test_a_refused_job_is_a_few_lines(refusing: None) -> None:
    with (
        gpujobs.GPUSLURMCluster("./s.yaml", **OPTIONS) as cluster,
        pytest.raises(RefusedError, match="wrapper: no project") as scaled,
    ):
        cluster.scale(1)
    with pytest.raises(RefusedError, match="wrapper: no project") as made:
        gpujobs.GPUSLURMCluster("./s.yaml", n_workers=1, **OPTIONS)
    with pytest.raises(RefusedError, match="wrapper: no project") as in_a_job:
        gpujobs.GPUSLURMCluster("./s.yaml", scheduler="job", quiet=True)
    for found in (scaled, made, in_a_job):
        lines = lines_of(found.value)
        assert len(lines) < 16, "\n".join(lines)
        assert not any("tornado" in line or "During handling" in line for line in lines)


def test_a_cluster_that_is_made_again_names_the_first_one(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keywords: dict[str, Any] = {"gpus_per_job": 0, "network": {"dashboard": "off"}}
    waiting = {"setup": "sleep 100"}
    with gpujobs.GPULocalCluster(n_workers=0, environment=waiting, **keywords) as first:
        first.scale(1)
        assert "this process has" not in capsys.readouterr().out
        with gpujobs.GPULocalCluster(n_workers=0, **keywords) as second:
            said = capsys.readouterr().out
            assert f"this process has the cluster {first.id}, too" in said
            assert second.id not in said
    with gpujobs.GPULocalCluster(n_workers=0, **keywords):
        assert "this process has" not in capsys.readouterr().out


def test_attributes_of_a_subclass_are_refused_or_read(home: Path) -> None:
    with pytest.raises(InputError, match=r"Own\.job_cls has no meaning here.*\n.*`config_name`"):
        type("Own", (gpujobs.GPUSLURMCluster,), {"job_cls": object})
    own = type("Own", (gpujobs.GPUSLURMCluster,), {"config_name": "own"})
    with pytest.raises(InputError, match=r"no section jobqueue\.own"):
        own("./s.yaml")
    section = {"scheduler-options": {"host": "127.0.0.1"}, "walltime": "1h30m"}
    with dask.config.set({"jobqueue.own": section}), own("./s.yaml", **OPTIONS) as cluster:
        assert "--time=01:30:00" in cluster.job_script()


def test_variables_of_the_log_directory_are_expanded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "here")
    keywords = {**OPTIONS, "log_directory": "${WHERE}/logs"}
    with gpujobs.GPUSLURMCluster("./s.yaml", **keywords) as cluster:
        assert (cluster.folder / "logs").resolve() == home / "here" / "logs" / cluster.id
    for word in ("$NOWHERE", "${NOWHERE}"):
        with pytest.raises(InputError, match=r"log_directory: .*NOWHERE\}? is not set here"):
            gpujobs.GPUSLURMCluster("./s.yaml", log_directory=f"/x/{word}/logs")


@each(
    ("keyword", "hint"),
    [
        ({"dashboard_link": "x"}, "`cluster.dashboard_link` has it"),
        ({"ip": "0.0.0.0"}, "use network={'interface': …}"),
        ({"job_mem": 0}, "leave it out for the default"),
    ],
)
def test_a_refused_keyword_has_a_hint_and_a_short_traceback(
    home: Path, keyword: dict[str, Any], hint: str
) -> None:
    with pytest.raises(InputError) as found:
        gpujobs.GPUSLURMCluster("./s.yaml", **keyword)
    assert hint in str(found.value)
    assert len(traceback.extract_tb(found.value.__traceback__)) == 2, "\n".join(
        lines_of(found.value)
    )


@each(
    ("line", "found"),
    [
        ("68", ["68"]),
        ("68;x", ["68"]),
        ("Submitted batch job 68", ["68"]),
        ("Submitted batch job 68 on cluster x", ["68"]),
        ("Submitted batch job 68 on", []),
        ("Remaining balance 117", []),
    ],
)
def test_possible_ids_are_found_in_answers_of_sbatch(line: str, found: list[str]) -> None:
    assert get_scheduler("slurm")().possible_ids(f"a note\n{line}\n") == found
