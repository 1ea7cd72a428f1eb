"""The directives and commands of every shipped site, kept in ``sites/``: one file for each site.

``GPUJOBS_UPDATE_GOLDEN=1 pytest tests/golden`` writes them again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpujobs.config.sitefiles import data_folder, load_site
from gpujobs.config.spec import load_spec
from gpujobs.doctor.sitereport import check_offline
from gpujobs.errors import InputError
from gpujobs.planning.plan import make_plan
from gpujobs.planning.render import render
from gpujobs.planning.sitecheck import SMALLEST, Tried
from gpujobs.text import plural

from ..support.cli import text_of
from ..support.each import each
from ..unit.support import PYTHON
from .shellcheck import accept

KEPT = Path(__file__).parent / "sites"
SITES = sorted(path.stem for path in data_folder("site_configs").glob("*.yaml"))
SITES = [name for name in SITES if name != "local" and not name.startswith("example-")]
ACCOUNTS = {
    "alpha": "p_svd",
    "delta": "svd-delta-gpu",
    "gadi": "ab12",
    "karolina": "OPEN-12-34",
    "lumi": "project_2001234",
    "mahti": "project_2001234",
    "minerva": "acc_svd",
    "narval": "def-ada",
    "roihu": "project_2001234",
}
"""Accounts that match the patterns of the sites; `svd` for the others."""
OPTIONS = re.compile(r"--(?:visible-devices|schemes|interface|local-directory)=\S+")
"""Options of the commands in a script that depend on the site."""
LAUNCHER = re.compile(r"--workers (\S+ .*?) sh ")
"""The launcher of MPI."""


def shapes(name: str) -> dict[str, dict[str, object]]:
    """Return the profiles that are tried on a site."""
    most = max(queue.worker_gpus for queue in load_site(name).site.queues.values())
    if not most:
        return {"CPU workers": {"gpus": 0}}
    part: dict[str, object] = {"gpus": most // 2, "gpus_per_job": most // 2}
    return {
        "one GPU": {"gpus": 1},
        **({"a part of a node": part} if most >= 4 else {}),
        "several nodes": {"gpus": 2 * most, "gpus_per_job": most},
        "mpi on several nodes": {"gpus": 2 * most, "layout": "mpi"},
    }


def scripts(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the title of each shape and its script, or the reason why the site does not have it."""
    for title, keys in shapes(name).items():
        profile = folder / "svd.yaml"
        account = ACCOUNTS.get(name, "svd")
        run = {"run": ["python", "svd.py"], "workdir": "/home/ada/svd"}
        profile.write_text(text_of({**run, **keys, "account": account, "walltime": "10m"}))
        try:
            plan = make_plan(load_spec(profile, site=name), python=PYTHON, machine=None)
        except InputError as error:
            reason = re.sub(r" \(/[^)]*\)", "", error.problems[0].message)  # without positions
            yield title, f"not on this site: {reason}\n"
            continue
        yield title, "".join(script.text for script in render(plan, "svd-0000"))


def excerpt(script: str, setup: str) -> str:
    """Return the directives, the setup, and the parts of the commands that depend on the site."""
    if not script.startswith("#!"):
        return script
    header, _, rest = script.partition("\n\n")
    assert setup.strip() in rest
    commands = re.sub(r" *\\\n *", " ", rest[rest.index("# --- work") :])
    launcher = [f"launcher: {found}" for found in LAUNCHER.findall(commands)]
    options = sorted(set(OPTIONS.findall(commands)))
    return "\n".join([header.rstrip("\n"), *setup.splitlines(), *launcher, *options]) + "\n"


def requests_of_queues(results: list[Tried]) -> Iterator[str]:
    """Yield a section for each queue: the requests of its smallest job and of MPI on several nodes."""
    sections: dict[str, list[str]] = {}
    for result in results:
        trial, jobs = result.trial, result.scripts[-1].jobs
        section = sections.setdefault(trial.queue, [])
        size = f"{plural(jobs.shape.nodes, 'node')}, {plural(jobs.shape.gpus, 'GPU')}"
        if trial.shape == SMALLEST or (trial.shape == "mpi" and f"[{size}" not in section[0]):
            devices = jobs.visible_devices or "none"
            section.append(f"[{size}, {trial.shape}, visible devices: {devices}]")
            section += [*jobs.lines, *(f"argument: {word}" for word in jobs.submit_arguments)]
    for queue, lines in sections.items():
        if queue:  # the trial of the site's `defaults` has none
            yield "\n".join([f"=== queue {queue}", *lines, ""])


def kept_text(name: str, folder: Path) -> str:
    """Return the text that is compared with the stored one; the site has no errors."""
    setup = load_site(name).site.setup
    excerpts = (f"=== {title}\n{excerpt(text, setup)}" for title, text in scripts(name, folder))
    report = check_offline(name)
    assert report.correct, "\n".join(map(str, report.findings))
    assert all(result.scripts for result in report.results)
    assert {result.trial.queue for result in report.results} >= set(load_site(name).site.queues)
    return "\n".join([*excerpts, *requests_of_queues(report.results)])


@pytest.fixture(autouse=True)
def home_of_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("GPUJOBS_SITE_PATH", raising=False)


@each("name", SITES)
def test_site_is_unchanged_and_has_no_errors(name: str, tmp_path: Path) -> None:
    text, kept = kept_text(name, tmp_path), KEPT / f"{name}.txt"
    if os.environ.get("GPUJOBS_UPDATE_GOLDEN"):
        kept.write_text(text)
    assert text == kept.read_text()


def test_every_stored_text_has_a_site() -> None:
    assert sorted(path.stem for path in KEPT.glob("*.txt")) == SITES


@each("name", SITES)
def test_every_queue_has_a_request(name: str) -> None:
    kept = (KEPT / f"{name}.txt").read_text()
    titles = re.findall(r"^=== queue (\S+)\n\[.*smallest job, .*\]\n\S", kept, re.M)
    assert titles == list(load_site(name).site.queues)


@pytest.mark.slow
def test_bash_and_shellcheck_accept_the_scripts(tmp_path: Path) -> None:
    """shellcheck reads the last script of each site: they differ in the setup and the directives."""
    last = []
    for name in SITES:
        found = [text for _, text in scripts(name, tmp_path) if text.startswith("#!")]
        assert found
        last.append(tmp_path / f"{name}.sh")
        last[-1].write_text(found[-1])
    accept(last)
