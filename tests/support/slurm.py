"""A private Slurm on this host: several slurmd, each an emulated node with fake GPUs, in a temporary folder.

All daemons run in the foreground as our children. GPUs are links to /dev/null: with a count alone slurmd makes the node
invalid, with plain files CUDA_VISIBLE_DEVICES stays empty. benchmarks/gpu gives it the host's real ones.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from .processes import boot, free_ports, patience, put_aside, reaper, stop, until, until_answer

SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
DAEMONS = ("munged", "slurmctld", "slurmd")
PREFIX = os.environ.get("GPUJOBS_SLURM_PREFIX", "")
"""Where another version of Slurm is installed; its programs are first on the path."""


def program_path() -> str:
    """Return the path on which Slurm's programs are."""
    own = f"{PREFIX}/bin:{PREFIX}/sbin:" if PREFIX else ""
    return f"{own}{os.environ['PATH']}:{SBIN}"


def missing() -> str:
    """Return which program of a real Slurm is not here, or ``""``."""
    return next(
        (
            f"{name} is not installed"
            for name in (*DAEMONS, "sbatch")
            if not shutil.which(name, path=program_path())
        ),
        "",
    )


def version() -> tuple[int, int]:
    """Return the release of Slurm: (22, 5)."""
    program = shutil.which("slurmctld", path=program_path())
    assert program
    done = subprocess.run([program, "-V"], capture_output=True, text=True, check=True)
    major, minor = done.stdout.split()[1].split(".")[:2]
    return int(major), int(minor)


class PrivateSlurm:
    """Start with `running`."""

    def __init__(
        self, folder: Path, nodes: int = 4, gpus: int = 4, cpus: int = 16, extra: str = "", accounting: bool = False,
        memory: int = 65536, devices: Sequence[str] = (), isolated: bool = False,
        features: str = "", types: Sequence[str] = (), counted: Mapping[str, int] | None = None,
        ports: Callable[[int], list[int]] = free_ports,
    ) -> None:  # fmt: skip
        """``memory`` of a node in MiB. ``counted``: other generic resources of a node, and their numbers. ``types`` of its GPUs, one for each. ``devices``: device files of real GPUs, for one node; ``isolated``: a job can open
        only its own ones, if this kernel has version 1 of cgroups and we are root."""
        self.folder, self.nodes, self.cpus, self.extra, self.accounting = (
            folder,
            nodes,
            cpus,
            extra,
            accounting,
        )
        self.memory, self.devices, self.isolated = memory, devices, isolated
        self.features, self.types, self.counted = features, types, counted or {}
        self._choose_ports = ports
        self.gpus = len(devices) or len(types) or gpus
        self.conf = folder / "slurm.conf"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.path = program_path()

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands use this one."""
        return {"SLURM_CONF": str(self.conf), "PATH": self.path}

    @contextlib.contextmanager
    def running(self) -> Iterator[PrivateSlurm]:
        """Boot it; stop it at the end, and also if the test run is killed."""
        with reaper(str(self.conf), str(self.folder)):
            try:
                boot(self._start, self._undo)
                yield self
            finally:
                self._stop()

    def _undo(self) -> list[Path]:
        """End what a boot that failed has started; return its logs."""
        self._end_daemons()
        logs = sorted((put_aside(self.folder) / "log").iterdir())
        return [log for log in logs if log.stat().st_size]

    def _start(self) -> None:
        for name in ("run", "log", "state", "spool", "dev"):
            (self.folder / name).mkdir(parents=True)
        for folder in (self.folder, self.folder / "run"):
            folder.chmod(0o755)
        key = self.folder / "state" / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        munge = [f"--{name}={self.folder}/{path}" for name, path in (
            ("key-file", "state/munge.key"), ("socket", "run/munge.sock"), ("pid-file", "run/munged.pid"),
            ("log-file", "log/munged.log"), ("seed-file", "state/munge.seed"))]  # fmt: skip
        munged = self._daemon(
            "munged", "munged", "--foreground", "--force", "--num-threads=2", *munge
        )
        until_answer(munged, (self.folder / "run" / "munge.sock").exists, 20, "munged")
        self._configure()
        if self.accounting:
            self._start_accounting()
        self.start_controller()
        for n in range(1, self.nodes + 1):
            self.start_node(f"node{n}")
        until(self.ready, 60, "nodes")

    def start_controller(self) -> None:
        """Start slurmctld, and wait until it answers."""
        daemon = self._daemon("slurmctld", "slurmctld", "-D")
        answers = functools.partial(self._answers, "UP", "scontrol", "ping")
        until_answer(daemon, answers, 30, "slurmctld")

    def _answers(self, text: str, *argv: str) -> bool:
        done = self.attempt(*argv)
        return done.returncode == 0 and text in done.stdout

    def start_node(self, node: str, *options: str, isolated: bool = False) -> None:
        """Start the slurmd of a node. ``isolated``: it sees no process but its own ones."""
        words = [*(PID_NAMESPACE if isolated else ()), "slurmd", "-D", "-N", node, *options]
        self._daemon(f"slurmd-{node}", *words)

    def ready(self) -> bool:
        """Return whether all nodes accept jobs. Fails if a daemon has ended."""
        dead = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
        assert not dead, f"{', '.join(dead)} ended; see {self.folder / 'log'}"
        states = self.command("sinfo", "-h", "-N", "-o", "%T").split()
        return bool(states) and set(states) <= {"idle", "mixed", "allocated"}

    def _configure(self) -> None:
        self.ports = ports = self._choose_ports(3 + self.nodes)
        host, me = socket.gethostname(), getpass.getuser()
        devices = self.devices or [str(self.folder / "dev" / f"gpu{n}") for n in range(self.gpus)]
        for path in devices if not self.devices else ():
            Path(path).symlink_to("/dev/null")
        settings = {
            "ClusterName": "private", "SlurmctldHost": f"{host}(127.0.0.1)", "SlurmUser": me, "SlurmdUser": me,
            "AuthType": "auth/munge",
            # A requeued job waits for as long as a credential is valid: two minutes by default.
            "AuthInfo": f"socket={self.folder}/run/munge.sock,cred_expire=30",
            "SlurmctldPort": ports[0], "StateSaveLocation": f"{self.folder}/state",
            "SlurmctldPidFile": f"{self.folder}/run/slurmctld.pid", "SlurmctldLogFile": f"{self.folder}/log/slurmctld.log",
            "SlurmdSpoolDir": f"{self.folder}/spool/%n", "SlurmdPidFile": f"{self.folder}/run/slurmd-%n.pid",
            "SlurmdLogFile": f"{self.folder}/log/slurmd-%n.log", "SlurmdParameters": "config_overrides",
            "ProctrackType": "proctrack/linuxproc", "MpiDefault": "none", "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU_Memory", "SchedulerType": "sched/backfill",
            "SchedulerParameters": "bf_interval=2,sched_interval=5,batch_sched_delay=0", "ReturnToService": 2,
            "SlurmctldTimeout": 60, "SlurmdTimeout": 60, "KillWait": 5, "MinJobAge": 300, "InactiveLimit": 0,
            "MaxArraySize": 10001, "MaxJobCount": 20000, "DefMemPerCPU": 64, "MessageTimeout": 10,
        }  # fmt: skip
        if self.isolated:
            settings["TaskPlugin"] = "task/cgroup"
        self._write_cgroup_conf()
        if self.accounting:
            settings |= {
                "AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageHost": "127.0.0.1",
                "AccountingStoragePort": ports[1], "AccountingStoragePass": f"{self.folder}/run/munge.sock",
            }  # fmt: skip
        lines = [f"{key}={value}" for key, value in settings.items()]
        gres = ""
        if self.gpus:
            lines.append(f"GresTypes={','.join(['gpu', *self.counted])}")
            numbers = {f"gpu:{name}": self.types.count(name) for name in self.types}
            numbers = {**(numbers or {"gpu": self.gpus}), **self.counted}
            gres = f" Gres={','.join(f'{name}:{number}' for name, number in numbers.items())}"
        features = f" Features={self.features}" if self.features else ""
        for n in range(1, self.nodes + 1):
            lines.append(
                f"NodeName=node{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2 + n]} CPUs={self.cpus}"
                f" RealMemory={self.memory}{gres}{features} State=UNKNOWN"
            )
        lines.append(
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=01:00:00 State=UP"
        )
        lines.append("PartitionName=short Nodes=ALL MaxTime=00:10:00 DefaultTime=00:05:00 State=UP")
        self.conf.write_text("\n".join([*lines, self.extra, ""]))
        gpus = [f"NodeName=node[1-{self.nodes}] Name=gpu File={path}" for path in devices]
        gpus = (
            [f"{line} Type={name}" for line, name in zip(gpus, self.types, strict=True)]
            if self.types
            else gpus
        )
        gpus += [f"Name={name} Count={number}" for name, number in self.counted.items()]
        (self.folder / "gres.conf").write_text(
            "\n".join(["AutoDetect=off", *gpus, ""]) if gpus else ""
        )

    def _write_cgroup_conf(self) -> None:
        mounted = Path("/sys/fs/cgroup")
        if self.isolated and not (mounted / "devices").is_dir():
            mounted = self.folder / "cgroup"
            mounted.mkdir()
        # Version 2 needs systemd, even if nothing is constrained. Releases before 21.08 have only
        # version 1, those before 24.05 cannot do without.
        old = version() < (24, 5) or self.isolated
        lines = ["CgroupPlugin=cgroup/v1" if old else "CgroupPlugin=disabled"]
        if version() < (21, 8):
            lines = []
        if self.isolated:
            lines += [f"CgroupMountpoint={mounted}", "CgroupAutomount=yes", "ConstrainDevices=yes"]
        (self.folder / "cgroup.conf").write_text("\n".join([*lines, ""]))

    def _start_accounting(self) -> None:
        data, run = self.folder / "state" / "mariadb", self.folder / "run"
        me = getpass.getuser()
        install = [
            "mariadb-install-db",
            "--no-defaults",
            f"--user={me}",
            f"--datadir={data}",
            "--skip-test-db",
        ]
        subprocess.run(
            [*install, "--auth-root-authentication-method=normal"], check=True, capture_output=True
        )
        socket_option = f"--socket={run}/mariadb.sock"
        mariadb = self._daemon(
            "mariadb", "mariadbd", "--no-defaults", f"--user={me}", f"--datadir={data}", "--bind-address=127.0.0.1",
            f"--port={self.ports[2]}", socket_option, f"--pid-file={run}/mariadb.pid", "--innodb-buffer-pool-size=64M",
        )  # fmt: skip
        client = ["mariadb", "--no-defaults", socket_option, "-u", "root"]
        answers = functools.partial(self._answers, "", *client, "-e", "select 1")
        until_answer(mariadb, answers, 60, "mariadb")
        sql = (
            "CREATE DATABASE slurm_acct_db; CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY 'private';"
            "CREATE USER 'slurm'@'localhost' IDENTIFIED BY 'private'; GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';"
            "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'localhost';"
        )
        subprocess.run(client, input=sql, text=True, check=True)
        conf = self.folder / "slurmdbd.conf"
        settings = {
            "AuthType": "auth/munge", "AuthInfo": f"socket={run}/munge.sock", "DbdHost": socket.gethostname(),
            "DbdAddr": "127.0.0.1", "DbdPort": self.ports[1], "SlurmUser": me, "LogFile": f"{self.folder}/log/slurmdbd.log",
            "PidFile": f"{run}/slurmdbd.pid", "StorageType": "accounting_storage/mysql", "StorageHost": "127.0.0.1",
            "StoragePort": self.ports[2], "StorageUser": "slurm", "StoragePass": "private", "StorageLoc": "slurm_acct_db",
        }  # fmt: skip
        conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        conf.chmod(0o600)
        slurmdbd = self._daemon("slurmdbd", "slurmdbd", "-D")
        answers = functools.partial(self._answers, "", "sacctmgr", "-n", "list", "cluster")
        until_answer(slurmdbd, answers, 30, "slurmdbd")
        self.command("sacctmgr", "-i", "add", "cluster", "private")

    def _daemon(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        found = shutil.which(program, path=self.path)
        assert found, f"{program} is not installed"
        with (self.folder / "log" / f"{name}.out").open("wb") as output:
            self.daemons[name] = subprocess.Popen(
                [found, *arguments],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self.daemons[name]

    def _stop(self) -> None:
        if "slurmctld" in self.daemons:
            with contextlib.suppress(Exception):
                self.cancel_all()
        self._end_daemons()

    def _end_daemons(self) -> None:
        """End all daemons; those of Slurm at once, as slurmctld would wait for nodes that are gone."""
        of_slurm = [name for name in self.daemons if name.startswith("slurm")]
        for name in of_slurm:
            self.daemons[name].terminate()
        for name in (*of_slurm, "mariadb", "munged"):
            if name in self.daemons:
                stop(self.daemons.pop(name))

    # -- used by tests ----------------------------------------------------------------------------------
    def attempt(self, *argv: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command."""
        env = {**os.environ, **self.env}
        return subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=patience(timeout), check=False
        )

    def command(self, *argv: str) -> str:
        """Run a Slurm command; return its output."""
        done = self.attempt(*argv)
        return done.stdout

    def queue(self) -> list[str]:
        """Return the queue: ``id state name`` of jobs that have not ended."""
        done = self.attempt("squeue", "-h", "-r", "-o", "%i %T %j")
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def cancel_all(self) -> None:
        """Cancel all jobs and wait until they are gone."""
        ids = {line.split("_")[0].split()[0] for line in self.queue()}
        if ids:
            self.attempt("scancel", *sorted(ids))
        until(lambda: not self.queue(), 60, "an empty queue")

    @contextlib.contextmanager
    def setting(self, name: str, value: int) -> Iterator[None]:
        """While this is open, a number of slurm.conf is another one."""
        text = self.conf.read_text()
        self._reconfigure(re.sub(rf"^{name}=\d+$", f"{name}={value}", text, flags=re.M))
        try:
            yield
        finally:
            self._reconfigure(text)

    def _reconfigure(self, text: str) -> None:
        self.conf.write_text(text)
        self.command("scontrol", "reconfigure")

    @property
    def controller(self) -> int:
        """The pid of slurmctld."""
        return self.daemons["slurmctld"].pid

    def wait_empty(self, seconds: float) -> float:
        """Wait until nothing is in the queue; return how long that took."""
        return until(
            lambda: not self.queue(), seconds, f"an empty queue ({time.strftime('%H:%M:%S')})"
        )
