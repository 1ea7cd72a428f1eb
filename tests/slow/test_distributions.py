"""The sdist and the wheel: both install the same files, and these run commands that need no batch scheduler.

Among them are those of README.md.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpujobs.version import __version__

from ..support import environments
from ..support.cli import ROOT
from ..support.processes import processes_with, run, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

README = (ROOT / "README.md").read_text()
SUBMIT = "gpujobs submit svd.yaml --site local --set gpus=auto --wait"

SHOWN = {
    "gpujobs completion bash": "complete ",
    "gpujobs plan svd.yaml --site delta": "GPUs +8 requested, 8 with a worker of their own",
    "gpujobs render": "#SBATCH --gpus-per-node=4",
    "gpujobs render -o FOLDER": "FOLDER",
    SUBMIT: "svd-",
    "gpujobs status svd-7f3a": "on local: DONE",
    "gpujobs logs -f svd-7f3a": "they agree with the eigenvalues",
    "gpujobs report ID": "on local: DONE",
    "gpujobs doctor --site NAME --run": "ok +job +doctor-",
}
"""What commands print, in this order. Those with an id get that of the finished cluster."""

OF_PIP = {"RECORD", "direct_url.json"}
"""Files that pip writes: they list the others, and say from where gpujobs was installed."""

ELSEWHERE = {"gpujobs submit svd.yaml --site delta", "gpujobs sites init"}
"""Commands of README.md that need a batch scheduler."""


def commands() -> set[str]:
    """Return the commands of README.md, in its console blocks and in its text, without comments."""
    found = re.findall(r"^\$ (gpujobs [^#\n]+)|`(gpujobs [a-z][^`]*)`", README, re.M)
    return {" ".join("".join(groups).split()) for groups in found}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel that is built from it."""
    return environments.distributions(tmp_path_factory)


class Installed:
    """One distribution in an environment of its own, and a user with an empty home."""

    def __init__(self, venv: Path, folder: Path) -> None:
        self.bin, self.work = venv / "bin", folder / "work"
        self.env = {"HOME": str(folder), "PATH": f"{self.bin}:/usr/bin:/bin"}
        self.work.mkdir()

    def __call__(self, line: str) -> str:
        """Run a command line of the README; return what it prints to stdout."""
        done = run(shlex.split(line), env=self.env, cwd=self.work, timeout=180)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout


def environment_of_the_sdist(factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with the sdist and its extra `demo`, and nothing else."""
    package = f"{environments.distributions(factory)['sdist']}[demo]"
    return environments.once(
        factory, "sdist-venv", lambda path: environments.install(path, package)
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The sdist, in a folder with the profile of README.md and its script."""
    folder = tmp_path_factory.mktemp("sdist")
    venv = environment_of_the_sdist(tmp_path_factory)
    made = Installed(venv, folder)
    (profile,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.M | re.S)
    (made.work / "svd.yaml").write_text(profile)
    (made.work / "svd.py").write_text((ROOT / "examples" / "svd.py").read_text())
    yield made
    made("gpujobs cancel --all")
    until(lambda: not processes_with(str(folder)), 30)


def test_every_command_of_the_readme_is_in_a_list() -> None:
    shown = {words for line in SHOWN for words in (line, " ".join(line.split()[:2]))}
    assert commands() <= {*shown, *ELSEWHERE}


def files_of(venv: Path) -> dict[str, str]:
    """Return the hash of each file that is installed of gpujobs, and the command."""
    (packages,) = venv.glob("lib/*/site-packages")
    found = [*packages.glob("gpujobs/**/*"), *packages.glob("gpujobs-*.dist-info/**/*")]
    hashes = {
        str(path.relative_to(venv)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
        if path.is_file() and path.suffix != ".pyc" and path.name not in OF_PIP
    }
    _, command = (venv / "bin" / "gpujobs").read_text().split("\n", 1)  # after the path of Python
    return {**hashes, "bin/gpujobs": command}


def test_both_distributions_install_the_same_files(
    installed: Installed, distributions: dict[str, Path], tmp_path: Path
) -> None:
    """What the commands of one of them do, those of the other one do, too."""
    environments.install(tmp_path / "wheel", "--no-deps", str(distributions["wheel"]))
    wheel, sdist = files_of(tmp_path / "wheel"), files_of(installed.bin.parent)
    assert wheel == sdist
    assert {Path(name).suffix for name in wheel} >= {".py", ".j2", ".yaml", ""}


def test_the_distribution_has_its_version_and_data(installed: Installed) -> None:
    assert installed("gpujobs --version") == f"gpujobs, version {__version__}\n"
    assert "delta" in installed("gpujobs sites list")
    where = installed("python -c 'import gpujobs; print(gpujobs.__file__)'")
    assert where.startswith(str(installed.bin.parent))  # not the checkout


def test_the_extras_of_the_readme_exist(installed: Installed) -> None:
    code = "import importlib.metadata as m; print(*m.metadata('gpujobs').get_all('Provides-Extra'))"
    extras = set(installed(f'python -c "{code}"').split())
    wanted = {
        name for names in re.findall(r"gpujobs\[([\w,]+)\]", README) for name in names.split(",")
    }
    assert {"cuda12", "mpi"} <= wanted <= extras
    assert "cuda13" in extras


def test_the_commands_of_the_readme_run(installed: Installed) -> None:
    cluster = ""
    for line, wanted in SHOWN.items():
        words = line.replace("NAME", "local").replace("svd-7f3a", cluster).replace("ID", cluster)
        words = words.replace("gpujobs render", "gpujobs render svd.yaml --site delta")
        printed = installed(words)
        assert re.search(wanted, printed), f"{line}: {printed}"
        if line == SUBMIT:
            cluster = printed.strip()
    loaded = installed("bash -c 'eval \"$(gpujobs completion bash)\"; complete -p gpujobs'")
    assert loaded.rstrip().endswith(" gpujobs")


def test_a_cluster_that_stays_is_connected_to_and_cancelled(installed: Installed) -> None:
    (installed.work / "stay.yaml").write_text("gpus: auto\nworkers: {count: 1}\n")
    cluster = installed("gpujobs submit stay.yaml --site local --wait").strip()
    assert cluster in installed(f"gpujobs connect {cluster}")
    installed(f"gpujobs cancel {cluster}")
    assert "CANCELLED" in installed(f"gpujobs status {cluster}")
    until(lambda: not processes_with(cluster), 30)


def test_make_demo_runs_in_the_sdist(distributions: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(distributions["sdist"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (checkout,) = tmp_path.glob("gpujobs-*")
    env = {**os.environ, "HOME": str(tmp_path)}
    make = ["make", "demo", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}"]
    done = run(make, env=env, cwd=checkout, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "they agree with the eigenvalues" in done.stderr
    cluster = done.stdout.splitlines()[-1]
    until(lambda: not processes_with(cluster), 20)
