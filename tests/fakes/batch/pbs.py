"""OpenPBS on `engine`: its output, refusals and variables are those recorded from the real one; `torque` builds on it.

``python pbs.py FOLDER qsub|qstat|qdel|qselect|pbsnodes|qmgr ARGUMENTS``. ``config.json`` has besides the engine's keys::

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
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import engine
from qsub import NUMERIC, Qsub, Refused

Job = dict[str, Any]
"""A job of the engine."""


class Row(NamedTuple):
    """A line of qstat: a job, or an array with its members."""

    id: str
    of: list[Job]
    parent: bool


class Server:
    """The commands of a server, and what it does on the node of a job."""

    qsub_class: type[Qsub] = Qsub
    qstat_options = "fxtaQBwF:u:"
    over_walltime = -29
    done, begun, never = "F", "B", "X"
    """States of a job that ended, of an array that began, and of a member that never did."""
    no_destination, unknown_job = 170, "Unknown Job Id "
    header = """\
Job id            Name             User              Time Use S Queue
----------------  ---------------- ----------------  -------- - -----"""
    line = "{:<17} {:<16} {:<17} {:>8} {} {:<16}"

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder, self.config, self.name = folder, config, config.get("server", "node1")
        self.jobs: list[Job] = []
        self.fault = ""

    def qsub(self, arguments: list[str]) -> int:
        return self.qsub_class(self.folder, self.config, self.name).run(arguments)

    def text_of_id(self, job: Job) -> str:
        index = "" if job["index"] is None else f"[{job['index']}]"
        return f"{job['id']}{index}.{self.name}"

    # -- a job on its node -----------------------------------------------------------------------------------
    def launch(self, job: Job) -> dict[str, Any]:
        """A login shell gets the script's name on its standard input, in the user's home with a bare environment."""
        identity, extra = self.text_of_id(job), job["extra"]
        spool = self.folder / "spool"
        temporary = spool / f"pbs.{identity}"
        temporary.mkdir(exist_ok=True, parents=True)
        files = {spool / f"{identity}.SC": job["script"], **self.files(job, spool / identity)}
        for path, text in files.items():
            path.write_text(text)
            path.chmod(0o700)
        output = self.delivered(job)
        if output:
            output.touch()
            files[output] = ""
        if os.geteuid() == 0:
            for path in (*files, temporary):
                os.chown(path, job["uid"], pwd.getpwuid(job["uid"]).pw_gid)
        shell = extra["options"].get("S", "/bin/bash")
        return {
            "argv": [shell], "stdin": f"'{spool / identity}.SC'\n", "cwd": extra["home"], "umask": 0o77,
            "stdout": str(output) if output else None, "env": self._environment(job, temporary),
        }  # fmt: skip

    def files(self, job: Job, start: Path) -> dict[Path, str]:
        """Return the files that name the nodes of a job."""
        return {start: "".join(f"{node}\n" * job["needs"]["mpiprocs"] for node in job["nodes"])}

    def output_of(self, job: Job) -> str:
        path = re.sub(r"^[^/:]*:", "", job["extra"]["options"].get("o", ""))
        path = str(Path(job["cwd"]) / (path or f"{job['name']}.o{job['id']}"))
        if job["index"] is not None:
            path = self.output_of_member(path, job["index"])
        try:
            is_folder = Path(path).is_dir()
        except PermissionError:  # another user's, asked by qstat
            is_folder = False
        return f"{path}/{self.text_of_id(job)}.OU" if is_folder else path

    def output_of_member(self, path: str, index: int) -> str:
        return path.replace("^array_index^", str(index))

    def delivered(self, job: Job) -> Path | None:
        """Return the file that gets the output."""
        path = Path(self.output_of(job))
        return path if path.parent.is_dir() else None

    def _environment(self, job: Job, temporary: Path) -> dict[str, str]:
        identity, extra = self.text_of_id(job), job["extra"]
        node, place = next(iter(job["nodes"].items()))
        env = {
            "HOME": extra["home"], "LOGNAME": job["user"], "USER": job["user"], "SHELL": "/bin/bash",
            "PATH": f"/usr/local/bin:/usr/bin:/bin:{self.folder}/bin", "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_JOBID": identity, "PBS_JOBNAME": job["name"], "PBS_NODEFILE": str(self.folder / "spool" / identity),
            "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_QUEUE": job["queue"], "PBS_O_HOME": extra["home"],
            "PBS_O_HOST": self.name, "PBS_O_LOGNAME": job["user"], "PBS_O_PATH": extra["path"],
            "PBS_O_QUEUE": job["queue"], "PBS_O_SHELL": "/bin/bash", "PBS_O_WORKDIR": job["cwd"],
            # Not PBS's: all emulated nodes are one host, and this variable separates nodes.
            "SLURMD_NODENAME": node,
        }  # fmt: skip
        gpus = list(reversed(place["gpus"]))  # in no order, as measured
        return env | self.own_environment(job, node, gpus, temporary)

    def own_environment(
        self, job: Job, node: str, gpus: list[int], temporary: Path
    ) -> dict[str, str]:
        env = {
            "ENVIRONMENT": "BATCH", "NCPUS": str(job["needs"]["slots"]), "OMP_NUM_THREADS": str(job["needs"]["threads"]),
            "PBS_JOBDIR": job["extra"]["home"], "PBS_O_SYSTEM": "Linux", "TMPDIR": str(temporary),
        }  # fmt: skip
        if self.config.get("hook") and gpus:
            names = [f"GPU-{node}-0000-0000-0000-{gpu:012d}" for gpu in gpus]
            env["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        if job["index"] is not None:
            array = f"{job['id']}[].{self.name}"
            env |= {"PBS_ARRAY_INDEX": str(job["index"]), "PBS_ARRAY_ID": array}
        return env

    # -- qstat -----------------------------------------------------------------------------------------------
    def look(self, kind: str = "query") -> None:
        """Ask for the list of jobs."""
        answer = engine.ask(self.folder, kind, "jobs")
        oldest = time.time() - self.config.get("history", 3600)
        known = [j for j in answer.get("jobs", []) if j["state"] != "done" or j["ended"] > oldest]
        self.jobs, self.fault = known, answer["fault"]

    def listed(self, members: bool) -> list[Row]:
        """Return jobs and arrays; with ``members`` also those."""
        found: list[Row] = []
        for number in dict.fromkeys(job["id"] for job in self.jobs):
            jobs = [job for job in self.jobs if job["id"] == number]
            if jobs[0]["index"] is None:
                found.append(Row(self.text_of_id(jobs[0]), jobs, False))
            else:
                found += self.listed_array(Row(f"{number}[].{self.name}", jobs, True), members)
        return found

    def listed_array(self, array: Row, members: bool) -> list[Row]:
        """The server lists no members that wait."""
        shown = [job for job in array.of if members and job["state"] != "waiting"]
        return [array, *(Row(self.text_of_id(job), [job], False) for job in shown)]

    def state(self, row: Row) -> str:
        job = row.of[0]
        if row.parent:
            states = {job["state"] for job in row.of}
            begun = self.begun if states & {"running", "done"} else "Q"
            return self.done if states == {"done"} else begun
        if job["state"] == "waiting" and job["comment"] == "dependency":
            return "H"
        never = job["index"] is not None and not job["started"]
        done = self.never if never else self.done
        return {"waiting": "Q", "held": "H", "running": "R", "done": done}[job["state"]]

    def exit_status(self, job: Job) -> int | None:
        if job["state"] != "done" or not job["started"]:
            return None
        if job["end"] == "timeout":
            return self.over_walltime
        return job["exit_code"] if job["signal"] is None else 256 + int(job["signal"])

    def qstat(self, arguments: list[str]) -> int:
        try:
            given, names = getopt.gnu_getopt(arguments, self.qstat_options, ["version"])
        except getopt.GetoptError as error:
            print(f"qstat: invalid option -- '{error.opt}'\nusage: ", file=sys.stderr)
            return 2
        options = dict(given)
        if "--version" in options:
            self.print_version()
            return 0
        try:
            self.look()
        except engine.Away:
            if "-F" in options:
                self._print_json()
            raise
        if "-B" in options:
            self.print_server(self.config.get("max_array_size", 10000))
            return 0
        if "-Q" in options:
            self.print_queues(self._queues())
            return 0
        if "-x" in options and self.config.get("history") == 0:
            print("qstat: PBS is not configured to maintain job history", file=sys.stderr)
            return 15140 % 256
        if "-F" in options and engine.quirk(self.folder, self.config, "first_id_only"):
            names = names[:1]
        rows, code = self._chosen(names, "-t" in options, "-x" in options)
        if self.fault == "garble":
            print('{\n\t"timestamp":\t17951\x00,\n\t"Jobs":\t{\n\t\t"1.node1":\t{\n\t\t\t"job_st')
        elif {"-f", "-F"} & set(options):
            self.print_jobs(rows)
        elif rows:
            self._print_table(rows)
        return code

    def _chosen(self, names: list[str], members: bool, finished: bool) -> tuple[list[Row], int]:
        every = {row.id: row for row in [*self.listed(True), *self.listed(False)]}
        if not names:
            shown = self.listed(members)
            return [row for row in shown if finished or self.state(row) not in "FX"], 0
        code, rows = 0, []
        for name in names:
            identity = name if "." in name else f"{name}.{self.name}"
            words = ""
            if not identity[0].isdigit():
                words, code = f"Unknown queue destination {name}", self.no_destination
            elif identity not in every:
                words, code = self.unknown_job + identity, 153
            elif not finished and self.state(every[identity]) in "FX":
                why = "Job has finished, use -x or -H to obtain historical job information"
                words, code = f"{identity} {why}", 35
            else:
                rows += [r for r in self.rows_of(every[identity], members) if r not in rows]
            if words:
                print(f"qstat: {words}", file=sys.stderr)
        return rows, code

    def rows_of(self, row: Row, members: bool) -> list[Row]:
        if not (members and row.parent):
            return [row]
        return [one for one in self.listed(True) if one.of[0]["id"] == row.of[0]["id"]]

    def print_version(self) -> None:
        print("pbs_version = 23.06.06")

    def print_server(self, most: int) -> None:
        self._print_json(Server={self.name: {"server_state": "Active", "max_array_size": most}})

    def print_queues(self, queues: dict[str, dict[str, Any]]) -> None:
        self._print_json(Queue=queues)

    def print_jobs(self, rows: list[Row]) -> None:
        self._print_json(**({"Jobs": {row.id: self._attributes(row) for row in rows}} if rows else {}))  # fmt: skip

    def _print_json(self, **values: Any) -> None:
        head = {"timestamp": int(time.time()), "pbs_version": "23.06.06", "pbs_server": self.name}
        print(json.dumps({**head, **values}, indent="\t", separators=(",", ":\t")))

    def _queues(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, queue in self.config["queues"].items():
            jobs = [job["state"] for job in self.jobs if job["queue"] == name]
            numbers = {"Queued": "waiting", "Held": "held", "Running": "running"}
            counts = " ".join(f"{word}:{jobs.count(state)}" for word, state in numbers.items())
            found[name] = {"queue_type": "Execution", "total_jobs": len(jobs), "state_count": f"Transit:0 {counts} "}  # fmt: skip
            if seconds := queue.get("max_walltime"):
                minutes = seconds // 60
                clock = f"{minutes // 60:02}:{minutes % 60:02}:{seconds % 60:02}"
                found[name]["resources_max"] = {"walltime": clock}
            enabled = str(queue.get("enabled", True))
            found[name] |= {"enabled": enabled, "started": enabled}
        return found

    def _print_table(self, rows: list[Row]) -> None:
        print(self.header)
        for row in rows:
            job = row.of[0]
            used = "00:00:00" if job["started"] and not row.parent else "0"
            state = self.state(row)
            print(self.line.format(row.id, job["name"], job["user"], used, state, job["queue"]))

    def head_of_job(self, row: Row) -> dict[str, Any]:
        """Return the attributes that each kind of server lists first."""
        job, state = row.of[0], self.state(row)
        return {
            "Job_Name": job["name"], "Job_Owner": f"{job['user']}@{self.name}", "job_state": state,
            "queue": job["queue"], "server": self.name, "Checkpoint": "u", "ctime": date(job["submitted"]),
            "Hold_Types": "u" if state == "H" else "n", "Join_Path": job["extra"]["options"].get("j", "n"),
            "Output_Path": f"{self.name}:{self.output_of(job)}", "Priority": 0, "qtime": date(job["submitted"]),
        }  # fmt: skip

    def _attributes(self, row: Row) -> dict[str, Any]:
        """Return a job in PBS's JSON."""
        job, extra, ended = row.of[0], row.of[0]["extra"], self.state(row) in "FX"
        started = next((one["started"] for one in row.of if one["started"]), None)
        found = self.head_of_job(row) | {
            "Error_Path": f"{self.name}:{job['cwd']}/{job['name']}.e{job['id']}",
            "Keep_Files": extra["options"].get("k", "n"), "Mail_Points": extra["options"].get("m", "a"),
            "mtime": date(job["ended"] or started or job["submitted"]),
            "Rerunable": "False" if extra["options"].get("r") == "n" else "True",
            "Resource_List": self._resources(job), "substate": self._substate(row),
            "Variable_List": {
                "PBS_O_HOME": extra["home"], "PBS_O_LOGNAME": job["user"], "PBS_O_PATH": extra["path"], "PBS_O_SHELL": "/bin/bash",
                "PBS_O_INTERACTIVE_AUTH_METHOD": "resvport", "PBS_O_INTERACTIVE_ENCRYPT_METHOD": "", "PBS_O_WORKDIR": job["cwd"],
                "PBS_O_SYSTEM": "Linux", "PBS_O_QUEUE": job["queue"], "PBS_O_HOST": self.name,
            },
            "project": "_pbs_project_default", "Submit_Host": self.name,
        }  # fmt: skip
        if started:
            found["stime"] = date(started)
            if ended:
                found["obittime"] = date(job["ended"])
            if not row.parent:
                found |= self._attributes_of_start(job)
        comment = self._comment(job)
        if row.parent and started:
            comment = f"Job Array Began at {time.strftime('%a %b %d at %H:%M', time.localtime(started))}"  # fmt: skip
        if comment:
            found["comment"] = comment
        if job["state"] != "held":
            found["etime"] = date(job["submitted"])
        code = 0 if row.parent and ended else self.exit_status(job)
        if code is not None and ended and started:
            found |= {"Stageout_status": 1, "Exit_status": code}
        if row.parent or job["index"] is None:
            found["Submit_arguments"] = extra["arguments"]
        if row.parent:
            found |= self._attributes_of_array(row)
        elif job["index"] is not None:
            found |= {"array_id": f"{job['id']}[].{self.name}", "array_index": job["index"]}
        return found

    def _attributes_of_start(self, job: Job) -> dict[str, Any]:
        used = time.gmtime(int((job["ended"] or time.time()) - job["started"]))
        return {
            "resources_used": {
                "cpupercent": 0, "cput": "00:00:00", "mem": "0kb", "ncpus": job["needs"]["slots"], "vmem": "0kb",
                "walltime": time.strftime("%H:%M:%S", used),
            },
            "exec_host": "+".join(f"{node}/0" for node in job["nodes"]), "exec_vnode": self._vnodes(job),
            "session_id": job["pid"], "jobdir": job["extra"]["home"], "run_count": 1,
        }  # fmt: skip

    def _attributes_of_array(self, row: Row) -> dict[str, Any]:
        waiting = [one["index"] for one in row.of if one["state"] == "waiting"]
        running = sum(one["state"] == "running" for one in row.of)
        return {
            "array": "True", "array_state_count": f"Queued:{len(waiting)} Running:{running} Exiting:0 Expired:0",
            "array_indices_submitted": f"{row.of[0]['index']}-{row.of[-1]['index']}",
            "array_indices_remaining": ranges(waiting) or "-",
        }  # fmt: skip

    def _resources(self, job: Job) -> dict[str, Any]:
        needs = job["needs"]
        given = job["extra"]["resources"].items()
        typed = {key: int(text) if re.fullmatch(r"-?\d+", text) else text for key, text in given}
        if needs["gpus"]:
            typed["ngpus"] = needs["gpus"] * needs["nodes"]
        return {"ncpus": needs["slots"] * needs["nodes"], "nodect": needs["nodes"], "place": "pack", **typed}  # fmt: skip

    def _substate(self, row: Row) -> int:
        def of(job: Job) -> int:
            if job["state"] != "done":
                return {"waiting": 10, "held": 20, "running": 42}[job["state"]]
            return 91 if job["end"] == "delete" else 93 if self.exit_status(job) else 92

        if not row.parent:
            return of(row.of[0])
        begun = max({of(job) for job in row.of} - {91}, default=91)
        return {"Q": 10, "B": 70}.get(self.state(row), begun)

    def _vnodes(self, job: Job) -> str:
        gpus = f":ngpus={job['needs']['gpus']}" if job["needs"]["gpus"] else ""
        needs = f"ncpus={job['needs']['slots']}{gpus}"
        return "+".join(f"({node}:{needs})" for node in job["nodes"])

    def _comment(self, job: Job) -> str:
        if job["started"]:
            when = time.strftime("%a %b %d at %H:%M", time.localtime(job["started"]))
            return f"Job run at {when} on {self._vnodes(job)}{self._end(job)}"
        lacks = "Insufficient amount of resource: ngpus"
        if job["comment"] == "never":
            return f"Can Never Run: {lacks}"
        needs = f"(R: {job['needs']['gpus']} A: 0 T: 16)"
        return f"Not Running: {lacks} {needs}" if job["comment"] else ""

    def _end(self, job: Job) -> str:
        if job["end"] == "delete":
            return f" and terminated by {job['by']}@{self.name}"
        if job["state"] != "done":
            return ""
        if job["end"] == "timeout":
            return " and exceeded resource walltime"
        return " and failed" if self.exit_status(job) else " and finished"

    # -- the other commands ----------------------------------------------------------------------------------
    def qdel(self, arguments: list[str]) -> int:
        code, targets = 0, []
        for name in arguments:
            found = re.fullmatch(r"(\d+)(?:\[(\d*|\d+-\d+)\])?(\..*)?", name)
            if not found:
                print(f"qdel: illegally formed job identifier: {name}", file=sys.stderr)
                return 1
            targets.append((name, int(found[1]), found[2]))
        self.look("test")
        if engine.quirk(self.folder, self.config, "qdel_aborts") and len(targets) > 1:
            lone_first = sorted(targets, key=lambda target: target[2] is not None) == targets
            if any("." not in name for name, _, _ in targets) and not lone_first:
                if len(targets) > 3:
                    return 0
                print("double free or corruption (out)", file=sys.stderr)
                return 134
            waiting = [job for job in self.jobs if job["state"] in ("waiting", "held")]
            members = {(job["id"], str(job["index"])) for job in waiting}
            if members & {target[1:] for target in targets}:
                engine.ask(self.folder, "delete", "crash")
                raise engine.Away
        arrays = {job["id"]: job["index"] is not None for job in self.jobs}
        for name, number, indexes in targets:
            results = ["unknown"]
            if arrays.get(number) is (indexes is not None) or number not in arrays:
                wanted = [[number, index] for index in numbers_of(indexes or "")]
                answer = engine.ask(self.folder, "delete", "delete", targets=wanted)
                if answer["fault"] in ("refuse", "garble"):
                    print("%& \ufffd")
                    return 1
                results = answer["results"]
            result = min(results, key=["deleted", "denied", "done", "unknown"].index)
            if result != "deleted":
                words, code = self.not_deleted(name)[result]
                print(f"qdel: {words}", file=sys.stderr)
        return code

    def not_deleted(self, name: str) -> dict[str, tuple[str, int]]:
        """Return what qdel says of a job, and its exit code."""
        identity = name if "." in name else f"{name}.{self.name}"
        return {
            "unknown": (f"Unknown Job Id {identity}", 153),
            "done": (f"Job has finished {identity}", 35),
            "denied": (f"Unauthorized Request  {identity}", 159),
        }

    def qselect(self, arguments: list[str]) -> int:
        options = dict(getopt.getopt(arguments, "u:N:q:xs:")[0])
        self.look()
        for row in self.listed(False):
            job = row.of[0]
            wanted = options.get("-u", job["user"]), options.get("-N", job["name"])
            if self.state(row) not in "FX" and wanted == (job["user"], job["name"]):
                print(row.id)
        return 0

    def pbsnodes(self, arguments: list[str]) -> int:
        self.look()
        running = [job for job in self.jobs if job["state"] == "running"]
        self.print_nodes({
            node: [(self.text_of_id(job), job["nodes"][node]) for job in running if node in job["nodes"]]
            for node in self.config["nodes"]
        })  # fmt: skip
        return 0

    def print_nodes(self, nodes: dict[str, list[tuple[str, dict[str, list[int]]]]]) -> None:
        """Print the nodes, each with the ids and the places of its jobs."""
        found, config = {}, self.config
        for node, taken in nodes.items():
            used = {name: sum(len(place[kind]) for _, place in taken) for name, kind in (("ncpus", "slots"), ("ngpus", "gpus"))}  # fmt: skip
            has = {"arch": "linux", "host": node, "mem": f"{config.get('memory', 32)}gb", "ncpus": config["slots"], "ngpus": config["gpus"], "vnode": node}  # fmt: skip
            found[node] = {
                "Mom": node, "ntype": "PBS", "state": "job-busy" if used["ncpus"] == config["slots"] else "free",
                "jobs": [id_ for id_, _ in taken], "resources_available": has,
                "resources_assigned": {name: number for name, number in used.items() if number},
            }  # fmt: skip
        self._print_json(nodes=found)

    def qmgr(self, arguments: list[str]) -> int:
        """Print the resources that the site has made; users may ask for nothing else here."""
        engine.ask(self.folder, "query", "jobs")
        if arguments != ["-c", "list resource"]:
            return 1
        print("#\n# Create resources and set their properties.\n#")
        for name in ["ngpus", *self.config.get("resources", ())]:
            kind = "long" if name in NUMERIC else "string"
            print(f"Resource {name}\n    type = {kind}\n    flag = hn\n")
        return 0

    def away(self, command: str) -> tuple[str, int]:
        """Return what a command says when no server answers, and its exit code."""
        if command == "qdel":
            return f"Connection refused\nCouldn't connect to cluster: {self.name}", 162
        number = ", error=15010" if command == "pbsnodes" else " (errno=15010)"
        words = f"Connection refused\n{command}: cannot connect to server {self.name}{number}"
        return words, {"qsub": 162, "pbsnodes": 1}.get(command, 255)


def date(epoch: float | None) -> str:
    return time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(epoch))


def numbers_of(text: str) -> list[int | None]:
    """Return the numbers of ``3`` or ``1-3``; None, which is all of them, for no text."""
    first, _, last = text.partition("-")
    return [*range(int(first), int(last or first) + 1)] if text else [None]


def ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def launch(job: Job, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    return Server(folder, config).launch(job)


def _asked(folder: Path, arguments: list[str]) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the configuration of the server that a command talks with."""
    config = json.loads((folder / "config.json").read_text())
    named = [word.partition(sign)[2] for word in arguments for sign in ".@" if sign in word]
    named += [os.environ.get(name, "") for name in ("PBS_SERVER", "PBS_DEFAULT")]
    for name in named:
        if name in config.get("peers", {}):
            return _asked(Path(config["peers"][name]), [])
    return folder, config


def main(kind: type[Server], argv: list[str]) -> int:
    folder, command, *arguments = argv
    server = kind(*_asked(Path(folder), arguments))
    try:
        return int(getattr(server, command)(arguments))
    except engine.Away:
        words, code = server.away(command)
    except engine.Busy:
        words = f"{command}: cannot connect to server {server.name} (errno=15031) Server is too busy"  # fmt: skip
        code = 15031 % 256
    except Refused as refused:
        words, code = refused.words, refused.code
    print(words, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(Server, sys.argv[1:]))
