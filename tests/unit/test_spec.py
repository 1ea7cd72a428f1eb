"""The specification of a cluster, as `gpujobs scale` reads it later."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpujobs.config.spec import read_spec, settings_document, with_settings, write_spec

from .support import make_spec


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "profile",
    [
        "gpus: 8\nwalltime: 2h\naccount: p12345\nrun: [python, 'a b.py']\nenv: {A: yes}\n",
        "gpus: 1\nworkers: {options: {lifetime: 1h, a-b: true, n: 2, quoted: '2', list: [1, '1']}}\n",
        "gpus: 0\nworkers: {count: 2, memory: 1GiB, resources: {X: 0.5}}\nhead: {cpus: 2}\n",
    ],
)
def test_a_specification_is_read_as_it_was_written(folder: Path, profile: str) -> None:
    spec = make_spec(folder, profile, "example-slurm")
    write_spec(spec, folder / "spec.json")
    found = read_spec(folder / "spec.json")
    assert found.profile == spec.profile and found.site.site == spec.site.site
    assert (found.name, found.workdir, found.python) == (spec.name, spec.workdir, spec.python)
    assert found.site.name == spec.site.name and found.site.path == spec.site.path
    more = with_settings(found, settings_document(("gpus=4", "workers.threads=2")))
    assert (more.profile.gpus, more.profile.workers.threads) == (4, 2)
    assert more.profile.run == spec.profile.run
