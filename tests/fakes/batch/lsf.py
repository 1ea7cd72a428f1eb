"""bsub, bjobs, bhist, bkill and blaunch on the engine: ``python lsf.py FOLDER bsub ARGUMENTS``.

Their output and their refusals are those of volclava 2.2 (a test compares them with recordings), except for ``-gpu``
and units in ``rusage[mem=5MB]``, which are IBM's. ``config.json`` has more than the engine reads: ``queues`` {name: most
minutes or null}, the first one the default; ``clean_period``, seconds for which bjobs knows a job that has ended;
``relative``, true for volclava without what is IBM's. Only then are bhosts, bqueues, lshosts, bparams and lsid here.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import engine

FLAGS = {"-x", "-H", "-r", "-rn", "-N", "-B"}
VALUES = {
    "-J", "-o", "-oo", "-e", "-eo", "-W", "-q", "-n", "-R", "-M", "-P", "-G", "-gpu", "-u", "-m", "-w", "-i", "-c", "-L",
    "-cwd",
}  # fmt: skip
RESOURCES = {
    "hname",
    "mem",
    "swp",
    "tmp",
    "ngpus",
    "ngpus_excl_p",
    "type",
    "any",
    "model",
    "r1m",
    "ut",
}
HEADER = "JOBID   USER    STAT  QUEUE      FROM_HOST   EXEC_HOST   JOB_NAME   SUBMIT_TIME"
SUMMARY = "Summary of time in seconds spent in various states"
LOAD = """
 SCHEDULING PARAMETERS:
           r15s   r1m  r15m   ut      pg    io   ls    it    tmp    swp    mem
 loadSched   -     -     -     -       -     -    -     -     -      -      -  \n\
 loadStop    -     -     -     -       -     -    -     -     -      -      -  \n\
"""
CAUGHT = "TERM USR1 USR2 INT HUP"


class Refused(Exception):
    """The message of bsub before `. Job not submitted.`"""


# -- a job starts ------------------------------------------------------------------------------------------------
def launch(job: dict[str, Any], folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return how to run a job: a shell that only waits, and in it the script, by its own first line."""
    extra, index = job["extra"], job["index"]
    spool = folder / "spool" / f"{job['id']}.{index or 0}"
    spool.parent.mkdir(exist_ok=True)
    spool.write_text(job["script"])
    spool.chmod(0o755)
    nodes = list(job["nodes"])
    slots = {node: len(job["nodes"][node]["slots"]) for node in nodes}
    env = {
        **extra["env"], "LSB_JOBID": str(job["id"]), "LSB_JOBINDEX": str(index or 0), "LSB_JOBNAME": extra["spec"],
        "LSB_HOSTS": " ".join(node for node in nodes for _ in range(slots[node])), "LSB_QUEUE": job["queue"],
        "LSB_MCPU_HOSTS": "".join(f"{node} {slots[node]} " for node in nodes), "LSB_SUB_HOST": "login",
        "LSB_OUTPUTFILE": extra["output"], "LSB_JOBFILENAME": str(spool), "LS_SUBCWD": job["cwd"],
        "SLURMD_NODENAME": nodes[0],
    }  # fmt: skip
    if index is not None:
        env |= {"LSB_JOBINDEX_END": str(job["count"]), "LSB_JOBINDEX_STEP": "1"}
    if extra["own_gpus"]:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in job["nodes"][nodes[0]]["gpus"])
    output = extra["output"].replace("%J", str(job["id"])).replace("%I", str(index or 0))
    # Where the folder of the output is missing, a real one mails it.
    code = f'trap "#" {CAUGHT}\nout={shlex.quote(output)}\n{{ true >> "$out"; }} 2> /dev/null || out=/dev/null\n'
    code += f'{spool} >> "$out" 2>&1\ncode=$?\n'
    report = f"Sender: LSF System <fake@{nodes[0]}>\nSubject: Job {job['id']}: <{job['name']}>"
    code += f'printf \'%s\\n\' {shlex.quote(report)} "Exited with exit code $code." >> "$out"\nexit $code\n'
    return {"argv": ["/bin/sh", "-c", code], "env": env, "cwd": job["cwd"], "umask": extra["umask"]}


# -- bsub --------------------------------------------------------------------------------------------------------
def bsub(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    script = sys.stdin.read()
    words = [word for line in script.splitlines() for word in directive(line)]
    given = options_of(words, config) | options_of(arguments, config)
    if not [
        line for line in script.splitlines() if line.strip() and not line.strip().startswith("#")
    ]:
        raise Refused("No command is specified")
    queues = (given.get("-q") or next(iter(config["queues"]))).split()
    if unknown := [queue for queue in queues if queue not in config["queues"]]:
        raise Refused(f"{unknown[0]}: No such queue")
    minutes = minutes_of(given.get("-W"))
    limits = {queue: config["queues"][queue] or 10**6 for queue in queues}
    if not (allowed := [queue for queue in queues if (minutes or 0) <= limits[queue]]):
        raise Refused("RUNLIMIT: Cannot exceed queue's hard limit(s)")
    queue = allowed[0]  # LSF chooses one of them when a job is submitted
    most = config["queues"][queue]
    if not re.fullmatch(r"[1-9]\d*", given.get("-M", "1")):
        raise Refused(f"{given['-M']}: MEMLIMT value should be a positive integer")
    spec = given.get("-J") or script.strip().replace("\n", ";")
    name, bracket, indexes = spec.partition("[")
    found = re.fullmatch(r"(\d+)(?:-(\d+))?\](%\d+)?", indexes) if bracket else None
    mask = os.umask(0o77)
    answer = asked(
        folder, "submit", "submit", name=name if found else spec, queue=queue, script=script, cwd=str(Path.cwd()),
        needs=needs_of(given, config), walltime=60 * (minutes or most or 0), hold="-H" in given,
        after=after_of(given.get("-w", "")),
        indexes=list(range(int(found[1]), int(found[2] or found[1]) + 1)) if found else None,
        extra={"env": dict(os.environ), "spec": spec, "output": given.get("-o", "/dev/null"), "project": given.get("-P", "default"),
               "limit": minutes, "umask": mask, "own_gpus": "-gpu" in given},
    )  # fmt: skip
    if answer["fault"] == "refuse":
        raise Refused(f"{queue}: Queue has been closed")
    if answer["fault"] == "garble":
        print("Job <")
    elif "BSUB_QUIET" not in os.environ:
        print(
            f"Job <{answer['id']}> is submitted to {'' if '-q' in given else 'default '}queue <{queue}>."
        )
    return 0


def after_of(text: str) -> list[int]:
    """Return the ids of ``ended(1) && ended(2)``."""
    parts = [part.strip() for part in text.split("&&")] if text else []
    found = [re.fullmatch(r"ended\((\d+)\)", part) for part in parts]
    if not all(found):
        raise Refused(f"{text}: Bad dependency condition")
    return [int(one[1]) for one in found if one]


def directive(line: str) -> list[str]:
    """Return the words of a directive, wherever in the script it stands."""
    found = re.match(r"\s*#\s*BSUB\s+(-.*)", line)
    return shlex.split(found[1], comments=True) if found else []


def options_of(words: list[str], config: dict[str, Any]) -> dict[str, str]:
    """Return the options; ``--foo`` ends them, silently."""
    unknown = {"-gpu", "-rn"} if config.get("relative") else set()
    found: dict[str, str] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if word.startswith("--"):
            break
        if word == "-R" and "-R" in found:
            raise Refused("Invalid syntax; the -R option was used more than once.\n")
        if word in VALUES - unknown:
            found[word] = left.pop(0) if left else ""
        elif word in FLAGS - unknown:
            found[word] = ""
        elif word.startswith("-"):
            what = "option cannot have an argument -- r"
            what = what if word == "-rn" else f"illegal option -- {word[1:]}"
            print(f"bsub: {what}\nUsage: bsub [-h] [-V] [-x] [-H]", file=sys.stderr)
            raise SystemExit(255)
    return found


def minutes_of(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d+(:\d+)?", text):
        raise Refused(f"{text}: Bad RUNLIMIT specification")
    hours, _, minutes = text.rpartition(":")
    return 60 * int(hours or 0) + int(minutes)


def needs_of(given: dict[str, str], config: dict[str, Any]) -> dict[str, Any]:
    """Return the resources of a job on each node, and the number of nodes."""
    if not re.fullmatch(r"[1-9]\d*", given.get("-n", "1")):
        raise Refused("Bad argument for option -n")
    slots = int(given.get("-n", "1"))
    if slots > config["slots"] * len(config["nodes"]):
        raise Refused("Too many processors requested")
    text = given.get("-R", "")
    rest = re.sub(r"(select|span|rusage|order|same)\[[^\[\]]*\]", "", text).strip()
    sections = dict(re.findall(r"(\w+)\[([^\]]*)\]", text)) | ({"select": rest} if rest else {})
    avoided = re.findall(r"hname!='([\w.-]+)'", sections.get("select", ""))
    wanted = re.sub(r"'[\w.-]+'", "", sections.get("rusage", "") + " " + sections.get("select", ""))
    unit = r"$^" if config.get("relative") else r"=\d+[KMGT]B"
    used = re.findall(r"[A-Za-z_]\w*", re.sub(unit, "", wanted))
    if (
        set(used) - RESOURCES
        or re.search(r"[\[\]]", rest)
        or re.search(r"=$|=(?![\d=])", sections.get("rusage", ""))
    ):
        raise Refused("Bad resource requirement syntax")
    span = re.fullmatch(r"(hosts=1)|ptile=([1-9]\d*)", sections.get("span", "hosts=1"))
    if not span:
        raise Refused("Bad resource requirement syntax")
    on_node = slots if span[1] else min(slots, int(span[2]))
    gpus = re.search(r"ngpus(?:_excl_p)?=(\d+)", sections.get("rusage", "")) or re.search(
        r"\bnum=(\d+)", given.get("-gpu", "")
    )
    if "-gpu" in given and not re.fullmatch(r"-|num=\d+(/host|/task)?(:\w+=\w+)*", given["-gpu"]):
        raise Refused("Bad GPU requirement syntax")
    return {
        "nodes": -(-slots // on_node),
        "slots": on_node,
        "gpus": int(gpus[1]) if gpus else 0,
        "exclusive": "-x" in given,
        "avoided": avoided,
    }


# -- bjobs, bhist ------------------------------------------------------------------------------------------------
def bjobs(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    flags, ids = (
        {word for word in arguments if word.startswith("-")},
        [w for w in arguments if not w.startswith("-")],
    )
    if flags - {"-a", "-w", "-UF"} or not flags & {"-w", "-UF"}:
        print("Usage: bjobs [-h] [-V] [-w |-l |-UF] [-a]", file=sys.stderr)
        return 255
    answer = asked(folder, "query", "jobs")
    if answer["fault"] == "refuse":
        print("User permission denied", file=sys.stderr)
        return 255
    known = [
        job
        for job in answer["jobs"]
        if not job["ended"] or time.time() - job["ended"] < config.get("clean_period", 3600)
    ]
    shown, missing = chosen(known, ids)
    if not ids:
        shown = [
            job
            for job in known
            if job["uid"] == os.getuid() and ("-a" in flags or job["state"] != "done")
        ]
        if not shown:
            print(f"No {'' if '-a' in flags else 'unfinished '}job found", file=sys.stderr)
            return config.get("no_jobs", 254)
    shown.sort(key=lambda job: {"running": 0, "waiting": 1, "held": 1, "done": 2}[job["state"]])
    if answer["fault"] == "garble":
        print("JOBID   US")
        return 0
    if "-UF" in flags:
        print(("-" * 78 + "\n").join(long_text(job) for job in shown))
    elif shown:
        print("\n".join([HEADER, *map(wide_line, shown)]))
    for word in missing:
        print(f"Job <{word}> is not found", file=sys.stderr)
    return 255 if missing else 0


def bhist(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    answer = asked(folder, "history", "jobs")
    options, ids = arguments[: arguments.index("-l") + 1], arguments[arguments.index("-l") + 1 :]
    assert options == ["-n", "10", "-l"], options
    shown, _ = chosen(answer["jobs"], ids)
    if not shown:
        print("No matching job found", file=sys.stderr)
        return 255
    print(("-" * 78 + "\n").join(history_text(job) for job in shown))
    return 0


def chosen(jobs: list[dict[str, Any]], ids: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the jobs that ``ids`` name, and those of ``ids`` that name none."""
    found: list[dict[str, Any]] = []
    missing = []
    for word in ids:
        mine = [
            job
            for job in jobs
            for number, index in targets(word)
            if job["id"] == number and index in (None, job["index"])
        ]
        found += [job for job in mine if job not in found]
        missing += [] if mine else [word]
    return found, missing


def targets(word: str) -> list[tuple[int, int | None]]:
    """Return [id, index] of ``12``, ``12[3]`` and ``12[1-3,5]``."""
    found = re.fullmatch(r"(\d+)(?:\[([\d,-]+)\])?", word)
    if not found:
        print(f"{word}: Illegal job ID.", file=sys.stderr)
        raise SystemExit(255)
    number, indexes = int(found[1]), []
    for part in (found[2] or "").split(","):
        first, _, last = part.partition("-")
        indexes += range(int(first), int(last or first) + 1) if first else []
    return [(number, index) for index in indexes] or [(number, None)]


def stat(job: dict[str, Any]) -> str:
    if job["state"] == "done":
        return "DONE" if job["exit_code"] == 0 else "EXIT"
    return {"waiting": "PEND", "held": "PSUSP", "running": "RUN"}[job["state"]]


def shown_name(job: dict[str, Any]) -> str:
    return str(job["name"]) if job["index"] is None else f"{job['name']}[{job['index']}]"


def shown_id(job: dict[str, Any]) -> str:
    return str(job["id"]) if job["index"] is None else f"{job['id']}[{job['index']}]"


def wide_line(job: dict[str, Any]) -> str:
    hosts = ":".join(node for node, place in job["nodes"].items() for _ in place["slots"])
    hosts = hosts or ("   -   " if job["state"] == "done" else "   -    ")
    submitted = time.strftime("%b %d %H:%M", time.localtime(job["submitted"]))
    return (
        f"{job['id']:<7} {job['user']:<7} {stat(job):<5.5} {job['queue']:<10} {'login':<11} {hosts:<11} "
        f"{shown_name(job):<10} {submitted}"
    )


def clock(seconds: float) -> str:
    return time.strftime("%a %b %d %H:%M:%S", time.localtime(seconds))


def head(job: dict[str, Any], status: str) -> str:
    project, command = (
        job["extra"]["project"],
        "#!/bin/bash;#BSUB -J;exit 3; Exited with exit code 9",
    )
    return f"Job <{shown_id(job)}>, Job Name <{shown_name(job)}>, User <{job['user']}>, Project <{project}>,{status} Command <{command}>"


def end_text(job: dict[str, Any]) -> str:
    if not job["nodes"]:
        return "Exited"
    if job["exit_code"] == 0:
        return "Done successfully. The CPU time used is 0.0 seconds"
    how = (
        f"with exit code {job['exit_code']}"
        if job["signal"] is None
        else f"by signal {job['signal']}"
    )
    return f"Exited {how}. The CPU time used is 0.0 seconds"


def submitted_text(job: dict[str, Any], queue: str) -> str:
    hold = " with hold" if job["state"] == "held" else ""
    limit = (
        f"\n\n RUNLIMIT                \n {job['extra']['limit']}.0 min                 "
        if job["extra"]["limit"]
        else ""
    )
    output = f"CWD <{job['cwd']}>, Output File <{job['extra']['output']}>;"
    return f"{clock(job['submitted'])}: Submitted from host <login>{hold}{queue}, {output}{limit}"


def long_text(job: dict[str, Any]) -> str:
    lines = [
        "",
        head(job, f" Status <{stat(job)}>, Queue <{job['queue']}>,"),
        submitted_text(job, ""),
    ]
    if job["nodes"]:
        hosts = " ".join(f"<{node}>" for node in job["nodes"])
        lines.append(
            f"{clock(job['started'])}: Started 1 Task(s) on Host(s) {hosts}, Allocated 1 Slot(s) on Host(s) {hosts}, Execution CWD <{job['cwd']}>;"
        )
    if job["state"] == "done":
        lines.append(f"{clock(job['ended'])}: {end_text(job)}.")
    if job["state"] in ("waiting", "held"):
        reason = {
            "": "New job is waiting for scheduling",
            "busy": "Job slot limit reached",
            "never": "Job's requirements for resource reservation not satisfied",
        }
        held = "The job was suspended by the user while pending"
        lines += [
            " PENDING REASONS:",
            f" {held if job['state'] == 'held' else reason[job['comment']]}: 1 host;",
        ]
    return "\n".join(lines) + "\n" + LOAD


def history_text(job: dict[str, Any]) -> str:
    lines = ["", head(job, ""), submitted_text(job, f", to Queue <{job['queue']}>")]
    if job["nodes"]:
        lines += [
            f"{clock(job['started'])}: Dispatched to <{next(iter(job['nodes']))}>;",
            f"{clock(job['started'])}: Starting (Pid {job['pid']});",
        ]
    if job["end"] == "delete":
        lines.append(
            f"{clock(job['ended'] or time.time())}: Signal <KILL> requested by user or administrator <{job['by']}>;"
        )
    if job["state"] == "done":
        lines.append(f"{clock(job['ended'])}: {end_text(job)};")
    lines = [wrapped(line) if re.match(r"\w{3} \w{3} ", line) else line for line in lines]
    now = clock(job["ended"] or time.time())
    return "\n".join(
        [
            *lines,
            "",
            f"{SUMMARY} by  {now}",
            "  PEND     PSUSP    RUN      USUSP    SSUSP    UNKWN    TOTAL",
            "  3        0        0        0        0        0        3           ",
            "",
        ]
    )


def wrapped(line: str) -> str:
    """Break a line of bhist as it does: after 79 characters, wherever that is."""
    first, rest = line[:79], line[79:]
    return "\n".join([first, *[" " * 21 + rest[at : at + 58] for at in range(0, len(rest), 58)]])


# -- bhosts, bqueues, lshosts, bparams, lsid: the relative -----------------------------------------------------
def bhosts(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    jobs = [job for job in asked(folder, "query", "jobs")["jobs"] if job["state"] == "running"]
    places = {
        node: [job["nodes"][node] for job in jobs if node in job["nodes"]]
        for node in config["nodes"]
    }
    taken = {node: [sum(len(place[kind]) for place in own) for kind in ("slots", "gpus")] for node, own in places.items()}  # fmt: skip
    if arguments == ["-w"]:
        print("HOST_NAME          STATUS          JL/U    MAX  NJOBS    RUN  SSUSP  USUSP    RSV ")
        for node, (slots, _) in taken.items():
            status = "ok" if slots < config["slots"] else "closed_Full"
            print(
                f"{node:<18} {status:<15}    - {config['slots']:>6} {slots:>6} {slots:>6}      0      0      0"
            )
        return 0
    if arguments == ["-s"]:
        print("RESOURCE                 TOTAL       RESERVED       LOCATION")
        for node, (_, gpus) in taken.items():
            print(
                f"ngpus               {config['gpus'] - gpus:>8}.0        {gpus:>7}.0       {node} "
            )
        return 0
    return no_option("bhosts", arguments)


def bqueues(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    if arguments != ["-l"]:
        return no_option("bqueues", arguments)
    texts = []
    for queue, minutes in config["queues"].items():
        limit = (
            f" RUNLIMIT                \n {minutes}.0 min                \n\n" if minutes else ""
        )
        about = "ten minutes at most" if minutes else "default queue  This is the default queue."
        texts.append(
            f"\nQUEUE: {queue}\n  -- {about}\n\nPARAMETERS/STATISTICS\n"
            "PRIO NICE STATUS          MAX JL/U JL/P JL/H NJOBS  PEND   RUN SSUSP USUSP  RSV \n"
            " 30    0  Open:Active       -    -    -    -     0     0     0     0     0    0\n"
            f"Interval for a host to accept two jobs is 0 seconds\n\n{limit}USERS:  all\nHOSTS:  all\n"
        )
    print(("\n" + "-" * 79 + "\n").join(texts))
    return 0


def lshosts(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    if arguments != ["-w"]:
        return no_option("lshosts", arguments)
    print(
        "HOST_NAME                       type       model  cpuf ncpus maxmem maxswp server RESOURCES"
    )
    for node in config["nodes"]:
        print(f"{node:<30} linux     IntelI5 100.0     2 24105M      -    Yes (cs)")
    return 0


def bparams(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    if arguments != ["-l"]:
        return no_option("bparams", arguments)
    print("\nThe maximum number of jobs in a job array.\n    MAX_JOB_ARRAY_SIZE = 1000\n")
    return 0


def lsid(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    print(
        "volclava project 2.2, Nov 24 2026\n\nMy cluster name is volclava\nMy master name is node1"
    )
    return 0


def no_option(command: str, arguments: list[str]) -> int:
    print(
        f"{command}: invalid option -- '{arguments[0][1]}'\nUsage: {command} [-h] [-V]",
        file=sys.stderr,
    )
    return 255


# -- bkill -------------------------------------------------------------------------------------------------------
def bkill(folder: Path, config: dict[str, Any], arguments: list[str]) -> int:
    wanted = [target for word in arguments for target in targets(word)]
    arrays = {
        job["id"] for job in asked(folder, "look", "jobs")["jobs"] if job["index"] is not None
    }
    answer = asked(folder, "delete", "delete", targets=wanted)
    if answer["fault"] == "refuse":
        answer["results"] = ["denied"] * len(wanted)
    failed = {
        "unknown": "No matching job found",
        "denied": "User permission denied",
        "done": "Job has already finished",
    }
    code = 0
    for (number, index), result in zip(wanted, answer["results"], strict=True):
        name = str(number) if index is None else f"{number}[{index}]"
        # A whole array is ended later, which the command does not report as a success.
        message = failed.get(result) or (
            "Operation is in progress" if index is None and number in arrays else ""
        )
        print(
            f"Job <{name}>: {message}" if message else f"Job <{name}> is being terminated",
            file=sys.stderr if message else sys.stdout,
        )
        code = 255 if message else code
    return code


def asked(folder: Path, kind: str, op: str, **request: Any) -> dict[str, Any]:
    """Ask the server, and go on for ever while it is down."""
    said = 0.0
    while True:
        try:
            return engine.ask(folder, kind, op, **request)
        except engine.Away:
            if time.monotonic() - said > 8:
                said = time.monotonic()
                print(
                    "batch system daemon not responding ... still trying",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(0.5)


def blaunch(folder: Path, config: dict[str, Any], arguments: list[str]) -> NoReturn:
    """Run a command on a node of this job, with the GPUs that the job has there."""
    node, *command = arguments
    own = {"id": int(os.environ["LSB_JOBID"]), "state": "running"}
    (job,) = (job for job in asked(folder, "look", "jobs")["jobs"] if own.items() <= job.items())
    if node not in job["nodes"]:
        raise Refused(f"{node}: Host is not in the list of allocated hosts")
    gpus = ",".join(map(str, job["nodes"][node]["gpus"]))
    os.environ.update({"SLURMD_NODENAME": node, "CUDA_VISIBLE_DEVICES": gpus})
    os.execvp(command[0], command)


def main(argv: list[str]) -> int:
    folder, command, *arguments = argv
    config = engine.json.loads((Path(folder) / "config.json").read_text())
    try:
        return int(globals()[command](Path(folder), config, arguments))
    except (Refused, engine.Busy) as refused:
        said = str(refused) or "Contacting batch daemon: Communication timeout"
        print(f"{said}. Job not submitted." if command == "bsub" else said, file=sys.stderr)
        return 255


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
