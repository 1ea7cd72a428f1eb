"""Torque: what it says and does otherwise than OpenPBS (`pbs`), as recorded from the real one.

``python torque.py FOLDER qsub|qstat|qdel|pbsnodes ARGUMENTS``. Its error numbers are PBS's shifted by two.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pbs
import qsub
from pbs import Job, Row, ranges
from qsub import USAGE, Refused

KNOWN = {"walltime", "nodes", "mem", "vmem", "pmem", "pvmem", "procs", "ncpus", "select", "cput", "file"}  # fmt: skip


class Qsub(qsub.Qsub):
    letters = "a:A:b:c:C:d:D:e:hIj:J:k:K:l:L:m:M:N:o:p:P:q:r:S:t:T:u:W:w:v:VXxz"
    of_array = "t"
    after_array = "afteranyarray"
    bad_option = f"[exiting]\n\n{USAGE}"
    bad_name = f"[qsub: illegal -N value]\n\n{USAGE}"
    bad_clock = "Illegal attribute or resource value for Resource_List.walltime"
    too_long = ("Job exceeds queue resource limits", 188)
    no_script = "qsub: script file '{}' cannot be loaded - No such file or directory"
    dos = "qsub:  script is written in DOS/Windows text format"
    allowed: ClassVar[dict[str, str]] = {"j": r"oe|eo|n"}

    def no(self, words: str, code: int, more: str = "") -> Refused:
        return Refused(f"qsub: submit error ({words}{' ' + more if more else ''})", code + 2)

    def no_such_directive(self, letter: str, wrong: str) -> Refused:
        return Refused(f"[a single - is not a valid option]\n\n{USAGE}", 2)

    def check_values(self) -> None:
        if "J" in self.options:
            words = "[The -J option can only be used in conjunction with -P]"
            raise Refused(f"{words}\n\n{USAGE}", 2)
        super().check_values()

    def is_array(self, first: int, last: int) -> bool:
        return True

    def large_array(self, limit: int) -> Refused:
        more = f"MSG=Requested array size too large, limit is {limit}"
        return self.no("Bad Job Array Request", 233, more)

    def needs(self) -> dict[str, Any]:
        config = self.config
        for name in self.resources:
            if name not in KNOWN | set(config.get("resources", ())):
                raise self.no("Unknown resource type ", 187, f"Resource_List.{name}")
        count, *parts = self.resources.get("nodes", "1").split(":")  # `select` is taken and ignored
        chunk = dict(part.partition("=")[::2] for part in parts)
        slots, gpus = int(chunk.get("ppn") or 1), int(chunk.get("gpus") or 0)
        if int(count) > len(config["nodes"]) or slots > config["slots"] or gpus > config["gpus"]:
            why = (
                "MSG=cannot locate feasible nodes (nodes file is empty, all systems are busy, "
                "or no nodes have the requested feature)"
            )
            raise self.no("Job exceeds queue resource limits", 188, why)
        return {"nodes": int(count), "slots": slots, "gpus": gpus, "exclusive": False}


class Server(pbs.Server):
    qsub_class = Qsub
    qstat_options = "f1xtaQBu:"
    over_walltime = -11
    done, begun, never = "C", "R", "C"
    no_destination, unknown_job = 172, "Unknown Job Id Error "
    header = """\
Job ID                    Name             User            Time Use S Queue
------------------------- ---------------- --------------- -------- - -----"""
    line = "{:<26} {:<16} {:<15} {:>8} {} {:<15}"

    # -- a job on its node -----------------------------------------------------------------------------------
    def files(self, job: Job, start: Path) -> dict[Path, str]:
        nodes = "".join(f"{node}\n" * job["needs"]["slots"] for node in job["nodes"])
        gpus = [
            f"{node}-gpu{gpu}\n"
            for node, place in job["nodes"].items()
            for gpu in reversed(place["gpus"])
        ]
        return {start: nodes, start.with_name(f"{start.name}gpu"): "".join(gpus)}

    def output_of_member(self, path: str, index: int) -> str:
        return f"{path}-{index}"

    def delivered(self, job: Job) -> Path | None:
        """pbs_mom expands its path like a shell, and copies to none with a space."""
        path = self.output_of(job)
        if re.search(r"""[^!-~]|(?<!\\)["'`$&();<>|]""", path):
            return None
        found = Path(re.sub(r"\\(.)", r"\1", path))
        return found if found.parent.is_dir() else None

    def own_environment(
        self, job: Job, node: str, gpus: list[int], temporary: Path
    ) -> dict[str, str]:
        needs, file = job["needs"], self.folder / "spool" / f"{self.text_of_id(job)}gpu"
        env = {
            "PBS_VERSION": "TORQUE-master", "PBS_GPUFILE": str(file), "PBS_NP": str(needs["nodes"] * needs["slots"]),
            "PBS_NUM_NODES": str(needs["nodes"]), "PBS_NUM_PPN": str(needs["slots"]), "PBS_O_SERVER": self.name,
            "PBS_VNODENUM": "0",
        }  # fmt: skip
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
        if job["index"] is not None:
            name = f"{job['name']}-{job['index']}"
            env |= {"PBS_ARRAYID": str(job["index"]), "PBS_JOBNAME": name}
        return env

    # -- qstat -----------------------------------------------------------------------------------------------
    def listed_array(self, array: Row, members: bool) -> list[Row]:
        if not members:
            return [array]
        return [Row(self.text_of_id(job), [job], False) for job in array.of]

    def rows_of(self, row: Row, members: bool) -> list[Row]:
        """As measured: of an array, all jobs."""
        return self.listed(False) if row.parent and not members else super().rows_of(row, members)

    def print_version(self) -> None:
        print("Version: master\nCommit: ", file=sys.stderr)

    def print_server(self, most: int) -> None:
        print(f"Server: {self.name}\n    server_state = Active\n    max_job_array_size = {most}\n")

    def print_queues(self, queues: dict[str, dict[str, Any]]) -> None:
        for name, rows in queues.items():
            most = {f"resources_max.{k}": v for k, v in rows.pop("resources_max", {}).items()}
            lines = [f"    {key} = {value}" for key, value in (rows | most).items()]
            print("\n".join([f"Queue: {name}", *lines, ""]))

    def print_jobs(self, rows: list[Row]) -> None:
        for row in rows:
            lines = [f"    {key} = {value}" for key, value in self._attributes(row).items()]
            print("\n".join([f"Job Id: {row.id}", *lines, ""]))

    def _attributes(self, row: Row) -> dict[str, Any]:
        """Return a job as ``-f1`` prints it."""
        job, extra, code = row.of[0], row.of[0]["extra"], self.exit_status(row.of[0])
        variables = {"PBS_O_QUEUE": job["queue"], "PBS_O_HOME": extra["home"], "PBS_O_WORKDIR": job["cwd"]}  # fmt: skip
        found = self.head_of_job(row) | {
            "Keep_Files": "n", "Rerunable": "False", "submit_args": extra["arguments"],
            **{f"Resource_List.{key}": value for key, value in extra["resources"].items()},
            "Variable_List": ",".join(f"{key}={value}" for key, value in variables.items()),
        }  # fmt: skip
        if row.parent:
            return found | {"job_array_request": f"{job['index']}-{row.of[-1]['index']}"}
        if job["index"] is not None:
            name = f"{job['name']}-{job['index']}"
            found |= {"Job_Name": name, "job_array_id": job["index"]}
        if job["started"]:
            places = job["nodes"].items()
            found["exec_host"] = "+".join(f"{node}/{n}" for node, at in places for n in at["slots"])
            gpus = "+".join(f"{node}-gpu/{n}" for node, at in places for n in at["gpus"])
            found |= {"exec_gpus": gpus} if gpus else {}
            if job["ended"]:
                seconds = time.gmtime(int(job["ended"] - job["started"]))
                found["resources_used.walltime"] = time.strftime("%H:%M:%S", seconds)
        if comment := self._comment(job):
            found["comment"] = comment
        if code is not None:
            found["exit_status"] = code
        return found

    def _comment(self, job: Job) -> str:
        if job["started"]:
            when = time.strftime("%a %b %d at %H:%M", time.localtime(job["started"]))
            return f"Job started on {when}"
        why = "Not Running: Not enough of the right type of nodes are available"
        return why if job["comment"] else ""

    # -- the other commands ----------------------------------------------------------------------------------
    def not_deleted(self, name: str) -> dict[str, tuple[str, int]]:
        identity = name if "." in name else f"{name}.{self.name}"
        why = f"MSG=invalid state for job - COMPLETE {identity}"
        return super().not_deleted(name) | {
            "unknown": (f"nonexistent job id: {name}", 153),
            "done": (f"Request invalid for state of job {why}", 170),
        }

    def print_nodes(self, nodes: dict[str, list[tuple[str, dict[str, list[int]]]]]) -> None:
        config, memory = self.config, self.config.get("memory", 32) * 2**20
        texts = []
        for node, taken in nodes.items():
            jobs = ",".join(f"{ranges(place['slots'])}/{id_}" for id_, place in taken)
            texts.append(
                f"<Node><name>{node}</name><state>free</state><power_state>Running</power_state>"
                f"<np>{config['slots']}</np><ntype>cluster</ntype>{f'<jobs>{jobs}</jobs>' if jobs else ''}"
                f"<status>opsys=linux,uname=Linux {node},physmem={memory}kb,ncpus=2,state=free</status>"
                f"<gpus>{config['gpus']}</gpus></Node>"
            )
        print(f"<Data>{''.join(texts)}</Data>")

    def away(self, command: str) -> tuple[str, int]:
        words = f"\nUnable to communicate with {self.name}(192.0.2.11)\nCannot connect to specified server host '{self.name}'."  # fmt: skip
        nodes = command == "pbsnodes"
        number = ", error=111 (Connection refused)" if nodes else " (errno=111) Connection refused"
        words += f"\n{command}: cannot connect to server {self.name}{number}"
        return words, 1 if nodes else 111


def launch(job: Job, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    return Server(folder, config).launch(job)


if __name__ == "__main__":
    sys.exit(pbs.main(Server, sys.argv[1:]))
