"""The environment of docs/environments.md that uv makes, with the lines of the page. It runs a cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import unavailable
from ..support import environments
from ..support.cli import ROOT
from ..support.processes import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = {
    "cert": "SSL_CERT_FILE",
    "constraint": "UV_CONSTRAINT",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_INDEX_URL",
}
"""Settings of pip, and the variables of uv for them; uv does not read those of pip."""
PROGRAM = "import sys; from distributed import Client; print(sys.prefix, Client().submit(sum, [1, 2]).result())"


def settings_of_pip() -> dict[str, str]:
    """Return the package indexes of pip, as variables of uv."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    found = re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", listed.stdout, re.M)
    named = {SETTINGS[key]: value for key, value in found if key in SETTINGS}
    return named | {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # all indexes are equal, as for pip


@pytest.fixture
def env(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A user with uv, whose package index has gpujobs."""
    folder, home = tmp_path / "uv", tmp_path / "home"
    home.mkdir()
    if not shutil.which("uv"):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        done = subprocess.run([folder / "bin" / "pip", "install", "-q", "uv"], check=False)
        if done.returncode:
            unavailable("uv", "pip cannot install it")
    dist = environments.distributions(tmp_path_factory)["wheel"].parent
    settings = settings_of_pip()
    links = [*settings.get("UV_FIND_LINKS", "").split(), str(dist)]
    own = {"HOME": str(home), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    own |= {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_PYTHON_DOWNLOADS": "never"}
    return settings | own | {"UV_FIND_LINKS": ",".join(links)}


def test_an_environment_of_uv_runs_the_program_of_the_page(env: dict[str, str]) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    block = re.search(r"```console\n((?:\$ .*\n)*\$ uv .*\n(?:\$ .*\n)*)```", page)
    assert block
    lines = [line.removeprefix("$ ") for line in block[1].splitlines()]
    (version,) = re.findall(r"--python (3\.\d+)", block[1])
    if run(["uv", "python", "find", "--system", version], env=env).returncode:
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        lines = [line.replace(f"--python {version}", f"--python {here}") for line in lines]
    program = Path(env["HOME"], "program.py")
    program.write_text(PROGRAM)
    checks = [
        "python -c 'import cupy, dask, dask_cuda, distributed, gpujobs'",
        "gpujobs doctor --site local",
        "printf 'gpus: 0\\nworkers: {memory: 1GiB}\\nrun: [python, program.py]\\n' > sum.yaml",
        "gpujobs submit sum.yaml --site local --wait",
    ]
    session = "\n".join(["set -e", *lines, *checks])
    done = run(["bash", "-c", session], env=env, timeout=400, cwd=Path(env["HOME"]))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{env['HOME']}/gpu 3" in (done.stdout + done.stderr).splitlines()
