"""A small batch scheduler on this host: the common part of the fake PBS, Torque and LSF, without a dialect.

``python engine.py FOLDER`` is its server: it keeps the jobs, gives them emulated nodes and GPUs, really runs them as
the user who submitted them, ends them at their walltime, and records how they ended. A command of a dialect is a
short-lived process that calls `ask`. ``FOLDER/config.json`` has::

    dialect  name of the module beside this one that starts jobs (see below)
    nodes, slots, gpus   names of the nodes; CPU slots and GPUs of each
    signals  {"delete": [["TERM", 5], ["KILL", 0]], "timeout": …}: what is sent, and seconds until the next one
    quirks   {name: value}: what some releases do wrong; ``FOLDER/quirks.json`` overrides it while the server runs

Quirks of the engine, each a number of seconds: ``early_signal`` sends the first signal of the walltime so much too
early, and once more at its end; ``kill_delay`` keeps a running job listed for so long after its processes have ended
by a delete. A dialect has its own.

A dialect's module has ``launch(job, folder, config)``, which returns how to run a job: argv, env, cwd, and optionally
stdin (text), stdout (path; default: none), umask. All processes of the job's session belong to the job.

``FOLDER/faults.json`` switches faults on, per kind of request (submit, query, delete; any: all of them; never
"test", the requests of tests)::

    {"submit": {"fault": "timeout", "times": 1}}

down: no reply. timeout: it is done, but the reply never comes. forget: no job is listed. The dialect
implements the others, from ``answer["fault"]``: refuse (nothing was done), garble (it was done).
busy: nothing was done, and `ask` raises Busy.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pwd
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TICK = 0.1


def quirk(folder: str | Path, config: dict[str, Any], name: str) -> Any:
    """Return the value of a quirk, 0 if it is off."""
    try:
        own = json.loads((Path(folder) / "quirks.json").read_text())
    except (OSError, ValueError):
        own = {}
    return {**config.get("quirks", {}), **own}.get(name, 0)


# -- the side of the commands ------------------------------------------------------------------------------------
class Away(Exception):
    """There is no reply."""


class Busy(Exception):
    """It answers that it has no time."""


def ask(folder: str | Path, kind: str, op: str, **request: Any) -> dict[str, Any]:
    """Send a request of ``kind`` (submit, query, delete) to the server; return its answer or raise Away."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(Path(folder) / "socket"))
        connection.sendall(json.dumps({"kind": kind, "op": op, **request}).encode() + b"\n")
        answer = b""
        while part := connection.recv(65536):
            answer += part
    except OSError as error:
        raise Away(str(error)) from None
    finally:
        connection.close()
    if not answer:
        raise Away("no answer")
    found: dict[str, Any] = json.loads(answer)
    if found["fault"] == "busy":
        raise Busy
    return found


# -- the server --------------------------------------------------------------------------------------------------
class Server:
    """``jobs`` has one dictionary per job (member of an array), in the order of submission:

    id, index (None outside arrays), count (of its array), name, user, uid, queue, script, cwd, needs {nodes, slots,
    gpus, exclusive, avoided}, walltime, extra (the dialect's own); state: waiting, held, running, done; submitted, started,
    ended (epoch); comment (why it waits); nodes: {name: {"slots": [0, 1], "gpus": [2]}}; pid; end: "" (by itself),
    delete or timeout; by (who deleted it); exit_code, signal (one of them is None); after (ids of jobs that must have
    ended before).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = json.loads((folder / "config.json").read_text())
        self.dialect = importlib.import_module(self.config["dialect"])
        self.jobs: list[dict[str, Any]] = []
        self.next_id = self.config.get("first_id", 1)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.plans: dict[int, list[list[Any]]] = {}
        """Signals still to be sent to the job with that pid: [when, name]."""
        self.silent: list[socket.socket] = []

    def serve(self) -> None:
        door = socket.socket(socket.AF_UNIX)
        path = self.folder / "socket"
        path.unlink(missing_ok=True)
        door.bind(str(path))
        path.chmod(0o777)
        door.listen(64)
        while True:
            if select.select([door], [], [], TICK)[0]:
                self._answer(door.accept()[0])
            self._look_at_jobs()
            self._start_jobs()

    # -- requests --------------------------------------------------------------------------------------------
    def _answer(self, connection: socket.socket) -> None:
        _, uid, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        connection.settimeout(10)
        try:
            request = json.loads(connection.makefile().readline())
        except (OSError, ValueError):
            connection.close()
            return
        fault = self._fault(request["kind"]) if request["kind"] != "test" else ""
        if fault == "down":
            connection.close()
            return
        answer = (
            {}
            if fault in ("refuse", "busy")
            else getattr(self, f"_op_{request['op']}")(request, uid, fault)
        )
        if fault == "timeout":
            self.silent.append(connection)
            return
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps({**answer, "fault": fault}).encode())
        connection.close()

    def _fault(self, kind: str) -> str:
        path = self.folder / "faults.json"
        try:
            faults = json.loads(path.read_text())
        except (OSError, ValueError):
            return ""
        for key in (kind, "any"):
            found = faults.get(key)
            if found and found.get("times", 1) > 0:
                if "times" in found:
                    found["times"] -= 1
                    path.write_text(json.dumps(faults))
                return str(found["fault"])
        return ""

    def _op_submit(self, request: dict[str, Any], uid: int, fault: str) -> dict[str, Any]:
        number, self.next_id = self.next_id, self.next_id + 1
        indexes = request.get("indexes") or [None]
        for index in indexes:
            job = {
                "id": number, "index": index, "count": len(indexes), "uid": uid, "user": pwd.getpwuid(uid).pw_name,
                **{key: request[key] for key in ("name", "queue", "script", "cwd", "needs", "walltime", "extra")},
                "state": "held" if request.get("hold") else "waiting", "submitted": time.time(), "started": None,
                "ended": None, "comment": "", "nodes": {}, "pid": None, "end": "", "by": "", "exit_code": None, "signal": None,
                "after": request.get("after", []),
            }  # fmt: skip
            self.jobs.append(job)
        return {"id": number}

    def _op_jobs(self, request: dict[str, Any], uid: int, fault: str) -> dict[str, Any]:
        hidden = {"script"}
        jobs = [] if fault == "forget" else self.jobs
        return {
            "jobs": [
                {key: value for key, value in job.items() if key not in hidden} for job in jobs
            ]
        }

    def _op_delete(self, request: dict[str, Any], uid: int, fault: str) -> dict[str, Any]:
        """Delete [id, index] (index None: all members); say of each: unknown, denied, done, or deleted."""
        results = []
        for number, index in request["targets"]:
            jobs = [
                job for job in self.jobs if job["id"] == number and index in (None, job["index"])
            ]
            active = [job for job in jobs if job["state"] != "done"]
            if not jobs or fault == "forget":
                results.append("unknown")
            elif uid not in (0, jobs[0]["uid"]):
                results.append("denied")
            elif not active:
                results.append("done")
            else:
                results.append("deleted")
                for job in active:
                    self._end(job, "delete", pwd.getpwuid(uid).pw_name)
        return {"results": results}

    def _op_crash(self, request: dict[str, Any], uid: int, fault: str) -> dict[str, Any]:
        """Answer nobody any more."""
        (self.folder / "faults.json").write_text(json.dumps({"any": {"what": "down"}}))
        return {}

    def _op_expire(self, request: dict[str, Any], uid: int, fault: str) -> dict[str, Any]:
        """Let the walltime of the jobs ``id`` be over."""
        for job in self.jobs:
            if job["id"] == request["id"]:
                job["walltime"] = 0.001
        return {}

    # -- jobs ------------------------------------------------------------------------------------------------
    def _end(self, job: dict[str, Any], why: str, by: str = "") -> None:
        if job["state"] != "running":
            job.update(state="done", end=why, by=by, ended=time.time())
        elif not job["end"]:
            job.update(end=why, by=by)
            when, plan = time.time(), []
            for name, wait in self.config["signals"][why]:
                plan.append([when, name])
                when += wait
            self.plans[job["pid"]] = plan

    def _look_at_jobs(self) -> None:
        for job in [job for job in self.jobs if job["state"] == "running"]:
            pid, now = job["pid"], time.time()
            left = job["started"] + job["walltime"] - now if job["walltime"] else float("inf")
            if not job["end"] and left < 0:
                self._end(job, "timeout")
            elif not job["end"] and left < self._quirk("early_signal") and not job.get("warned"):
                job["warned"] = True
                _signal(pid, self.config["signals"]["timeout"][0][0])
            plan = self.plans.get(pid, [])
            while plan and plan[0][0] <= now:
                _signal(pid, plan.pop(0)[1])
            if (code := self.processes[pid].poll()) is None:
                continue
            # The session's leader has ended. Its children have the time until the next signals.
            warned = job.get("warned") and not job["end"]
            if _session(pid) and (plan or warned):
                continue
            _signal(pid, "KILL")
            if job["end"] == "delete":
                gone = job.setdefault("gone", now)
                if now < gone + self._quirk("kill_delay"):
                    continue
            job.update(
                state="done",
                ended=now,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
            )
            self.plans.pop(pid, None)
            del self.processes[pid]

    def _start_jobs(self) -> None:
        for job in [job for job in self.jobs if job["state"] == "waiting"]:
            if any(
                job["after"].count(other["id"]) for other in self.jobs if other["state"] != "done"
            ):
                job["comment"] = "dependency"
                continue
            places = self._places(job["needs"])
            if isinstance(places, str):
                job["comment"] = places
                continue
            job.update(state="running", nodes=places, started=time.time(), comment="")
            launch = self.dialect.launch(job, self.folder, self.config)
            self._run(job, launch)

    def _run(self, job: dict[str, Any], launch: dict[str, Any]) -> None:
        options: dict[str, Any] = {}
        if os.geteuid() == 0:
            entry = pwd.getpwuid(job["uid"])
            options = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        with open(launch.get("stdout") or os.devnull, "ab") as output:  # noqa: PTH123 - /dev/null too
            process = subprocess.Popen(
                launch["argv"], env=launch["env"], cwd=launch["cwd"] if Path(launch["cwd"]).is_dir() else "/",
                stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
                umask=launch.get("umask", 0o22), **options,
            )  # fmt: skip
        assert process.stdin
        process.stdin.write(launch.get("stdin", "").encode())
        process.stdin.close()
        job["pid"] = process.pid
        self.processes[process.pid] = process

    def _quirk(self, name: str) -> float:
        return float(quirk(self.folder, self.config, name))

    # -- places ----------------------------------------------------------------------------------------------
    def _places(self, needs: dict[str, Any]) -> dict[str, Any] | str:
        """Return slots and GPUs on as many different nodes as needed, or why there are none now."""
        found, config = {}, self.config
        for node in config["nodes"]:
            if node in needs.get("avoided", ()):
                continue
            used = [
                job["nodes"][node]
                for job in self.jobs
                if job["state"] == "running" and node in job["nodes"]
            ]
            alone = any(
                job["needs"].get("exclusive")
                for job in self.jobs
                if job["state"] == "running" and node in job["nodes"]
            )
            slots = sorted(
                set(range(config["slots"])) - {n for place in used for n in place["slots"]}
            )
            gpus = sorted(set(range(config["gpus"])) - {n for place in used for n in place["gpus"]})
            fits = len(slots) >= needs["slots"] and len(gpus) >= needs["gpus"]
            if fits and not alone and not (needs.get("exclusive") and used):
                found[node] = {"slots": slots[: needs["slots"]], "gpus": gpus[: needs["gpus"]]}
            if len(found) == needs["nodes"]:
                return found
        if (
            needs["gpus"] > config["gpus"]
            or needs["slots"] > config["slots"]
            or needs["nodes"] > len(config["nodes"])
        ):
            return "never"
        return "busy"


def _session(leader: int) -> list[int]:
    """Return the living processes of the session that ``leader`` led."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if fields[3] == str(leader) and fields[0] not in "ZX":
                found.append(int(name))
    return found


def _signal(leader: int, name: str) -> None:
    for pid in _session(leader):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.Signals[f"SIG{name}"])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    Server(Path(sys.argv[1])).serve()
