"""A private Grid Engine on this host: an execution daemon in each of several network namespaces, in a temporary folder.

qmaster and the submit host are this host itself: ordinary users run qsub here, and the nodes can reach their
processes here. qmaster and the nodes see a hosts file of their own, because this host does not need the nodes' names.
All daemons run in the foreground as our children.

Several can run at once: each takes a slot, and with it a subnet, namespaces and a range of group ids. (Grid Engine ends a
job by its group id, and all nodes of all slots share one table of processes.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from .backend import Backend
from .processes import (
    boot,
    free_ports,
    patience,
    pause,
    put_aside,
    reaper,
    stop,
    until,
    until_answer,
)

PROGRAMS = Path("/usr/lib/gridengine")
RESOURCES = Path("/usr/share/gridengine")
SLOTS = 16

NONE = "NONE"
PARALLEL_ENVIRONMENT = {
    "slots": 9999, "user_lists": NONE, "xuser_lists": NONE, "start_proc_args": NONE, "stop_proc_args": NONE,
    "allocation_rule": "$pe_slots", "control_slaves": "TRUE", "job_is_first_task": "FALSE", "urgency_slots": "min",
    "accounting_summary": "FALSE", "qsort_args": NONE,
}  # fmt: skip
HOST = {
    "load_scaling": NONE, "complex_values": NONE, "load_values": NONE, "processors": 0, "user_lists": NONE, "xuser_lists": NONE,
    "projects": NONE, "xprojects": NONE, "usage_scaling": NONE, "report_variables": NONE,
}  # fmt: skip
LIMITS = ("rt", "cpu", "fsize", "data", "stack", "core", "rss", "vmem")
QUEUE = {
    "hostlist": NONE, "seq_no": 0, "load_thresholds": NONE, "suspend_thresholds": NONE, "nsuspend": 1,
    "suspend_interval": "00:05:00", "priority": 0, "min_cpu_interval": "00:05:00", "processors": "UNDEFINED",
    "qtype": "BATCH INTERACTIVE", "ckpt_list": NONE, "pe_list": "smp whole", "rerun": "FALSE", "slots": 1,
    "shell": "/bin/sh", "prolog": NONE, "epilog": NONE, "shell_start_mode": "posix_compliant", "starter_method": NONE,
    "suspend_method": NONE, "resume_method": NONE, "terminate_method": NONE, "notify": "00:00:60", "owner_list": NONE,
    "user_lists": NONE, "xuser_lists": NONE, "subordinate_list": NONE, "complex_values": NONE, "projects": NONE,
    "xprojects": NONE, "calendar": NONE, "initial_state": "default",
    **{f"{kind}_{limit}": "INFINITY" for limit in LIMITS for kind in ("s", "h")},
}  # fmt: skip

# GPUs are a consumable, which only counts. Like real sites, a prolog picks which ones, and an epilog returns them.
PROLOG = """#!/bin/bash
# Take as many free GPUs of this node as the job requests, and set the job's variable.
wanted=$(qstat -j "$JOB_ID" | sed -n 's/^hard resource_list:.*gpu=\\([0-9]*\\).*/\\1/p')
mkdir -p "@gpus@/$(hostname)" && cd "@gpus@/$(hostname)" || exit 1
taken=()
for ((gpu = 0; gpu < @count@; gpu++)); do
    [ "${#taken[@]}" -lt "${wanted:-0}" ] || break
    (set -C; echo "$JOB_ID.$SGE_TASK_ID" > "$gpu") 2> /dev/null && taken+=("$gpu")
done
[ "${#taken[@]}" -eq "${wanted:-0}" ] || exit 99  # put it back into the queue
[ "${wanted:-0}" -eq 0 ] || echo "SGE_HGR_gpu=${taken[*]}" >> "$SGE_JOB_SPOOL_DIR/environment"
"""
EPILOG = """#!/bin/bash
grep -lx "$JOB_ID.$SGE_TASK_ID" "@gpus@/$(hostname)"/* 2> /dev/null | xargs -r rm -f
"""


def missing() -> str:
    """Return why a real Grid Engine cannot run here, or ``""``."""
    if os.geteuid() != 0:
        return "its nodes are network namespaces, which only root can make"
    for program in ("sge_qmaster", "sge_execd", "qsub"):
        if not (PROGRAMS / program).exists():
            return f"{program} is not installed"
    if not shutil.which("ip"):
        return "ip is not installed"
    name = f"gpujobs-{os.getpid()}"
    allowed = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, text=True, check=False
    )
    if allowed.returncode != 0:
        return f"no network namespaces: {allowed.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


class PrivateSge:
    """Start with `running`."""

    def __init__(
        self, folder: Path, nodes: int = 2, gpus: int = 4, cpus: int = 16, notify: int = 20,
        ports: Callable[[int], list[int]] = free_ports,
    ) -> None:  # fmt: skip
        self.folder, self.nodes, self.gpus, self.cpus, self.notify = (
            folder,
            nodes,
            gpus,
            cpus,
            notify,
        )
        self.root = folder / "root"
        self.common = self.root / "default" / "common"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.slot, self._choose_ports = -1, ports

    # -- names and numbers ------------------------------------------------------------------------------------
    @property
    def env(self) -> dict[str, str]:
        """The environment in which Grid Engine's commands use this one."""
        return {
            "SGE_ROOT": str(self.root), "SGE_CELL": "default", "SGE_QMASTER_PORT": str(self.ports[0]),
            "SGE_EXECD_PORT": str(self.ports[1]), "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        }  # fmt: skip

    @property
    def names(self) -> list[str]:
        """The nodes' names."""
        return [f"node{n}" for n in range(1, self.nodes + 1)]

    def address(self, n: int = 0) -> str:
        """The address of node ``n``, or of this host as the nodes see it."""
        return f"10.213.{self.slot}.{10 + n}"

    def namespace(self, node: str) -> str:
        """The network namespace of a node."""
        return f"gpujobs-sge{self.slot}-{node}"

    @property
    def qmaster(self) -> int:
        """The pid of qmaster."""
        return self.daemons["qmaster"].pid

    # -- start and stop ---------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def running(self) -> Iterator[PrivateSge]:
        """Boot it; stop it at the end, and also if the test run is killed."""
        with self._own_slot(), reaper(str(self.folder)):
            try:
                boot(self._start, self._undo)
                yield self
            finally:
                self._stop()

    def _undo(self) -> list[Path]:
        """End what a boot that failed has started; return its logs."""
        self._end_daemons()
        self._remove_network()
        folder = put_aside(self.folder)
        logs = [
            *folder.glob("log/*"),
            *folder.glob("qmaster/messages"),
            *folder.glob("execd/*/messages"),
        ]
        return [log for log in logs if log.stat().st_size]

    @contextlib.contextmanager
    def _own_slot(self) -> Iterator[None]:
        for self.slot in range(SLOTS):
            with Path(f"/tmp/gpujobs-tests-sge{self.slot}.lock").open("w") as lock:
                if not _locked(lock):
                    continue
                self._remove_network()  # of a test run that was killed
                try:
                    yield
                finally:
                    self._remove_network()
                return
        raise AssertionError("too many Grid Engines at once")

    def _start(self) -> None:
        self.ports = self._choose_ports(2)
        for name in ("spooldb", "qmaster", "execd", "gpus", "log", "templates"):
            (self.folder / name).mkdir(parents=True)
        self.common.mkdir(parents=True)
        for name in ("bin", "lib", "utilbin", "util"):
            (self.root / name).symlink_to(f"/var/lib/gridengine/{name}")
        self._write_hosts()
        self._configure()
        self._make_network()
        self.start_qmaster()
        self._schedule_at_once()
        self._add_queues()
        for node in self.names:
            self._daemon(node, "sge_execd", node)
        until(self._ready, 60, "nodes", every=0.1)

    def _ready(self) -> bool:
        dead = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
        assert not dead, f"{', '.join(dead)} ended"
        return self.command("qstat", "-f").count("lx-amd64") == 2 * self.nodes

    def start_qmaster(self) -> None:
        """Start qmaster and wait until it answers."""
        (self.folder / "qmaster" / "qmaster.pid").unlink(missing_ok=True)
        daemon = self._daemon("qmaster", "sge_qmaster")
        until_answer(daemon, lambda: self.attempt("qstat").returncode == 0, 30, "qmaster")

    def stop_qmaster(self) -> None:
        """Kill qmaster, which would take eight seconds to stop by itself; jobs go on."""
        self.daemons["qmaster"].kill()
        self.daemons["qmaster"].wait()

    def _stop(self) -> None:
        if "qmaster" in self.daemons:
            with contextlib.suppress(Exception):
                self.cancel_all()
        self._end_daemons()

    def _end_daemons(self) -> None:
        if "qmaster" in self.daemons:
            self.stop_qmaster()
        for daemon in self.daemons.values():
            stop(daemon)
        self.daemons.clear()

    def _daemon(self, name: str, program: str, node: str = "") -> subprocess.Popen[bytes]:
        """Start a daemon on a node, or on this host, in either case with the hosts file of our own."""
        env = {**self.env, "SGE_ND": "1", "HOME": "/", "LANG": "C.UTF-8"}
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                [*self._inside(node), str(PROGRAMS / program)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self.daemons[name]

    def _inside(self, node: str = "") -> list[str]:
        """Return the prefix of a command on a node, or on this host, in both cases with our own hosts file."""
        network = ["nsenter", f"--net=/run/netns/{self.namespace(node)}"] if node else []
        script = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
        own = [str(self.folder / "hosts"), node or socket.gethostname()]
        return [*network, "unshare", "--mount", "--uts", "sh", "-c", script, "sh", *own]

    # -- network ----------------------------------------------------------------------------------------------
    def _write_hosts(self) -> None:
        own = socket.gethostname()
        lines = [
            f"{self.address()} {own}",
            *(f"{self.address(n)} node{n}" for n in range(1, self.nodes + 1)),
        ]
        with contextlib.suppress(OSError):
            lines.append(f"{socket.gethostbyname(own)} {own} localhost")
        (self.folder / "hosts").write_text("\n".join([*lines, "127.0.0.1 localhost", ""]))

    def _make_network(self) -> None:
        bridge = f"gpujobs-sge{self.slot}"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.address()}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for n, node in enumerate(self.names, 1):
            space, port = self.namespace(node), f"gjsge{self.slot}p{n}"
            _ip("netns", "add", space)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", port, "master", bridge, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{self.address(n)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "route", "add", "default", "via", self.address())

    def _remove_network(self) -> None:
        for node in range(1, 9):
            space = self.namespace(f"node{node}")
            if Path(f"/run/netns/{space}").exists():
                _ip("netns", "del", space)
        if Path(f"/sys/class/net/gpujobs-sge{self.slot}").exists():
            _ip("link", "del", f"gpujobs-sge{self.slot}")

    # -- configuration ----------------------------------------------------------------------------------------
    def _configure(self) -> None:
        spool = self.folder / "spooldb"
        bootstrap = {
            "admin_user": "none", "default_domain": "none", "ignore_fqdn": "true", "spooling_method": "berkeleydb",
            "spooling_lib": "libspoolb", "spooling_params": spool, "binary_path": self.root / "bin",
            "qmaster_spool_dir": self.folder / "qmaster", "security_mode": "none", "listener_threads": 2,
            "worker_threads": 2, "scheduler_threads": 1,
        }  # fmt: skip
        self._write(self.common / "bootstrap", bootstrap)
        (self.common / "act_qmaster").write_text(f"{socket.gethostname()}\n")
        (self.common / "host_aliases").write_text(
            f"{socket.gethostname()} localhost\n"
        )  # as which this host may see itself
        self._spool("spoolinit", "berkeleydb", "libspoolb", str(spool), "init")
        self._spool("spooldefaults", "configuration", str(self._global_configuration()))
        complexes = self.folder / "templates" / "centry"
        shutil.copytree(RESOURCES / "util" / "resources" / "centry", complexes)
        gpu = {
            "name": "gpu",
            "shortcut": "gpu",
            "type": "INT",
            "relop": "<=",
            "requestable": "YES",
            "consumable": "JOB",
        }
        self._write(complexes / "gpu", {**gpu, "default": 0, "urgency": 0})
        # The same GPUs at a site that counts them for each slot.
        name = {"name": "slot_gpu", "shortcut": "slot_gpu", "type": "DOUBLE", "consumable": "YES"}
        self._write(complexes / "slot_gpu", {**gpu, **name, "default": 0, "urgency": 0})
        self._spool("spooldefaults", "complexes", str(complexes))
        self._spool("spooldefaults", "usersets", str(RESOURCES / "util" / "resources" / "usersets"))
        self._spool("spooldefaults", "managers", "root")
        whole = {"pe_name": "whole", **PARALLEL_ENVIRONMENT, "allocation_rule": self.cpus}
        smp = {"pe_name": "smp", **PARALLEL_ENVIRONMENT}
        self._spool_all("pes", {"smp": smp, "whole": whole})
        everywhere = [socket.gethostname(), *self.names]
        self._spool_all("adminhosts", {host: {"hostname": host} for host in everywhere})
        self._spool_all("submithosts", {host: {"hostname": host} for host in everywhere})
        has = f"gpu={self.gpus},slot_gpu={self.gpus},slots={self.cpus}"
        hosts = {host: {"hostname": host, **HOST, "complex_values": has} for host in self.names}
        self._spool_all("exechosts", hosts)
        for n, node in enumerate(self.names):
            first = 100_000 + 1000 * self.slot + 100 * n
            path = self.folder / "templates" / f"local-{node}"
            self._write(
                path,
                {"mailer": "/bin/true", "xterm": "/bin/true", "gid_range": f"{first}-{first + 99}"},
            )
            self._spool("spooldefaults", "local_conf", str(path), node)

    def _schedule_at_once(self) -> None:
        own = {
            "schedule_interval": "0:0:2",
            "flush_submit_sec": 1,
            "flush_finish_sec": 1,
            "schedd_job_info": "true",
        }
        found = dict(
            line.split(maxsplit=1) for line in self.command("qconf", "-ssconf").splitlines()
        )
        path = self.folder / "templates" / "scheduler"
        self._write(path, {**found, **own})
        self._spool("qconf", "-Msconf", str(path))

    def _add_queues(self) -> None:
        scratch = self.folder / "tmp"  # of this Grid Engine: jobs of all have the same ids
        scratch.mkdir()
        scratch.chmod(0o1777)
        own = {
            "hostlist": " ".join(self.names),
            "slots": self.cpus,
            "tmpdir": str(scratch),
            "notify": f"00:00:{self.notify:02d}",
        }
        for name, walltime in (("main", "INFINITY"), ("short", "00:10:00")):
            path = self.folder / "templates" / name
            self._write(path, {"qname": name, **QUEUE, **own, "h_rt": walltime})
            self._spool("qconf", "-Aq", str(path))

    def _global_configuration(self) -> Path:
        """Write the packaged configuration with our changes: any user, quick answers, a bare environment, GPUs."""
        own = {
            "execd_spool_dir": self.folder / "execd", "mailer": "/bin/true", "min_uid": 0, "min_gid": 0,
            "load_report_time": "00:00:03", "execd_params": "INHERIT_ENV=false", "finished_jobs": 0,
            "reporting_params": "accounting=true reporting=false flush_time=00:00:01 joblog=false sharelog=00:00:00",
            "gid_range": f"{100_900 + 1000 * self.slot}-{100_999 + 1000 * self.slot}", "max_aj_tasks": 5000,
        }  # fmt: skip
        for name, text in (("prolog", PROLOG), ("epilog", EPILOG)):
            script = self.folder / name
            script.write_text(
                text.replace("@gpus@", str(self.folder / "gpus")).replace("@count@", str(self.gpus))
            )
            script.chmod(0o755)
            own[name] = f"root@{script}"
        lines = []
        for line in (RESOURCES / "default-configuration").read_text().splitlines():
            key = line.split()[0] if line.strip() else ""
            lines.append(f"{key} {own.pop(key)}" if key in own else line)
        assert not own, own
        path = self.folder / "templates" / "global"
        path.write_text("\n".join(lines) + "\n")
        return path

    def _spool_all(self, kind: str, objects: Mapping[str, Mapping[str, object]]) -> None:
        folder = self.folder / "templates" / kind
        folder.mkdir()
        for name, settings in objects.items():
            self._write(folder / name, settings)
        self._spool("spooldefaults", kind, str(folder))

    def _spool(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [*self._inside(), str(PROGRAMS / program), *arguments],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (program, arguments, done.stdout, done.stderr)

    @staticmethod
    def _write(path: Path, settings: Mapping[str, object]) -> None:
        path.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))

    # -- used by tests --------------------------------------------------------------------------------
    def attempt(self, *argv: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Run a Grid Engine command as root."""
        env = {**os.environ, **self.env}
        return subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=patience(timeout), check=False
        )

    def command(self, *argv: str) -> str:
        """Run a Grid Engine command as root; return its output."""
        return self.attempt(*argv).stdout

    def queue(self) -> list[str]:
        """Return the queue: ``id state name`` of jobs that have not ended, arrays in a line or several."""
        done = self.attempt("qstat", "-u", "*", "-xml")
        assert done.returncode == 0, done.stderr
        lines = []
        for item in re.findall(r"<job_list.*?</job_list>", done.stdout, re.DOTALL):
            fields = dict(re.findall(r"<(\w+)>(.*?)</\1>", item))
            task = f".{fields['tasks']}" if "tasks" in fields else ""
            lines.append(f"{fields['JB_job_number']}{task} {fields['state']} {fields['JB_name']}")
        return lines

    def cancel_all(self) -> None:
        """Cancel all jobs and wait until they are gone."""
        if self.queue():
            self.attempt("qdel", "-u", "*")
        until(lambda: not self.queue(), 60, "an empty queue")


class SgeBackend(Backend):
    """A real Grid Engine."""

    name = "sge"

    def __init__(self, sge: PrivateSge) -> None:
        self.sge = sge
        self.nodes = sge.nodes
        self.scheduler_options = {"host": sge.address()}

    def env(self) -> dict[str, str]:
        return self.sge.env

    def site(self) -> dict[str, Any]:
        return self.usual_site(
            "a private Grid Engine of the tests", visible_devices={"variable": "SGE_HGR_gpu"}
        )

    def queue(self) -> list[str]:
        return self.sge.queue()

    def clean(self) -> None:
        self.sge.cancel_all()

    def pause(self, seconds: float) -> None:
        pause(self.sge.qmaster, seconds)

    def kill_job(self, job: str) -> None:
        self.sge.command("qdel", job)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
