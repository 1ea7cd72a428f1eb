"""`gpujobs --host` where something is unusual: the account on the login node, the network, or other users of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpujobs.clusters import remote

from ..conftest import fresh_folder, make_cli, nothing_left, slow_variant, unavailable
from ..support.backend import SlurmBackend
from ..support.cli import ORDINARY_USER, Cli
from ..support.listeners import listeners_of
from ..support.processes import as_user, patience, processes_with, until
from ..support.sshd import BANNER, LoginNode, missing
from .test_terminal import terminal
from .test_two_users import CONNECT, OTHER, listening_ports

pytestmark = [pytest.mark.slurm]
Boot = Callable[..., LoginNode]


@pytest.fixture
def boot(
    slurm_backend: SlurmBackend, shared_folder: Path, request: pytest.FixtureRequest
) -> Iterator[Boot]:
    """Boots a login node without gpujobs, for a user with an own home, whose path has spaces."""
    stub = request.node.get_closest_marker("stub") is not None
    if why := missing():
        unavailable("ssh", why)
    with contextlib.ExitStack() as nodes:

        def start(shell: str = "/bin/bash", user: str = ORDINARY_USER) -> LoginNode:
            home = Path(tempfile.mkdtemp(prefix="home of a user-", dir=shared_folder))
            kind = "root" if user == "root" else "ordinary"
            there = make_cli(slurm_backend, home, kind, stub=stub)
            env = {k: v for k, v in there.env.items() if k.startswith(("GPUJOBS", "SLURM"))}
            path = there.env["PATH"].split(":")
            usual = ":".join(part for part in path if not (Path(part) / "gpujobs").exists())
            env |= {"PATH": f"{home}/bin:{usual}"}
            (home / "bin").mkdir()
            home.chmod(0o755)
            folder, laptop = (
                fresh_folder(shared_folder, "sshd"),
                fresh_folder(shared_folder, "laptop"),
            )
            made = LoginNode(folder, home, laptop, env, user, shell)
            made.python = there.python
            nodes.enter_context(made.running())
            nodes.callback(until, lambda: not made.processes(), 20, lambda: str(made.processes()))
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
@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_another_account_runs_a_program(boot: Boot, shell: str) -> None:
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


# -- the network -----------------------------------------------------------------------------------
ALIVE = "ServerAliveInterval 1\nServerAliveCountMax 2\nConnectTimeout 3"
"""Of the user's configuration: it counts before the values of gpujobs."""
WAITS = '#!/bin/sh\n{before}\n"{real}" "$@" > "{home}/answer"\ncode=$?\n{after}\ncat "{home}/answer"\nexit $code\n'
"""An sbatch that waits before or after the submission, as on a slow batch scheduler."""


def wait_at(node: LoginNode, phase: str) -> Path:
    """Let sbatch wait in a phase, 'before' or 'after'; return the file that says that it does."""
    reached = node.home / "reached"
    real = shutil.which("sbatch", path=node.env["PATH"].partition(":")[2])
    line = f'touch "{reached}"; sleep 5'
    text = {"before": "", "after": "", phase: line}
    program(node, "sbatch", WAITS.format(real=real, home=node.home, **text))
    return reached


def one_or_none(laptop: Cli, backend: SlurmBackend) -> int:
    """Check that each job in the queue is one of a cluster that is known; return the number of clusters."""
    found = [one for one in clusters(laptop) if one["state"] != "CANCELLED"]
    names = sorted(one["id"] for one in found for _ in one["jobs"])
    until(lambda: sorted(line.split()[-1] for line in backend.queue()) == names, 60, backend.queue)
    assert len(found) <= 1, found
    return len(found)


@pytest.mark.stub
@pytest.mark.parametrize("phase", ["after", slow_variant("before")])
def test_a_silent_sshd_ends_commands_with_a_message(
    boot: Boot, slurm_backend: SlurmBackend, phase: str
) -> None:
    """Commands end with a message; a submission continues, and is not made twice."""
    node = boot()
    configure(node, ALIVE)
    laptop = laptop_of(node)
    reached = wait_at(node, phase)
    started = laptop.start("submit", str(laptop.write("p.yaml", profile_of(node))))
    until(reached.exists, 60, "sbatch")
    with node.frozen():
        _, messages = started.communicate(timeout=patience(60))
        assert started.returncode == 3, messages
        assert "ended before the command: Timeout, server 127.0.0.1 not responding" in messages
        assert "gpujobs --host login status" in messages
        done = laptop("status", timeout=patience(60))
        assert done.returncode == 3 and "ssh login failed: Connection timed out" in done.stderr, (
            done
        )
    one_or_none(laptop, slurm_backend)
    assert laptop("cancel", "--all").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["ssh", "sshd"])
@pytest.mark.parametrize("phase", ["before", "after"])
def test_a_pause_of_ssh_makes_one_cluster(
    boot: Boot, slurm_backend: SlurmBackend, stopped: str, phase: str
) -> None:
    """SIGSTOP while sbatch runs, and SIGCONT after it: there are exactly the jobs of one cluster."""
    node = boot()
    laptop = laptop_of(node)
    reached = wait_at(node, phase)
    profile = profile_of(node, gpus=2, gpus_per_job=1)
    started = laptop.start("submit", str(laptop.write("p.yaml", profile)))
    until(reached.exists, 60, "sbatch")
    with node.frozen(stopped):
        time.sleep(8)
        assert started.poll() is None
    _, messages = started.communicate(timeout=patience(60))
    assert started.returncode == 0, messages
    assert one_or_none(laptop, slurm_backend) == 1 and len(slurm_backend.queue()) == 2
    assert laptop("cancel", "--all").returncode == 0


def test_ssh_gives_up_within_a_minute(boot: Boot) -> None:
    """ssh gives up within a minute; values of the user remain."""
    node = boot()
    ssh = str(node.laptop / "bin" / "ssh")
    code = (
        "import sys; from pathlib import Path; from gpujobs.batch.ssh import Host\n"
        "print('\\n'.join(Host('login', Path(sys.argv[1])).argv('-G')[1:]))"
    )

    def effective() -> dict[str, str]:
        words = laptop_of(node).python_run(code, str(node.laptop)).stdout.splitlines()
        shown = subprocess.run([ssh, *words], capture_output=True, text=True, check=True).stdout
        return dict(line.split(" ", 1) for line in shown.splitlines() if " " in line)

    found = effective()
    assert int(found["serveraliveinterval"]) * int(found["serveralivecountmax"]) == 45
    assert found["connecttimeout"] == "30" and found["controlmaster"] == "auto"
    configure(node, ALIVE)
    assert effective()["connecttimeout"] == "3"


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["after", "before"])
def test_a_killed_ssh_during_sbatch_leaves_what_can_be_cancelled(
    boot: Boot, slurm_backend: SlurmBackend, phase: str
) -> None:
    node = boot()
    laptop = laptop_of(node)
    reached = wait_at(node, phase)
    started = laptop.start("submit", str(laptop.write("p.yaml", profile_of(node))))
    until(reached.exists, 60, "sbatch")
    for child in psutil.Process(started.pid).children(recursive=True):
        child.kill()
    _, messages = started.communicate(timeout=patience(60))
    assert started.returncode == 3 and "the connection to login ended" in messages, messages
    one_or_none(laptop, slurm_backend)
    assert laptop("cancel", "--all").returncode == 0


CUT = """
import os, socket, sys, threading
there = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def back():
    while data := there.recv(1 << 16):
        os.write(1, data)
threading.Thread(target=back, daemon=True).start()
rest = int(sys.argv[2])
while rest > 0 and (data := os.read(0, min(rest, 1 << 12))):
    there.sendall(data)
    rest -= len(data)
"""


@pytest.mark.stub
@pytest.mark.parametrize("sent", [2_000, *map(slow_variant, (0, 20, 6_000, 20_000, 400_000))])
def test_a_cut_network_needs_no_repair(boot: Boot, slurm_backend: SlurmBackend, sent: int) -> None:
    """After some bytes: of the handshake, of the package, or of the request. Then all works, without repair."""
    node = boot()
    laptop = laptop_of(node)
    config = node.laptop / "ssh_config"
    whole = config.read_text()
    cut = laptop.write("cut.py", CUT)
    configure(node, f"ProxyCommand {sys.executable} {cut} {node.port} {sent}")
    profile = str(laptop.write("p.yaml", profile_of(node)))
    done = laptop("submit", profile)
    assert done.returncode == 3, done
    reason = done.stderr.rpartition("error: ")[2]
    before = sent < 2_001  # the other side may close a connection without a message of ssh
    words = ("kex_exchange_identification", "Connection", "ssh_dispatch_run_fatal")
    starts = [f"ssh login failed: {word}" for word in words if before]
    assert reason.startswith(tuple(starts or ["the connection to login ended"])), done.stderr
    config.write_text(whole)
    assert clusters(laptop) == [] and slurm_backend.queue() == []
    assert laptop("submit", profile).returncode == 0
    assert one_or_none(laptop, slurm_backend) == 1
    assert laptop("cancel", "--all").returncode == 0


@pytest.mark.slow
def test_a_jump_host_is_connected_once(boot: Boot) -> None:
    """ProxyJump of the user's configuration, with one connection for two commands.

    If the jump host refuses, ssh has only its own words for that: those of the inner ssh are lost with ControlPersist.
    """
    node = boot()
    config = node.laptop / "ssh_config"
    whole = config.read_text()
    config.write_text(f"Host login\nProxyJump jump\n{whole}{whole.replace('login', 'jump')}")
    laptop = laptop_of(node)
    for _ in range(2):
        assert clusters(laptop) == []
    assert (node.folder / "log").read_text().count("Accepted publickey") == 2
    node.disconnect()
    configure(node, "Host jump\nHostName 127.0.0.1\n")
    config.write_text(f"Host jump\nPort 1\n{config.read_text()}")
    done = laptop("status")
    assert done.returncode == 3 and "Connection closed by UNKNOWN port 65535" in done.stderr, done


CODE = "123456"


@pytest.mark.slow
def test_a_second_factor_is_asked_for_once(boot: Boot) -> None:
    """It is asked for once at a terminal; the next commands use the connection, also without a terminal."""
    node = boot(user="root")
    asked = node.folder / "asked"
    check = node.folder / "check"
    check.write_text(f"#!/bin/sh\necho 1 >> {asked}\ntest \"$(tr -d '\\000')\" = {CODE}\n")
    check.chmod(0o755)
    lines = [
        f"auth required pam_exec.so quiet expose_authtok {check}",
        "auth required pam_permit.so",  # for pam_setcred, which pam_exec ignores
        "account required pam_permit.so",
    ]
    (node.folder / "pam").write_text("\n".join([*lines, "session required pam_permit.so\n"]))
    config = node.folder / "sshd_config"
    methods = (
        "PermitRootLogin yes\nUsePAM yes\nAuthenticationMethods publickey,keyboard-interactive"
    )
    config.write_text(config.read_text().replace("UsePAM no", methods))
    node.stop()
    (node.folder / "log").unlink()
    node.start()
    laptop = laptop_of(node)
    done = laptop("status")
    assert done.returncode == 3 and "Permission denied (keyboard-interactive)" in done.stderr, done
    assert not asked.exists()
    with terminal(laptop, "status", columns=200) as window:
        window.until("Password: ")
        os.write(window.master, f"{CODE}\n".encode())
        assert window.end() == 0, window.screen
        assert CODE not in window.screen
    with terminal(laptop, "status", columns=200) as window:
        assert window.end() == 0 and "Password" not in window.screen, window.screen
    assert clusters(laptop) == [] and asked.read_text() == "1\n"


# -- what is sent ----------------------------------------------------------------------------------
OLD = "#!/bin/sh\nexit 2\n"


def test_an_old_python_is_passed_over(boot: Boot) -> None:
    """The first Python of PATH that is new enough; without one, a message names the variable."""
    node = boot()
    laptop = laptop_of(node)
    program(node, "python3", OLD)
    others = [f"python3.{minor}" for minor in range(11, 15)]
    assert clusters(laptop) == []
    for name in others:
        program(node, name, OLD)
    done = laptop("status")
    assert (
        done.returncode == 3 and "login has neither gpujobs nor Python 3.11 or newer" in done.stderr
    ), done
    assert "GPUJOBS_REMOTE=" in done.stderr
    assert laptop("status", GPUJOBS_REMOTE=node.python).returncode == 0


def test_the_package_is_for_any_machine() -> None:
    """Another architecture and another Python than those of the laptop: there are no compiled modules."""
    with zipfile.ZipFile(BytesIO(remote.package())) as archive:
        names = archive.namelist()
        assert {Path(name).suffix for name in names} == {".py", ".j2", ".yaml"}
        assert not any(archive.read(name).startswith(b"\x7fELF") for name in names)


def test_uploads_over_the_limit_are_refused(boot: Boot, slurm_backend: SlurmBackend) -> None:
    """The size is shown before; more than the limit is refused without a connection."""
    node = boot()
    laptop = laptop_of(node)
    profile = str(laptop.write("p.yaml", profile_of(node)))
    large = laptop.work / "large"
    with large.open("wb") as file:
        file.truncate(101 << 20)
    (node.laptop / "known").rename(node.laptop / "unknown")
    done = laptop("submit", profile, "--upload", "large")
    assert done.returncode == 2 and "1 file, 101MiB are more than 100MiB" in done.stderr, done
    for folder in ("a", "b"):
        (laptop.work / folder).mkdir()
        (laptop.work / folder / "x.py").write_text(folder)
    done = laptop("submit", profile, "--upload", "a", "--upload", "b")
    assert done.returncode == 2 and "x.py twice" in done.stderr, done
    done = laptop("submit", profile, "--upload", "a")
    lines = done.stderr.splitlines()
    assert done.returncode == 3 and lines[0] == "uploads 1 file, 1B", done
    assert slurm_backend.queue() == []


# -- other users of the login node -----------------------------------------------------------------
SECRET = "a-secret-word"
WATCH = """
import sys, threading, time
from pathlib import Path
end = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
seen = set()
while not end.is_set():
    for path in (*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")):
        try:
            seen.add(path.read_bytes())
        except OSError:
            pass
    time.sleep(0.02)
sys.stdout.buffer.write(b"\\n".join(seen))
"""
READ = """
import os, sys
for folder, _, names in os.walk(sys.argv[1]):
    for path in (folder, *(os.path.join(folder, name) for name in names)):
        if os.access(path, os.R_OK):
            print(path)
"""


@contextlib.contextmanager
def seen_by(user: str) -> Iterator[list[str]]:
    """Yield a list that has, after the block, all that another user has seen of processes."""
    pipe = subprocess.PIPE
    words = ["/usr/bin/python3", "-c", WATCH]
    watch = subprocess.Popen(words, stdin=pipe, stdout=pipe, cwd="/", **as_user(user))
    seen: list[str] = []
    try:
        yield seen
    finally:
        out, _ = watch.communicate(timeout=patience(60))
        seen.append(out.decode(errors="replace"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_other_users_of_the_login_node_see_nothing(boot: Boot, slurm_backend: SlurmBackend) -> None:
    """They see nothing of a submission and of a tunnel: in the list of processes, in files, and at ports."""
    node = boot()
    configure(node, (node.laptop / "ssh_config").read_text().replace("Host login", "Host * !login"))
    laptop = laptop_of(node)
    laptop.write(
        "own.py", f"import os, time; assert os.environ['TOKEN'] == '{SECRET}'; time.sleep(1000)"
    )
    network = {"dashboard": "local"}
    profile = profile_of(node, env={"TOKEN": SECRET}, run=["python", "own.py"], network=network)
    before = {path for path in node.home.rglob("*")}
    with seen_by(OTHER) as seen:
        cluster = laptop.submit(profile, "--upload", "own.py")
        until(lambda: laptop.status(cluster)["state"] == "RUNNING", 60)
        tunnel = laptop.start("connect", cluster)
        try:
            assert tunnel.stdout
            line = next(text for text in tunnel.stdout if text.startswith("# dashboard: "))
            url = line.split()[-1]
            until(lambda: is_served(url), 60, url)
            ours = [
                one
                for found in listeners_of(processes_with(str(node.laptop))).values()
                for one in found
            ]
            assert len(ours) >= 2 and all(one.loopback_only for one in ours), ours
            assert node.daemon
            daemons = [
                node.daemon.pid,
                *(one.pid for one in psutil.Process(node.daemon.pid).children(recursive=True)),
            ]
            theirs = [one for found in listeners_of(daemons).values() for one in found]
            assert [one.port for one in theirs] == [node.port], theirs
            other = Cli(node.home.with_name(f"{node.home.name}-other"), {}, OTHER)
            ports = sorted(listening_ports(cluster))
            words = [laptop.status(cluster)["folder"], *map(str, ports)]
            found = json.loads(other.python_run(CONNECT, *words).stdout)
            assert found["refused"] >= 3 and (found["folder"], found["dask"], found["http"]) == (
                [],
                [],
                [],
            )
            readable = set(map(Path, other.python_run(READ, str(node.home)).stdout.splitlines()))
            assert node.home in readable and not readable - before - {node.home}, readable - before
        finally:
            tunnel.send_signal(signal.SIGINT)
            tunnel.communicate(timeout=patience(60))
    text = "".join(seen)
    assert "gpujobs" in text  # it has seen the processes
    assert SECRET not in text and "PRIVATE KEY" not in text
    made = [path for path in node.home.rglob("*") if path not in before and not path.is_symlink()]
    assert made and [str(path) for path in made if path.stat().st_mode & 0o077] == []
    assert laptop("cancel", cluster).returncode == 0


def is_served(url: str) -> bool:
    """Return whether the dashboard answers."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=patience(10)) as answer:
        return bool(answer.status == 200)
    return False
