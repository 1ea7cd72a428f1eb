"""What a profile has that a Python process does not use when it starts the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.config
import pytest

import gpujobs
from gpujobs.config.spec import load_spec
from gpujobs.errors import InputError
from gpujobs.planning.plan import make_plan

OWNER = "not used, the Python process that owns the cluster decides how long it lives"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ""),
        ("idle_timeout: 0\n", ""),  # it ends with its process
        ("idle_timeout: 1h\n", "`idle_timeout`"),
        ("client_timeout: 1h\nrequeue: 2\n", "`client_timeout`, `requeue`"),
    ],
)
def test_keys_of_submitted_clusters_are_named(home: Path, text: str, names: str) -> None:
    (home / "p.yaml").write_text(f"gpus: 4\n{text}")
    spec = load_spec(home / "p.yaml", site=str(home / "s.yaml"))
    made = make_plan(spec, python="python", replaces="owner")
    notes = [note for note in made.notes if OWNER in note]
    assert notes == ([f"{names}: {OWNER}"] if names else [])


@pytest.mark.parametrize("configured", [False, True])
def test_options_of_a_local_dask_scheduler_are_refused_for_one_in_a_job(
    home: Path, configured: bool
) -> None:
    options = {"dashboard_address": ":0"}
    settings = {"jobqueue.slurm.scheduler-options": options} if configured else {}
    place = (
        "dask configuration jobqueue.slurm.scheduler-options" if configured else "scheduler_options"
    )
    keywords: dict[str, Any] = {} if configured else {"scheduler_options": options}
    with (
        dask.config.set(settings),
        pytest.raises(
            InputError, match=f"{place}: not used with scheduler='job': dashboard_address"
        ),
    ):
        gpujobs.GPUSLURMCluster("./s.yaml", scheduler="job", **keywords)


@pytest.mark.parametrize("name", ["scheduler_options", "scheduler_kwargs"])
def test_options_that_are_no_mapping_are_refused(name: str) -> None:
    keywords: dict[str, Any] = {"gpus_per_job": 0, "n_workers": 1, name: ["x"]}
    with pytest.raises(InputError, match=rf"{name}: \['x'\] is not a mapping"):
        gpujobs.GPULocalCluster(**keywords)


def test_an_address_of_the_dashboard_is_refused_for_a_dask_scheduler_in_a_job() -> None:
    message = "not used with scheduler='job': dashboard_address"
    with pytest.raises(InputError, match=message) as caught:
        gpujobs.GPULocalCluster(
            gpus_per_job=0, n_workers=1, scheduler="job", dashboard_address=":8787"
        )
    assert "network={'dashboard': 'on'}" in str(caught.value)
