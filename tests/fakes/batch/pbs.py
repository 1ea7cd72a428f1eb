"""OpenPBS and Torque on `engine`: their output, refusals and variables are those recorded from the real ones.

``python pbs.py FOLDER qsub|qstat|qdel|qselect|pbsnodes|qmgr ARGUMENTS``. ``config.json`` has besides the engine's keys::

    torque      true: Torque's dialect
    queues      name → {"max_walltime": seconds, "enabled": true}; the first one is the default
    resources   names of job-wide resources that the site added (filesystems, storage, …)
    acl_roots   true: root may submit
    hook        true: as with PBS's cgroups hook, CUDA_VISIBLE_DEVICES names the job's GPUs. Torque sets it by itself
    history     seconds for which ended jobs are known
    max_array_size
    peers       name → folder of other servers: ``PBS_SERVER``, ``PBS_DEFAULT`` and names in ids choose one
    server      name of this server, node1 if it is left out
    memory      GiB of each node, which pbsnodes reports

Quirks, which OpenPBS's development branch has had since 2023 and 2024::

    first_id_only   qstat in JSON lists the jobs of its first id only, and exits with 0
    qdel_aborts     qdel with short ids aborts if an array comes before a job, or, with four ids and more, exits with 0
                    and deletes nothing; the server crashes if one of several ids is a waiting member of an array
"""

from __future__ import annotations

import getopt
import json
import os
import pwd
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import engine

SERVER = "node1"
NUMERIC = {"ncpus", "ngpus", "mpiprocs", "ompthreads"}
CHUNK = NUMERIC | {"mem", "vmem", "host", "gpu_type", "system"}
PBS_OPTIONS = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:P:q:r:R:S:u:W:v:VXz"
TORQUE_OPTIONS = "a:A:b:c:C:d:D:e:hIj:J:k:K:l:L:m:M:N:o:p:P:q:r:S:t:T:u:W:w:v:VXxz"
USAGE = "usage: qsub [-a date_time] [-A account_string] [-c interval]\n"


class Refused(Exception):
    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.words, self.code = words, code


# -- qsub --------------------------------------------------------------------------------------------------------
class Qsub:
    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder, self.config, self.torque = folder, config, bool(config.get("torque"))
        self.letters = TORQUE_OPTIONS if self.torque else PBS_OPTIONS
        self.options: dict[str, str] = {}
        self.resources: dict[str, str] = {}

    def run(self, arguments: list[str]) -> int:
        given, rest = self._getopt(arguments)
        if rest and not Path(rest[0]).is_file():
            raise Refused(
                f"qsub: script file '{rest[0]}' cannot be loaded - No such file or directory"
                if self.torque
                else "qsub: script file:: No such file or directory",
                1,
            )
        script = Path(rest[0]).read_bytes().decode() if rest else sys.stdin.read()
        self._directives(script, given)
        self._check_values()
        if "\r\n" in script:
            words = (
                "qsub:  script is written in DOS/Windows text format"
                if self.torque
                else "qsub: script contains cr, lf"
            )
            raise Refused(words, 1)
        needs, walltime = self._needs(), self._walltime()
        queue = self._queue(walltime)
        if os.geteuid() == 0 and not self.config.get("acl_roots"):
            raise self._no("Bad UID for job execution", 175, "MSG=root user root not allowed")
        indexes = self._indexes()
        home = os.environ.get("HOME", "/")
        extra = {
            "options": self.options, "resources": self.resources, "home": home, "path": os.environ.get("PATH", ""),
            "arguments": shlex.join(arguments), "queue": queue,
        }  # fmt: skip
        answer = engine.ask(
            self.folder, "submit", "submit", name=self.options.get("N", Path(rest[0]).name if rest else "STDIN"),
            queue=queue, script=script, cwd=str(Path.cwd()), needs=needs, walltime=walltime, indexes=indexes,
            hold="h" in self.options, extra=extra, after=self._after(),
        )  # fmt: skip
        if answer["fault"] == "refuse":
            raise self._no("Unauthorized Request ", 159)
        if answer["fault"] == "garble":
            print("\x00\x01%&# 77 \ufffd")
            return 0
        if "z" not in self.options:
            print(f"{answer['id']}{'[]' if indexes else ''}.{SERVER}")
        return 0

    def _after(self) -> list[int]:
        """Return the ids of ``-W depend=afterany:1.s:2[].s``; Torque has afteranyarray for arrays."""
        text = self.options.get("W", "")
        if not text:
            return []
        found = []
        for part in text.removeprefix("depend=").split(","):
            kind, *ids = part.split(":")
            for id_ in ids:
                wanted = "afteranyarray" if self.torque and "[]" in id_ else "afterany"
                if kind != wanted or not re.match(r"\d+(\[\])?(\.|$)", id_):
                    raise self._no("illegal -W value", 1)
                found.append(int(re.split(r"[\[.]", id_)[0]))
        return found

    def _no(self, words: str, code: int, more: str = "") -> Refused:
        """Torque writes otherwise, and its error numbers are PBS's shifted by two."""
        if self.torque:
            return Refused(f"qsub: submit error ({words}{' ' + more if more else ''})", code + 2)
        return Refused(f"qsub: {words}", code)

    def _getopt(self, arguments: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
        try:
            return getopt.getopt(arguments, self.letters)
        except getopt.GetoptError as error:
            bad = f"qsub: invalid option -- '{error.opt}'\n"
            raise Refused(bad + ("[exiting]\n\n" if self.torque else "") + USAGE, 2) from None

    def _directives(self, script: str, given: list[tuple[str, str]]) -> None:
        for line in script.splitlines():
            text = line.strip()
            if text.startswith("#PBS"):
                self._directive(text[4:])
            elif text and not text.startswith("#") and text != ":":
                break
        for name, value in given:
            self._take(name, value)

    def _directive(self, text: str) -> None:
        try:
            found, rest = getopt.getopt(shlex.split(text), self.letters)
        except getopt.GetoptError as error:
            if self.torque:
                raise Refused(f"[a single - is not a valid option]\n\n{USAGE}", 2) from None
            raise Refused(
                f"qsub: invalid option -- '{error.opt[0]}'\nqsub: directive error: {text.strip()} ",
                1,
            ) from None
        if rest:
            raise Refused(f"qsub: directive error: {text.strip()} ", 1)
        for name, value in found:
            self._take(name, value)
        both = self.options
        if not self.torque and "J" in both and both.get("r") == "n":
            raise Refused(
                f"qsub: cannot submit non-rerunable Array Job\nqsub: directive error: {text.strip()} ",
                255,
            )

    def _take(self, name: str, value: str) -> None:
        if name != "-l":
            self.options[name[1:]] = value
            return
        for item in re.split(r",(?=[\w.]+(?:=|,|$))", value):
            key, _, text = item.partition("=")
            self.resources[key] = text

    def _check_values(self) -> None:
        options = self.options
        if re.search(r"[\s/]", options.get("N", "")):
            raise Refused(
                f"[qsub: illegal -N value]\n\n{USAGE}"
                if self.torque
                else f"qsub: illegal -N value\n{USAGE}",
                2,
            )
        if len(options.get("N", "")) > 230:
            raise Refused("qsub: Job name is too long ", 2)
        if self.torque and "J" in options:
            raise Refused(f"[The -J option can only be used in conjunction with -P]\n\n{USAGE}", 2)
        if not self.torque and not re.fullmatch(r"[oed]*|n", options.get("k", "")):
            raise Refused(f"qsub: illegal -k value\n{USAGE}", 2)
        if not re.fullmatch(r"oe|eo|n", options.get("j", "n")):
            raise Refused(f"qsub: illegal -j value\n{USAGE}", 2)

    def _indexes(self) -> list[int] | None:
        text = self.options.get("t" if self.torque else "J")
        if text is None:
            return None
        found = re.fullmatch(r"(\d+)-(\d+)(?:[:%]\d+)?", text)
        if not found or (int(found[1]) >= int(found[2]) and not self.torque):
            raise Refused(f"qsub: illegal -J value\n{USAGE}", 2)
        indexes = list(range(int(found[1]), int(found[2]) + 1))
        limit = self.config.get("max_array_size", 10000)
        if len(indexes) > limit and self.torque:
            words = f"MSG=Requested array size too large, limit is {limit}"
            raise self._no("Bad Job Array Request", 233, words)
        if len(indexes) > limit:
            raise Refused("qsub: Array job exceeds server or queue size limit", 3)
        return indexes

    def _queue(self, walltime: int | None) -> str:
        queues = self.config["queues"]
        name = self.options.get("q", next(iter(queues)))
        if name not in queues:
            raise self._no("Unknown queue", 170, "MSG=requested queue not found")
        if not queues[name].get("enabled", True):
            raise self._no("Queue is not enabled", 173)
        if walltime and walltime > queues[name].get("max_walltime", walltime):
            if self.torque:
                raise self._no(
                    "Job exceeds queue resource limits",
                    188,
                    "MSG=cannot satisfy queue max walltime requirement",
                )
            raise self._no("Job violates queue and/or server resource limits", 188)
        return str(name)

    def _walltime(self) -> int | None:
        text = self.resources.get("walltime")
        if text is None:
            return None
        if not re.fullmatch(r"\d+(:\d+){0,2}", text):
            for_ = "for " if self.torque else ""
            raise self._no(f"Illegal attribute or resource value {for_}Resource_List.walltime", 166)
        seconds = 0
        for part in text.split(":"):
            seconds = seconds * 60 + int(part)
        return seconds

    def _needs(self) -> dict[str, Any]:
        return self._torque_needs() if self.torque else self._pbs_needs()

    def _pbs_needs(self) -> dict[str, Any]:
        own = set(self.config.get("resources", ()))
        top = self.resources
        for name in top:
            if name not in CHUNK | own | {"walltime", "select", "place", "nodes"}:
                raise self._no(f"Unknown resource Resource_List.{name}", 187)
        place = top.get("place", "free")
        if not set(place.split(":")) <= {
            "free",
            "pack",
            "scatter",
            "vscatter",
            "excl",
            "exclhost",
            "shared",
        }:
            raise self._no("Illegal attribute or resource value Resource_List.place", 166)
        if "select" in top and "nodes" in top:
            raise Refused("qsub: Cannot be used with select or place: nodes", 6)
        mixed = [name for name in top if name in CHUNK]
        if "select" in top and mixed:
            words = f'qsub: "-lresource=" cannot be used with "select" or "place", resource is: {mixed[0]}'
            raise Refused(words, 5)
        if "nodes" in top:
            count, *parts = top["nodes"].split(":")
            chunk = {"ncpus": dict(part.partition("=")[::2] for part in parts).get("ppn", "1")}
        elif "select" in top:
            count, *parts = top["select"].split(":")
            chunk = dict(part.split("=", 1) for part in parts)
        else:
            count, chunk = "1", {name: top[name] for name in mixed}
        for name, value in chunk.items():
            where = "select" if "select" in top else "Resource_List"
            if name not in CHUNK | own:
                raise self._no(f"Unknown resource: {name}", 187)
            if name in NUMERIC and not value.isdigit():
                raise self._no("Illegal attribute or resource value", 166)
            if name in ("mem", "vmem") and not re.fullmatch(r"\d+([kmgt]?[bw])?", value, re.I):
                raise self._no(f"Illegal attribute or resource value {where}.{name}", 166)
        self.resources.setdefault(
            "select", f"{count}:" + ":".join(f"{k}={v}" for k, v in chunk.items())
        )
        return {
            "nodes": int(count), "slots": int(chunk.get("ncpus", 1)), "gpus": int(chunk.get("ngpus", 0)),
            "exclusive": "excl" in place, "mpiprocs": int(chunk.get("mpiprocs", 1)),
            "threads": int(chunk.get("ompthreads", chunk.get("ncpus", 1))),
        }  # fmt: skip

    def _torque_needs(self) -> dict[str, Any]:
        own = set(self.config.get("resources", ()))
        known = {
            "walltime",
            "nodes",
            "mem",
            "vmem",
            "pmem",
            "pvmem",
            "procs",
            "ncpus",
            "select",
            "cput",
            "file",
        }
        for name in self.resources:
            if name not in known | own:
                raise self._no("Unknown resource type ", 187, f"Resource_List.{name}")
        count, *parts = self.resources.get("nodes", "1").split(":")  # `select` is taken and ignored
        chunk = dict(part.partition("=")[::2] for part in parts)
        slots, gpus = int(chunk.get("ppn") or 1), int(chunk.get("gpus") or 0)
        config = self.config
        if int(count) > len(config["nodes"]) or slots > config["slots"] or gpus > config["gpus"]:
            why = (
                "MSG=cannot locate feasible nodes (nodes file is empty, all systems are busy, "
                "or no nodes have the requested feature)"
            )
            raise self._no("Job exceeds queue resource limits", 188, why)
        return {"nodes": int(count), "slots": slots, "gpus": gpus, "exclusive": False}


# -- a job on its node -------------------------------------------------------------------------------------------
def text_of_id(job: dict[str, Any]) -> str:
    index = "" if job["index"] is None else f"[{job['index']}]"
    return f"{job['id']}{index}.{SERVER}"


def output_of(job: dict[str, Any], torque: bool) -> str:
    path = re.sub(r"^[^/:]*:", "", job["extra"]["options"].get("o", ""))
    path = str(Path(job["cwd"]) / (path or f"{job['name']}.o{job['id']}"))
    if job["index"] is not None:
        path = (
            f"{path}-{job['index']}" if torque else path.replace("^array_index^", str(job["index"]))
        )
    try:
        is_folder = Path(path).is_dir()
    except PermissionError:  # another user's, asked by qstat
        is_folder = False
    return f"{path}/{text_of_id(job)}.OU" if is_folder else path


def delivered(job: dict[str, Any], torque: bool) -> Path | None:
    """Return the file that gets the output. Torque's pbs_mom expands its path like a shell, and copies to none with a space."""
    path = output_of(job, torque)
    if torque and re.search(r"""[^!-~]|(?<!\\)["'`$&();<>|]""", path):
        return None
    path = re.sub(r"\\(.)", r"\1", path) if torque else path
    return Path(path) if Path(path).parent.is_dir() else None


def launch(job: dict[str, Any], folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A login shell gets the script's name on its standard input, in the user's home with a bare environment."""
    _use(config)
    torque, identity, extra = bool(config.get("torque")), text_of_id(job), job["extra"]
    spool = folder / "spool"
    spool.mkdir(exist_ok=True)
    files = {spool / f"{identity}.SC": job["script"], spool / identity: _nodefile(job, torque)}
    if torque:
        files[spool / f"{identity}gpu"] = _gpufile(job)
    temporary = spool / f"pbs.{identity}"
    temporary.mkdir(exist_ok=True)
    for path, text in files.items():
        path.write_text(text)
        path.chmod(0o700)
    output = delivered(job, torque)
    if output:
        output.touch()
        files[output] = ""
    if os.geteuid() == 0:
        for path in (*files, temporary):
            os.chown(path, job["uid"], pwd.getpwuid(job["uid"]).pw_gid)
    shell = extra["options"].get("S", "/bin/bash")
    return {
        "argv": [shell], "stdin": f"'{spool / identity}.SC'\n", "cwd": extra["home"], "umask": 0o77,
        "stdout": str(output) if output else None,
        "env": _environment(job, folder, config, temporary),
    }  # fmt: skip


def _environment(
    job: dict[str, Any], folder: Path, config: dict[str, Any], temporary: Path
) -> dict[str, str]:
    torque, identity, extra, needs = (
        bool(config.get("torque")),
        text_of_id(job),
        job["extra"],
        job["needs"],
    )
    node, place = next(iter(job["nodes"].items()))
    env = {
        "HOME": extra["home"], "LOGNAME": job["user"], "USER": job["user"], "SHELL": "/bin/bash",
        "PATH": f"/usr/local/bin:/usr/bin:/bin:{folder}/bin", "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_JOBID": identity, "PBS_JOBNAME": job["name"], "PBS_NODEFILE": str(folder / "spool" / identity),
        "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_QUEUE": job["queue"], "PBS_O_HOME": extra["home"],
        "PBS_O_HOST": SERVER, "PBS_O_LOGNAME": job["user"], "PBS_O_PATH": extra["path"], "PBS_O_QUEUE": job["queue"],
        "PBS_O_SHELL": "/bin/bash", "PBS_O_WORKDIR": job["cwd"],
        # Not PBS's: all emulated nodes are one host, and this variable separates nodes.
        "SLURMD_NODENAME": node,
    }  # fmt: skip
    gpus = list(reversed(place["gpus"]))  # in no order, as measured
    if torque:
        env |= {
            "PBS_VERSION": "TORQUE-master",
            "PBS_GPUFILE": str(folder / "spool" / f"{identity}gpu"),
        }
        env |= {
            "PBS_NP": str(needs["nodes"] * needs["slots"]),
            "PBS_NUM_NODES": str(needs["nodes"]),
        }
        env |= {"PBS_NUM_PPN": str(needs["slots"]), "PBS_O_SERVER": SERVER, "PBS_VNODENUM": "0"}
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
        if job["index"] is not None:
            env |= {
                "PBS_ARRAYID": str(job["index"]),
                "PBS_JOBNAME": f"{job['name']}-{job['index']}",
            }
        return env
    env |= {
        "ENVIRONMENT": "BATCH",
        "NCPUS": str(needs["slots"]),
        "OMP_NUM_THREADS": str(needs["threads"]),
    }
    env |= {"PBS_JOBDIR": extra["home"], "PBS_O_SYSTEM": "Linux", "TMPDIR": str(temporary)}
    if config.get("hook") and gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(
            f"GPU-{node}-0000-0000-0000-{gpu:012d}" for gpu in gpus
        )
    if job["index"] is not None:
        env |= {"PBS_ARRAY_INDEX": str(job["index"]), "PBS_ARRAY_ID": f"{job['id']}[].{SERVER}"}
    return env


def _nodefile(job: dict[str, Any], torque: bool) -> str:
    lines = job["needs"]["slots"] if torque else job["needs"].get("mpiprocs", 1)
    return "".join(f"{node}\n" * lines for node in job["nodes"])


def _gpufile(job: dict[str, Any]) -> str:
    return "".join(
        f"{node}-gpu{gpu}\n"
        for node, place in job["nodes"].items()
        for gpu in reversed(place["gpus"])
    )


# -- qstat -------------------------------------------------------------------------------------------------------
class Table:
    """The list of the server: jobs, and the parents of arrays."""

    def __init__(self, folder: Path, config: dict[str, Any], kind: str = "query") -> None:
        self.config, self.torque = config, bool(config.get("torque"))
        answer = engine.ask(folder, kind, "jobs")
        self.fault = answer["fault"]
        oldest = time.time() - config.get("history", 3600)
        self.jobs = [
            job for job in answer.get("jobs", []) if job["state"] != "done" or job["ended"] > oldest
        ]

    def listed(self, members: bool) -> list[dict[str, Any]]:
        """Return jobs and parents of arrays, each as {"id": text, "of": jobs}; with ``members`` also those."""
        found: list[dict[str, Any]] = []
        for number in dict.fromkeys(job["id"] for job in self.jobs):
            jobs = [job for job in self.jobs if job["id"] == number]
            if jobs[0]["index"] is None:
                found.append({"id": text_of_id(jobs[0]), "of": jobs, "parent": False})
                continue
            if not (self.torque and members):
                found.append({"id": f"{number}[].{SERVER}", "of": jobs, "parent": True})
            if members:  # the server of PBS lists no members that wait
                shown = [job for job in jobs if self.torque or job["state"] != "waiting"]
                found += [{"id": text_of_id(job), "of": [job], "parent": False} for job in shown]
        return found

    def state(self, row: dict[str, Any]) -> str:
        states = {job["state"] for job in row["of"]}
        if row["parent"]:
            if states == {"done"}:
                return "C" if self.torque else "F"
            begun = states & {"running", "done"}
            return "Q" if not begun else "R" if self.torque else "B"
        job = row["of"][0]
        if job["state"] == "waiting" and job["comment"] == "dependency":
            return "H"
        if job["state"] == "done":
            return (
                "C"
                if self.torque
                else "X"
                if job["index"] is not None and not job["started"]
                else "F"
            )
        return {"waiting": "Q", "held": "H", "running": "R"}[job["state"]]


def _date(epoch: float | None) -> str:
    return time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(epoch))


def _typed(value: str) -> Any:
    return int(value) if re.fullmatch(r"-?\d+", value) else value


def _comment(job: dict[str, Any], torque: bool) -> str:
    if job["started"]:
        when = time.strftime("%a %b %d at %H:%M", time.localtime(job["started"]))
        if torque:
            return f"Job started on {when}"
        words = f"Job run at {when} on {_vnodes(job)}"
        if job["end"] == "delete":
            return f"{words} and terminated by {job['by']}@{SERVER}"
        if job["end"] == "timeout" and job["state"] == "done":
            return f"{words} and exceeded resource walltime"
        return (
            words
            if job["state"] != "done"
            else f"{words} and {'failed' if _exit_status(job, torque) else 'finished'}"
        )
    if job["comment"] == "never" and not torque:
        return "Can Never Run: Insufficient amount of resource: ngpus"
    if job["comment"]:
        return (
            "Not Running: Not enough of the right type of nodes are available"
            if torque
            else f"Not Running: Insufficient amount of resource: ngpus (R: {job['needs']['gpus']} A: 0 T: 16)"
        )
    return ""


def _vnodes(job: dict[str, Any]) -> str:
    needs = f"ncpus={job['needs']['slots']}" + (
        f":ngpus={job['needs']['gpus']}" if job["needs"]["gpus"] else ""
    )
    return "+".join(f"({node}:{needs})" for node in job["nodes"])


def _exit_status(job: dict[str, Any], torque: bool) -> int | None:
    if job["state"] != "done" or not job["started"]:
        return None
    if job["end"] == "timeout":
        return -11 if torque else -29
    return job["exit_code"] if job["signal"] is None else 256 + int(job["signal"])


def _substate(job: dict[str, Any]) -> int:
    if job["state"] != "done":
        return {"waiting": 10, "held": 20, "running": 42}[job["state"]]
    return 91 if job["end"] == "delete" else 93 if _exit_status(job, False) else 92


def attributes(table: Table, row: dict[str, Any]) -> dict[str, Any]:
    """Return a job in PBS's JSON."""
    job, parent, state = row["of"][0], row["parent"], table.state(row)
    extra, started = (
        job["extra"],
        next((one["started"] for one in row["of"] if one["started"]), None),
    )
    active = state not in "FX"
    found: dict[str, Any] = {"Job_Name": job["name"], "Job_Owner": f"{job['user']}@{SERVER}"}
    if started and not parent:
        seconds = int((job["ended"] or time.time()) - started)
        used = {
            "cpupercent": 0,
            "cput": "00:00:00",
            "mem": "0kb",
            "ncpus": job["needs"]["slots"],
            "vmem": "0kb",
        }
        found["resources_used"] = {
            **used,
            "walltime": time.strftime("%H:%M:%S", time.gmtime(seconds)),
        }
    found |= {
        "job_state": state,
        "queue": job["queue"],
        "server": SERVER,
        "Checkpoint": "u",
        "ctime": _date(job["submitted"]),
    }
    found["Error_Path"] = f"{SERVER}:{job['cwd']}/{job['name']}.e{job['id']}"
    if started and not parent:
        found |= {
            "exec_host": "+".join(f"{node}/0" for node in job["nodes"]),
            "exec_vnode": _vnodes(job),
        }
    found |= {
        "Hold_Types": "u" if state == "H" else "n",
        "Join_Path": extra["options"].get("j", "n"),
    }
    found |= {
        "Keep_Files": extra["options"].get("k", "n"),
        "Mail_Points": extra["options"].get("m", "a"),
    }
    found |= {
        "mtime": _date(job["ended"] or started or job["submitted"]),
        "Output_Path": f"{SERVER}:{output_of(job, False)}",
    }
    found |= {
        "Priority": 0,
        "qtime": _date(job["submitted"]),
        "Rerunable": "False" if extra["options"].get("r") == "n" else "True",
    }
    resources = {key: _typed(value) for key, value in extra["resources"].items()}
    if job["needs"]["gpus"]:
        resources["ngpus"] = job["needs"]["gpus"] * job["needs"]["nodes"]
    found["Resource_List"] = {
        "ncpus": job["needs"]["slots"] * job["needs"]["nodes"], "nodect": job["needs"]["nodes"], "place": "pack", **resources,
    }  # fmt: skip
    if started:
        found["stime"] = _date(started)
        if not active:
            found["obittime"] = _date(job["ended"])
        if not parent:
            found |= {"session_id": job["pid"], "jobdir": extra["home"]}
    substates = {_substate(one) for one in row["of"]}
    found["substate"] = (
        _substate(job)
        if not parent
        else {"Q": 10, "B": 70}.get(state, max(substates - {91}, default=91))
    )
    found["Variable_List"] = {
        "PBS_O_HOME": extra["home"], "PBS_O_LOGNAME": job["user"], "PBS_O_PATH": extra["path"], "PBS_O_SHELL": "/bin/bash",
        "PBS_O_INTERACTIVE_AUTH_METHOD": "resvport", "PBS_O_INTERACTIVE_ENCRYPT_METHOD": "", "PBS_O_WORKDIR": job["cwd"],
        "PBS_O_SYSTEM": "Linux", "PBS_O_QUEUE": job["queue"], "PBS_O_HOST": SERVER,
    }  # fmt: skip
    comment = (
        f"Job Array Began at {time.strftime('%a %b %d at %H:%M', time.localtime(started))}"
        if parent and started
        else ""
    )
    if comment := comment or _comment(job, False):
        found["comment"] = comment
    if job["state"] != "held":
        found["etime"] = _date(job["submitted"])
    if started and not parent:
        found["run_count"] = 1
    code = 0 if parent and not active else _exit_status(job, False)
    if code is not None and not active and started:
        found |= {"Stageout_status": 1, "Exit_status": code}
    if parent or job["index"] is None:
        found["Submit_arguments"] = extra["arguments"]
    if parent:
        waiting = [one["index"] for one in row["of"] if one["state"] == "waiting"]
        first, last = row["of"][0]["index"], row["of"][-1]["index"]
        running = sum(one["state"] == "running" for one in row["of"])
        found |= {
            "array": "True", "array_state_count": f"Queued:{len(waiting)} Running:{running} Exiting:0 Expired:0",
            "array_indices_submitted": f"{first}-{last}", "array_indices_remaining": _ranges(waiting) or "-",
        }  # fmt: skip
    elif job["index"] is not None:
        found |= {"array_id": f"{job['id']}[].{SERVER}", "array_index": job["index"]}
    return {**found, "project": "_pbs_project_default", "Submit_Host": SERVER}


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def one_a_line(table: Table, row: dict[str, Any]) -> str:
    """Return a job as Torque's ``-f1`` prints it."""
    job, parent, state = row["of"][0], row["parent"], table.state(row)
    extra, code = job["extra"], _exit_status(job, True)
    name = job["name"] if parent or job["index"] is None else f"{job['name']}-{job['index']}"
    found: dict[str, Any] = {"Job_Name": name, "Job_Owner": f"{job['user']}@{SERVER}"}
    if job["started"] and job["ended"] and not parent:
        seconds = int(job["ended"] - job["started"])
        found["resources_used.walltime"] = time.strftime("%H:%M:%S", time.gmtime(seconds))
    found |= {
        "job_state": state,
        "queue": job["queue"],
        "server": SERVER,
        "Checkpoint": "u",
        "ctime": _date(job["submitted"]),
    }
    if job["started"] and not parent:
        found["exec_host"] = "+".join(
            f"{node}/{slot}" for node, place in job["nodes"].items() for slot in place["slots"]
        )
        if gpus := "+".join(
            f"{node}-gpu/{gpu}" for node, place in job["nodes"].items() for gpu in place["gpus"]
        ):
            found["exec_gpus"] = gpus
    found |= {
        "Hold_Types": "u" if state == "H" else "n",
        "Join_Path": extra["options"].get("j", "n"),
        "Keep_Files": "n",
    }
    found |= {
        "Output_Path": f"{SERVER}:{output_of(job, True)}",
        "Priority": 0,
        "qtime": _date(job["submitted"]),
        "Rerunable": "False",
    }
    found |= {f"Resource_List.{key}": value for key, value in extra["resources"].items()}
    variables = {
        "PBS_O_QUEUE": job["queue"],
        "PBS_O_HOME": extra["home"],
        "PBS_O_WORKDIR": job["cwd"],
    }
    found["Variable_List"] = ",".join(f"{key}={value}" for key, value in variables.items())
    if (comment := _comment(job, True)) and not parent:
        found["comment"] = comment
    if code is not None and not parent:
        found["exit_status"] = code
    found["submit_args"] = extra["arguments"]
    if parent:
        found["job_array_request"] = f"{row['of'][0]['index']}-{row['of'][-1]['index']}"
    elif job["index"] is not None:
        found["job_array_id"] = job["index"]
    return "\n".join(
        [f"Job Id: {row['id']}", *(f"    {key} = {value}" for key, value in found.items()), "", ""]
    )


def qstat(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    torque = bool(config.get("torque"))
    try:
        given, names = getopt.gnu_getopt(
            arguments, "f1xtaQBu:" if torque else "fxtaQBwF:u:", ["version"]
        )
    except getopt.GetoptError as error:
        print(f"qstat: invalid option -- '{error.opt}'\nusage: ", file=sys.stderr)
        return 2
    options = dict(given)
    if "--version" in options:
        print(
            "Version: master\nCommit: " if torque else "pbs_version = 23.06.06",
            file=sys.stderr if torque else sys.stdout,
        )
        return 0
    head = {"timestamp": int(time.time()), "pbs_version": "23.06.06", "pbs_server": SERVER}
    as_json = options.get("-F") == "json"
    try:
        table = Table(folder, config)
    except engine.Away:
        if as_json:
            print(_json(head))
        raise
    if "-B" in options:
        size = config.get("max_array_size", 10000)
        if torque:
            print(f"Server: {SERVER}\n    server_state = Active\n    max_job_array_size = {size}\n")
            return 0
        server = {"server_state": "Active", "max_array_size": size}
        print(_json({**head, "Server": {SERVER: server}}))
        return 0
    if "-Q" in options:
        _print_queues(config, table, head)
        return 0
    if not torque and "-x" in options and config.get("history") == 0:
        print("qstat: PBS is not configured to maintain job history", file=sys.stderr)
        return 15140 % 256
    if as_json and engine.quirk(folder, config, "first_id_only"):
        names = names[:1]
    rows, code = _chosen(table, names, "-t" in options, "-x" in options, torque)
    if table.fault == "garble":
        print('{\n\t"timestamp":\t17951\x00,\n\t"Jobs":\t{\n\t\t"1.node1":\t{\n\t\t\t"job_st')
    elif as_json:
        jobs = {row["id"]: attributes(table, row) for row in rows}
        print(_json({**head, **({"Jobs": jobs} if jobs else {})}))
    elif "-f" in options:
        print("".join(one_a_line(table, row) for row in rows), end="")
    elif rows:
        _print_table(table, rows, torque)
    return code


def _print_queues(config: dict[str, Any], table: Table, head: dict[str, Any]) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name, queue in config["queues"].items():
        jobs = [job["state"] for job in table.jobs if job["queue"] == name]
        numbers = {"Queued": "waiting", "Held": "held", "Running": "running"}
        counts = " ".join(f"{word}:{jobs.count(state)}" for word, state in numbers.items())
        found[name] = {"queue_type": "Execution", "total_jobs": len(jobs), "state_count": f"Transit:0 {counts} "}  # fmt: skip
        if seconds := queue.get("max_walltime"):
            minutes = seconds // 60
            clock = f"{minutes // 60:02}:{minutes % 60:02}:{seconds % 60:02}"
            found[name]["resources_max"] = {"walltime": clock}
        enabled = str(queue.get("enabled", True))
        found[name] |= {"enabled": enabled, "started": enabled}
    if not table.torque:
        print(_json({**head, "Queue": found}))
        return
    for name, attributes in found.items():
        rows = dict(attributes)
        most = rows.pop("resources_max", {})
        rows |= {f"resources_max.{key}": value for key, value in most.items()}
        print("\n".join([f"Queue: {name}", *(f"    {key} = {rows[key]}" for key in rows), ""]))


def _chosen(
    table: Table, names: list[str], members: bool, finished: bool, torque: bool
) -> tuple[list[dict[str, Any]], int]:
    everything, code, rows = table.listed(members), 0, []
    every = {row["id"]: row for row in [*table.listed(True), *table.listed(False)]}
    if not names:
        return [row for row in everything if torque or finished or table.state(row) not in "FX"], 0
    for name in names:
        identity = name if "." in name else f"{name}.{SERVER}"
        if not identity[0].isdigit():
            print(f"qstat: Unknown queue destination {name}", file=sys.stderr)
            code = 172 if torque else 170
        elif identity not in every:
            print(f"qstat: Unknown Job Id {'Error ' if torque else ''}{identity}", file=sys.stderr)
            code = 153
        elif not torque and not finished and table.state(every[identity]) in "FX":
            words = "Job has finished, use -x or -H to obtain historical job information"
            print(f"qstat: {identity} {words}", file=sys.stderr)
            code = 35
        elif torque and every[identity]["parent"] and not members:
            rows = everything  # as measured
        elif members and every[identity]["parent"]:
            number = every[identity]["of"][0]["id"]
            rows += [row for row in everything if row["of"][0]["id"] == number]
        else:
            rows.append(every[identity])
    return rows, code


def _print_table(table: Table, rows: list[dict[str, Any]], torque: bool) -> None:
    if torque:
        print("Job ID                    Name             User            Time Use S Queue")
        print("------------------------- ---------------- --------------- -------- - -----")
    else:
        print("Job id            Name             User              Time Use S Queue")
        print("----------------  ---------------- ----------------  -------- - -----")
    for row in rows:
        job = row["of"][0]
        used = "00:00:00" if job["started"] and not row["parent"] else "0"
        if torque:
            print(
                f"{row['id']:<26} {job['name']:<16} {job['user']:<15} {used:>8} {table.state(row)} {job['queue']:<15}"
            )
        else:
            print(
                f"{row['id']:<17} {job['name']:<16} {job['user']:<17} {used:>8} {table.state(row)} {job['queue']:<16}"
            )


def _json(value: Any) -> str:
    return json.dumps(value, indent="\t", separators=(",", ":\t"))


# -- the other commands ------------------------------------------------------------------------------------------
def qdel(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    torque, code, targets = bool(config.get("torque")), 0, []
    for name in arguments:
        found = re.fullmatch(r"(\d+)(?:\[(\d*|\d+-\d+)\])?(\..*)?", name)
        if not found:
            print(f"qdel: illegally formed job identifier: {name}", file=sys.stderr)
            return 1
        targets.append((name, int(found[1]), found[2]))
    jobs = Table(folder, config, "test").jobs
    if engine.quirk(folder, config, "qdel_aborts") and len(targets) > 1:
        lone_first = sorted(targets, key=lambda target: target[2] is not None) == targets
        if any("." not in name for name, _, _ in targets) and not lone_first:
            if len(targets) > 3:
                return 0
            print("double free or corruption (out)", file=sys.stderr)
            return 134
        waiting = {
            (job["id"], str(job["index"])) for job in jobs if job["state"] in ("waiting", "held")
        }
        if waiting & {target[1:] for target in targets}:
            engine.ask(folder, "delete", "crash")
            raise engine.Away
    arrays = {job["id"]: job["index"] is not None for job in jobs}
    for name, number, indexes in targets:
        results = ["unknown"]
        if arrays.get(number) is (indexes is not None) or number not in arrays:
            wanted = [[number, index] for index in _indexes(indexes or "")]
            answer = engine.ask(folder, "delete", "delete", targets=wanted)
            if answer["fault"] in ("refuse", "garble"):
                print("%& \ufffd")
                return 1
            results = sorted(answer["results"], key=["deleted", "denied", "done", "unknown"].index)
        identity = name if "." in name else f"{name}.{SERVER}"
        words, ends = {
            "unknown": (
                f"nonexistent job id: {name}" if torque else f"Unknown Job Id {identity}",
                153,
            ),
            "done": (
                (
                    f"Request invalid for state of job MSG=invalid state for job - COMPLETE {identity}",
                    170,
                )
                if torque
                else (f"Job has finished {identity}", 35)
            ),
            "denied": (f"Unauthorized Request  {identity}", 159),
            "deleted": ("", 0),
        }[results[0]]
        if words:
            print(f"qdel: {words}", file=sys.stderr)
            code = ends
    return code


def _indexes(text: str) -> list[int | None]:
    """Return the indexes of ``3`` or ``1-3``; None, which is all of them, for no text."""
    first, _, last = text.partition("-")
    return [*range(int(first), int(last or first) + 1)] if text else [None]


def qselect(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    given, _ = getopt.getopt(arguments, "u:N:q:xs:")
    options, table = dict(given), Table(folder, config)
    for row in table.listed(False):
        job = row["of"][0]
        if table.state(row) in "FXC" or options.get("-u", job["user"]) != job["user"]:
            continue
        if options.get("-N", job["name"]) == job["name"]:
            print(row["id"])
    return 0


def pbsnodes(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    running = [job for job in Table(folder, config).jobs if job["state"] == "running"]
    places = {
        node: [(text_of_id(job), job["nodes"][node]) for job in running if node in job["nodes"]]
        for node in config["nodes"]
    }
    memory = config.get("memory", 32)
    if config.get("torque"):
        for node in places:
            jobs = ",".join(f"{_ranges(place['slots'])}/{id_}" for id_, place in places[node])
            places[node] = [
                f"<Node><name>{node}</name><state>free</state><power_state>Running</power_state>"
                f"<np>{config['slots']}</np><ntype>cluster</ntype>{f'<jobs>{jobs}</jobs>' if jobs else ''}"
                f"<status>opsys=linux,uname=Linux {node},physmem={memory * 2**20}kb,ncpus=2,state=free</status>"
                f"<gpus>{config['gpus']}</gpus></Node>"
            ]
        print(f"<Data>{''.join(text for texts in places.values() for text in texts)}</Data>")
        return 0
    found = {}
    for node, taken in places.items():
        used = {name: sum(len(place[kind]) for _, place in taken) for name, kind in (("ncpus", "slots"), ("ngpus", "gpus"))}  # fmt: skip
        has = {"arch": "linux", "host": node, "mem": f"{memory}gb", "ncpus": config["slots"], "ngpus": config["gpus"], "vnode": node}  # fmt: skip
        found[node] = {
            "Mom": node, "ntype": "PBS", "state": "job-busy" if used["ncpus"] == config["slots"] else "free",
            "jobs": [id_ for id_, _ in taken], "resources_available": has,
            "resources_assigned": {name: number for name, number in used.items() if number},
        }  # fmt: skip
    head = {"timestamp": int(time.time()), "pbs_version": "23.06.06", "pbs_server": SERVER}
    print(_json({**head, "nodes": found}))
    return 0


def qmgr(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    """Print the resources that the site has made; users may ask for nothing else here."""
    engine.ask(folder, "query", "jobs")
    if arguments != ["-c", "list resource"]:
        return 1
    names = ["ngpus", *config.get("resources", ())]
    print("#\n# Create resources and set their properties.\n#")
    for name in names:
        print(
            f"Resource {name}\n    type = {'long' if name in NUMERIC else 'string'}\n    flag = hn\n"
        )
    return 0


def _away(command: str, torque: bool) -> int:
    if torque:
        print(f"\nUnable to communicate with {SERVER}(192.0.2.11)", file=sys.stderr)
        print(f"Cannot connect to specified server host '{SERVER}'.", file=sys.stderr)
        if command == "pbsnodes":
            print(
                f"{command}: cannot connect to server {SERVER}, error=111 (Connection refused)",
                file=sys.stderr,
            )
            return 1
        print(
            f"{command}: cannot connect to server {SERVER} (errno=111) Connection refused",
            file=sys.stderr,
        )
        return 111
    if command == "qdel":
        print(f"Connection refused\nCouldn't connect to cluster: {SERVER}", file=sys.stderr)
        return 162
    number = ", error=15010" if command == "pbsnodes" else " (errno=15010)"
    print(
        f"Connection refused\n{command}: cannot connect to server {SERVER}{number}", file=sys.stderr
    )
    return {"qsub": 162, "pbsnodes": 1}.get(command, 255)


def _use(config: dict[str, Any]) -> None:
    global SERVER
    SERVER = config.get("server", SERVER)


def _server(folder: Path, arguments: list[str]) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the configuration of the server that a command talks with."""
    config = json.loads((folder / "config.json").read_text())
    named = [word.partition(sign)[2] for word in arguments for sign in ".@" if sign in word]
    named += [os.environ.get(name, "") for name in ("PBS_SERVER", "PBS_DEFAULT")]
    for name in named:
        if name in config.get("peers", {}):
            return _server(Path(config["peers"][name]), [])
    return folder, config


def main(argv: list[str]) -> int:
    command, arguments = argv[1], argv[2:]
    folder, config = _server(Path(argv[0]), arguments)
    _use(config)
    try:
        if command == "qsub":
            return Qsub(folder, config).run(arguments)
        return int(globals()[command](folder, config, arguments))
    except engine.Away:
        return _away(command, bool(config.get("torque")))
    except engine.Busy:
        print(
            f"{command}: cannot connect to server {SERVER} (errno=15031) Server is too busy",
            file=sys.stderr,
        )
        return 15031 % 256
    except Refused as refused:
        print(refused.words, file=sys.stderr)
        return refused.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
