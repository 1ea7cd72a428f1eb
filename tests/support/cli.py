"""Run the installed ``gpujobs`` as a process, as root or as an ordinary user, with a home of its own."""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .processes import as_user, ids_of, patience, run

ROOT = Path(__file__).parents[2]
NVML = ROOT / "tests" / "fakes" / "nvml"
STUB = ROOT / "tests" / "fakes" / "dask"
ORDINARY_USER = os.environ.get("GPUJOBS_ORDINARY_USER", "nobody")
"""Slurm from 25.11 on refuses the name `nobody`."""


_FORKS = """
import atexit, gc, importlib, json, os, pkgutil, runpy, signal, socket, sys, threading
import cryptography.hazmat.primitives.asymmetric.ec, cryptography.x509, psutil, pynvml
import gpujobs.batch, gpujobs.cli, gpujobs.clusters, gpujobs.doctor, gpujobs.schedulers

for room in (gpujobs.batch, gpujobs.cli, gpujobs.clusters, gpujobs.doctor, gpujobs.schedulers):
    for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
        importlib.import_module(module.name)

gc.collect()
gc.freeze()  # a collection in a fork would copy all this memory, and so would the end of its interpreter
server = socket.socket(fileno=0)
while True:
    line, files, _, _ = socket.recv_fds(server, 2**20, 3)
    if not line:
        break
    wanted = json.loads(line)
    child = os.fork()
    if not child:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        signal.alarm(wanted["seconds"])
        os.umask(wanted["umask"])
        if wanted["ids"]:
            os.setgroups([])
            os.setgid(wanted["ids"][1])
            os.setuid(wanted["ids"][0])
        os.environ.clear()
        os.environ.update(wanted["env"])
        os.chdir(wanted["cwd"])
        sys.argv = wanted["argv"]
        sys.path[0] = os.path.dirname(sys.argv[0])
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if not isinstance(end.code, int | None):
                raise
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code or 0)
        sys.exit()
    for file in files:
        os.close(file)
    server.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
"""
"""Runs commands in forks of one process, which has imported gpujobs: that is most of the CPU time of a command."""
_NEEDS = "import gpujobs.cli, importlib.util as u; assert u.find_spec('distributed')"
_turn = threading.Lock()
QUIET_DASK = ROOT / "tests" / "support" / "quiet"
"""Folder of dask's configuration for the tests."""
_QUIET_FILE = "quiet.yaml"
_AT_START = ("PYTHON", "LC_", "LD_", "TZ")
"""Variables that only the start of a process reads begin so."""


def text_of(value: Any) -> str:
    """Return a profile or site file: text as it is, a mapping as YAML (JSON is YAML)."""
    return value if isinstance(value, str) else json.dumps(value, indent=1)


def write_quiet_dask(home: Path) -> None:
    """Write a user's configuration of dask, which jobs and programs read."""
    folder = home / ".config" / "dask"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(QUIET_DASK / _QUIET_FILE, folder)


def with_stub(site: dict[str, Any]) -> dict[str, Any]:
    """Return a site whose jobs import the stub of dask instead of dask."""
    return site | {"setup": site["setup"].replace("PYTHONPATH=", f"PYTHONPATH={STUB}:")}


def without_dashboard(site: dict[str, Any]) -> dict[str, Any]:
    """Return a site whose profiles have no dashboard, for which a dask scheduler in an MPI rank imports Bokeh."""
    return site | {"defaults": {**site["defaults"], "network": {"dashboard": "off"}}}


def ask_often(cli: Cli) -> Cli:
    """Let the jobs of the site `here` ask about each other every 5 s, not once a minute."""
    cli.site["setup"] = f"{cli.site.get('setup', '')}\nexport GPUJOBS_QUERY_SECONDS=5\n"
    (cli.home / "sites" / "here.yaml").write_text(text_of(cli.site))
    return cli


def run_gpujobs(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path, python: str = sys.executable,
    user: str | None = None, timeout: float = 180, stdin: str = "",
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run ``gpujobs ARGUMENTS`` to its end; in a fork, unless a variable is for the start of an interpreter."""
    argv = [str(Path(python).parent / "gpujobs"), *arguments]
    if env["LANG"] != "C.UTF-8" or any(map(_is_for_start, env)):
        return run(argv, env=env, user=user, timeout=timeout, cwd=cwd, stdin=stdin)
    request = {
        "argv": argv, "env": dict(env), "cwd": str(cwd), "ids": ids_of(user), "umask": _umask(),
        "seconds": math.ceil(patience(timeout)),
    }  # fmt: skip
    return _run_in_fork(python, request, stdin)


class Cli:
    """The command line of one user. ``home`` is new and empty."""

    def __init__(self, home: Path, env: dict[str, str], user: str | None = None) -> None:
        self.home, self.user = home, user
        self.site: dict[str, Any] = {}
        """The site `here`, with the stub of dask if the test has it."""
        self.python = python_for(user)
        own = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        self.env = {**own, "USER": user or "root", "LOGNAME": user or "root", **env}
        self.work = home / "work"
        if not (home / ".config").exists():
            write_quiet_dask(home)
        for folder in (home, home / ".config", home / ".config" / "dask", self.work):
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
        return run_gpujobs(
            arguments, env=everything, cwd=self.work, python=self.python, user=self.user, timeout=timeout, stdin=stdin
        )  # fmt: skip

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Start ``gpujobs ARGUMENTS``."""
        return subprocess.Popen(
            [self.command, *arguments], env={**self.env, **env}, cwd=self.work, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **as_user(self.user),
        )  # fmt: skip

    def start_submit(self, profile: Any) -> tuple[subprocess.Popen[str], str]:
        """Start ``gpujobs submit --wait``; return it and the cluster's id."""
        waiting = self.start("submit", str(self.write("p.yaml", profile)), "--wait")
        assert waiting.stdout
        return waiting, waiting.stdout.readline().strip()

    def look_at_memory_often(self) -> None:
        """Let dask look at the memory of workers as often as it does without `QUIET_DASK`."""
        (self.home / ".config" / "dask" / _QUIET_FILE).unlink()

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
        done = self("status", cluster, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)["clusters"][0]
        return found

    def gpus(self, cluster: str) -> dict[str, Any]:
        """Return the GPU of each connected worker of a cluster, by the worker's name."""
        jobs = self.status(cluster)["jobs"]
        return {gpu["worker"]: gpu for job in jobs for gpu in job["gpus"]}

    def start_python(self, code: str) -> subprocess.Popen[str]:
        """Start Python code of this user, with pipes."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [self.python, "-c", code], env=self.env, cwd=self.work, text=True, stdin=pipe, stdout=pipe, stderr=pipe
        )  # fmt: skip

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


def _is_for_start(variable: str) -> bool:
    return variable.startswith(_AT_START)


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def _run_in_fork(
    python: str, request: dict[str, Any], stdin: str
) -> subprocess.CompletedProcess[str]:
    given, to_child = os.pipe()
    pipes = [os.pipe(), os.pipe()]
    os.write(to_child, stdin.encode())  # as much as a pipe takes
    os.close(to_child)
    with _turn, ThreadPoolExecutor(len(pipes)) as readers:
        outputs = [readers.submit(_read, end) for end, _ in pipes]
        theirs = [given, *(end for _, end in pipes)]
        try:
            server = _server(python)
            socket.send_fds(server, [json.dumps(request).encode()], theirs)
        finally:
            for end in theirs:
                os.close(end)
        try:
            code = int(server.recv(16))
        except BaseException:  # the time limit of pytest
            _server.cache_clear()  # the next command must not get the answer of this one
            raise
        if code == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(request["argv"], request["seconds"])
        out, err = (output.result() for output in outputs)
    return subprocess.CompletedProcess(request["argv"], code, out, err)


def _read(end: int) -> str:
    """Return what is written until every process has closed it, also those that a command leaves behind."""
    with open(end, encoding="utf-8") as file:
        return file.read()


@functools.cache
def _server(python: str) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # The streams of the forks are made here, of pipes: Python treats those of a file in another way.
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([python, "-c", _FORKS], stdin=theirs, **pipes)

    def stop() -> None:
        ours.close()
        process.communicate()

    atexit.register(stop)
    return ours


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
            [python, "-c", _NEEDS],
            env={"PATH": os.environ["PATH"]},
            user=user,
            cwd=Path("/"),
        )
    except OSError:
        return False
    return done.returncode == 0
