"""Run the installed ``gpujobs`` as a process, as root or as an ordinary user, with a home of its own."""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import Any

from .processes import as_user, ids_of, patience, run

ROOT = Path(__file__).parents[2]
NVML = ROOT / "tests" / "fakes" / "nvml"
STUB = ROOT / "tests" / "fakes" / "dask"
ORDINARY_USER = os.environ.get("GPUJOBS_ORDINARY_USER", "nobody")
"""Slurm from 25.11 on refuses the name `nobody`."""


_FORKS = """
import json, os, signal, sys
import gpujobs.cli.status, gpujobs.clusters.monitor, gpujobs.config.sitefiles, gpujobs.schedulers.slurm
from gpujobs.cli.main import main

for line in sys.stdin:
    wanted = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(wanted["seconds"])
        for number, name in enumerate((os.devnull, wanted["out"], wanted["err"])):
            os.dup2(os.open(name, os.O_RDWR), number)
        if wanted["ids"]:
            os.setgroups([])
            os.setgid(wanted["ids"][1])
            os.setuid(wanted["ids"][0])
        os.environ.clear()
        os.environ.update(wanted["env"])
        os.chdir(wanted["cwd"])
        sys.argv = ["gpujobs", *wanted["argv"]]
        sys.exit(main())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs commands in forks of one process, which has imported gpujobs: that is most of the CPU time of one."""
_turn = threading.Lock()
_AT_START = ("PYTHON", "LC_", "LD_", "TZ")
"""Variables that only the start of a process reads begin so."""


def text_of(value: Any) -> str:
    """Return a profile or site file: text as it is, a mapping as YAML (JSON is YAML)."""
    return value if isinstance(value, str) else json.dumps(value, indent=1)


def with_stub(site: dict[str, Any]) -> dict[str, Any]:
    """Return a site whose jobs import the stub of dask instead of dask."""
    return site | {"setup": site["setup"].replace("PYTHONPATH=", f"PYTHONPATH={STUB}:")}


class Cli:
    """The command line of one user. ``home`` is new and empty."""

    def __init__(self, home: Path, env: dict[str, str], user: str | None = None) -> None:
        self.home, self.user = home, user
        self.python = python_for(user)
        own = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        self.env = {**own, "USER": user or "root", "LOGNAME": user or "root", **env}
        self.work = home / "work"
        for folder in (home, self.work):
            folder.mkdir(parents=True, exist_ok=True)
            if user and os.geteuid() == 0:
                shutil.chown(folder, user)

    @property
    def command(self) -> str:
        """The installed command."""
        return str(Path(self.python).parent / "gpujobs")

    def __call__(
        self, *arguments: str, timeout: float = 180, stdin: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``gpujobs ARGUMENTS`` to its end."""
        everything = {**self.env, **env}
        return run(
            [self.command, *arguments],
            env=everything,
            user=self.user,
            timeout=timeout,
            cwd=self.work,
            stdin=stdin,
        )

    def look(self, *arguments: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """Run ``gpujobs ARGUMENTS``, which only reads, to its end; without the start of a new interpreter."""
        if self.env["LANG"] != "C.UTF-8" or any(name.startswith(_AT_START) for name in self.env):
            return self(*arguments, timeout=timeout)
        server = _server(self.python)
        assert server.stdin and server.stdout
        limit = math.ceil(patience(timeout))
        with (
            _turn,
            tempfile.NamedTemporaryFile("r") as out,
            tempfile.NamedTemporaryFile("r") as err,
        ):
            request = {
                "argv": arguments, "env": self.env, "cwd": str(self.work), "ids": ids_of(self.user),
                "out": out.name, "err": err.name, "seconds": limit,
            }  # fmt: skip
            server.stdin.write(f"{json.dumps(request)}\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
            if code == -signal.SIGALRM:
                raise subprocess.TimeoutExpired(arguments, limit)
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Start ``gpujobs ARGUMENTS``."""
        return subprocess.Popen(
            [self.command, *arguments], env={**self.env, **env}, cwd=self.work, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **as_user(self.user),
        )  # fmt: skip

    def write(self, name: str, value: Any) -> Path:
        """Write a file into the working folder."""
        path = self.work / name
        path.write_text(text_of(value))
        path.chmod(0o644)
        return path

    def submit(self, profile: Any, *arguments: str, name: str = "p.yaml") -> str:
        """Submit a profile; return the cluster's id."""
        done = self("submit", str(self.write(name, profile)), *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def status(self, cluster: str) -> dict[str, Any]:
        """Return ``gpujobs status ID --json`` of one cluster."""
        done = self.look("status", cluster, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)["clusters"][0]
        return found

    def gpus(self, cluster: str) -> dict[str, Any]:
        """Return the GPU of each connected worker of a cluster, by the worker's name."""
        jobs = self.status(cluster)["jobs"]
        return {gpu["worker"]: gpu for job in jobs for gpu in job["gpus"]}

    def python_run(
        self, code: str, *arguments: str, timeout: float = 180
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code as this user."""
        return run(
            [self.python, "-c", code, *arguments],
            env=self.env,
            user=self.user,
            timeout=timeout,
            cwd=self.work,
        )


@functools.cache
def _server(python: str) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [python, "-c", _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)
    return server


@functools.cache
def python_for(user: str | None) -> str:
    """Return a python with gpujobs installed that ``user`` can run; LookupError if there is none.

    The interpreter of a developer's environment may lie in a folder that only its owner can enter. Then another one of
    the same version borrows its packages.
    """
    if user is None or _works(sys.executable, user):
        return sys.executable
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for base in (f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        if not Path(base).exists():
            continue
        folder = Path(f"/tmp/gpujobs-tests-{os.getpid()}-python")
        shutil.rmtree(folder, ignore_errors=True)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
        packages = next(folder.glob("lib/*/site-packages"))
        (packages / "borrowed.pth").write_text(f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n")
        command = folder / "bin" / "gpujobs"
        command.write_text(
            f"#!{folder}/bin/python\nimport sys\nfrom gpujobs.cli.main import main\nsys.exit(main())\n"
        )
        command.chmod(0o755)
        if _works(str(folder / "bin" / "python"), user):
            return str(folder / "bin" / "python")
    raise LookupError(f"user {user} cannot run a python {version} with gpujobs")


def _works(python: str, user: str) -> bool:
    try:
        done = run(
            [python, "-c", "import gpujobs.cli, distributed"],
            env={"PATH": os.environ["PATH"]},
            user=user,
            cwd=Path("/"),
        )
    except OSError:
        return False
    return done.returncode == 0
