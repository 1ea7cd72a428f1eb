"""Hints for keys that people write by habit, in the words of other programs.

The most similar key would often be a wrong one: `partitions` resembles `options`.
"""

from __future__ import annotations

_CORES = "`cpus_per_job`; threads of a worker: `workers.threads`"
_ENV = "`env`"
_GPUS = "`gpus`: each GPU has one worker, or as `workers` says; GPUs of one job: `gpus_per_job`"
_GPUS_PER_WORKER = "`workers.gpus_per_worker`; GPUs of one job: `gpus_per_job`"
_MEMORY = "`memory_per_job`; memory of each worker: `workers.memory`"
_QUEUE = "`queue`"
_SETUP = "`environment.setup`"
_WALLTIME = "`walltime`"


def _line(option: str) -> str:
    return f"write it as a line for the batch scheduler, as in directives: [--{option}=NAME]"


_LINES = {name: _line(name) for name in ("qos", "constraint", "nodelist", "exclude")}

HINTS: dict[str, dict[str, str]] = {
    "Profile": {
        **_LINES,
        **dict.fromkeys(("partition", "partitions", "queues"), _QUEUE),
        **dict.fromkeys(("time", "time_limit", "wall_time", "max_walltime"), _WALLTIME),
        **dict.fromkeys(("mem", "memory", "mem_per_node", "memory_limit"), _MEMORY),
        **dict.fromkeys(("cpus", "cores", "ncpus", "cpus_per_task", "job_cpu"), _CORES),
        **dict.fromkeys(("worker_gpu", "worker_gpus", "gpus_per_worker"), _GPUS_PER_WORKER),
        **dict.fromkeys(("ngpus", "gpu"), _GPUS),
        "workers_per_gpu": "`workers.workers_per_gpu`",
        **dict.fromkeys(("nodes", "n_workers", "nworkers", "jobs", "ntasks", "gres"), _GPUS),
        **dict.fromkeys(("nthreads", "threads"), "`workers.threads`"),
        **dict.fromkeys(("environ", "envs", "variables", "environment_variables"), _ENV),
        **dict.fromkeys(("setup", "modules", "module", "job_script_prologue"), _SETUP),
        **dict.fromkeys(("command", "cmd", "script", "main"), "`run`"),
        **dict.fromkeys(("project", "bank"), "`account`"),
        "job_name": "`name`",
        "scheduler": "`site`: the site file names the batch scheduler",
    },
    "Workers": {
        **dict.fromkeys(("nthreads", "cpus", "cores"), "`workers.threads`"),
        **dict.fromkeys(("mem", "memory_limit"), "`workers.memory`"),
        **dict.fromkeys(("n_workers", "nworkers", "number"), "`workers.count`"),
        **dict.fromkeys(("worker_gpu", "worker_gpus", "gpus"), "`workers.gpus_per_worker`"),
    },
    "Site": {
        **dict.fromkeys(("qos", "constraint"), "a line of `directives`, of the site or of a queue"),
        **dict.fromkeys(("partition", "partitions", "queue"), "`queues`"),
        "modules": "`setup`",
        **dict.fromkeys(("walltime", "time"), "`defaults.walltime`, or `max_walltime` of a queue"),
        **dict.fromkeys(("host", "hosts", "hostname"), "`hostnames`"),
        "name": "the name of the file is the name of the site",
    },
    "Queue": {
        **dict.fromkeys(("qos", "constraint"), "a line of `directives` of the queue"),
        **dict.fromkeys(("mem", "memory"), "`memory_per_node`"),
        **dict.fromkeys(("cpus", "cores", "ncpus"), "`cpus_per_node`"),
        **dict.fromkeys(("gpus", "gpu", "ngpus"), "`gpus_per_node`"),
        **dict.fromkeys(("time", "max_time", "time_limit"), "`max_walltime`"),
        **dict.fromkeys(("partition", "queue"), "`name`"),
        "node_count": "`nodes`",
    },
}
"""By the model that the key was written in, then by the key."""
