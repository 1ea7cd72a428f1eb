"""`gpujobs --host` where something is unusual: the account on the login node, the network, or other users of it."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..conftest import fresh_folder, make_cli, nothing_left, slow_variant, unavailable
from ..support.backend import SlurmBackend
from ..support.cli import ORDINARY_USER, Cli
from ..support.sshd import BANNER, LoginNode, missing

pytestmark = [pytest.mark.slurm]
Boot = Callable[..., LoginNode]


@pytest.fixture
def boot(slurm_backend: SlurmBackend, shared_folder: Path) -> Iterator[Boot]:
    """Boots a login node without gpujobs, for a user with an own home, whose path has spaces."""
    if why := missing():
        unavailable("ssh", why)
    with contextlib.ExitStack() as nodes:

        def start(shell: str = "/bin/bash", user: str = ORDINARY_USER) -> LoginNode:
            home = Path(tempfile.mkdtemp(prefix="home of a user-", dir=shared_folder))
            there = make_cli(slurm_backend, home, "root" if user == "root" else "ordinary")
            env = {k: v for k, v in there.env.items() if k.startswith(("GPUJOBS", "SLURM"))}
            path = there.env["PATH"].split(":")
            usual = ":".join(part for part in path if not (Path(part) / "gpujobs").exists())
            env |= {"PATH": f"{home}/bin:{usual}"}
            (home / "bin").mkdir()
            folder, laptop = (
                fresh_folder(shared_folder, "sshd"),
                fresh_folder(shared_folder, "laptop"),
            )
            made = LoginNode(folder, home, laptop, env, user, shell)
            made.python = there.python
            nodes.enter_context(made.running())
            nodes.callback(made.disconnect)
            return made

        yield start
    nothing_left(slurm_backend)


def laptop_of(node: LoginNode) -> Cli:
    """Return the command line of a computer without a batch scheduler, as another user."""
    path = f"{node.laptop}/bin:/usr/bin:/bin"
    return Cli(node.laptop, {"PATH": path, "GPUJOBS_HOST": "login"}, None)


def profile_of(node: LoginNode, **keys: object) -> dict[str, Any]:
    return {"gpus": 1, "environment": {"python": node.python}, **keys}


def configure(node: LoginNode, text: str) -> None:
    """Add lines to the laptop's configuration of ssh."""
    with (node.laptop / "ssh_config").open("a") as file:
        file.write(f"{text}\n")


def program(node: LoginNode, name: str, text: str) -> None:
    """Write a program that is the first one with this name on the login node's PATH."""
    path = node.home / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def clusters(laptop: Cli) -> list[dict[str, Any]]:
    """Return all clusters on the login node."""
    done = laptop("status", "--all", "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["clusters"]
    return found


SHELLS = ["/bin/bash", "/bin/dash", "/bin/tcsh", "/usr/bin/fish", "/bin/zsh"]


# -- the account on the login node -----------------------------------------------------------------
@pytest.mark.parametrize(
    "shell", ["/bin/tcsh", *map(slow_variant, SHELLS[:2]), *map(slow_variant, SHELLS[3:])]
)
def test_another_account(boot: Boot, shell: str) -> None:
    """Another user than on the laptop, with a home with spaces, a banner, and modules of the user in the home."""
    if not Path(shell).exists():
        pytest.skip(f"{shell} is not installed")
    node = boot(shell)
    laptop = laptop_of(node)
    for module in ("json", "random", "click"):
        (node.home / f"{module}.py").write_text("raise SystemExit('the module of the user')")
    laptop.write("own.py", "import getpass, os; print(getpass.getuser(), os.getcwd())")
    profile = profile_of(node, run=["python", "own.py"])
    cluster = laptop.submit(profile, "--wait", "--upload", "own.py")
    user, where = laptop("logs", cluster).stdout.strip().split(" ", 1)
    assert user == ORDINARY_USER and where.startswith(f"{node.home}/"), (user, where)
    assert laptop.status(cluster)["state"] == "DONE"
    assert BANNER not in laptop("status").stdout
