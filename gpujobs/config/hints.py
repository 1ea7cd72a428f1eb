"""Hints for keys that do not exist: words of other programs first, then similar keys.

The most similar key would often be a wrong one: `partitions` resembles `options`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ..text import alike, nearest
from .document import missing_space

_ENV, _GPUS, _SETUP = "env", "gpus", "environment.setup"
_CPUS, _MEMORY, _LINE = "cpus_per_job", "memory_per_job", "directives"

WORDS: dict[str, str] = {
    # sbatch, and other batch schedulers
    **dict.fromkeys(("partition", "partitions", "queues"), "queue"),
    **dict.fromkeys(("time", "time_limit", "wall_time", "max_walltime", "runtime"), "walltime"),
    **dict.fromkeys(("wallclock", "wallclock_limit", "wall_clock", "h_rt"), "walltime"),
    **dict.fromkeys(("mem", "memory", "mem_per_node", "mem_per_cpu", "mem_per_gpu"), _MEMORY),
    **dict.fromkeys(("cpus", "cores", "ncores", "ncpus", "cpus_per_task", "job_cpu"), _CPUS),
    **dict.fromkeys(("ngpus", "gpu", "gres", "nodes", "ntasks", "num_gpus", "select"), _GPUS),
    **dict.fromkeys(("gpus_per_node", "ntasks_per_node", "processes"), "gpus_per_job"),
    **dict.fromkeys(("gpus_per_task", "worker_gpu", "worker_gpus"), "workers.gpus_per_worker"),
    **dict.fromkeys(("qos", "constraint", "nodelist", "exclude", "mail_type", "mail_user"), _LINE),
    **dict.fromkeys(("licenses", "nice", "begin", "comment"), _LINE),
    **dict.fromkeys(("job_extra", "job_extra_directives"), _LINE),
    **dict.fromkeys(("command", "cmd", "script", "main", "wrap", "entrypoint"), "run"),
    **dict.fromkeys(("project", "bank", "charge_account"), "account"),
    **dict.fromkeys(("chdir", "cwd", "working_directory", "working_dir"), "workdir"),
    **dict.fromkeys(("environ", "envs", "variables", "environment_variables", "export"), _ENV),
    "dependency": "after",
    "job_name": "name",
    "job_mem": _MEMORY,
    # dask-jobqueue and dask-cuda
    **dict.fromkeys(("n_workers", "n_worker", "nworkers", "num_workers", "jobs"), _GPUS),
    **dict.fromkeys(("nthreads", "threads_per_worker", "worker_threads"), "workers.threads"),
    **dict.fromkeys(("memory_limit", "worker_memory", "memory_per_worker"), "workers.memory"),
    **dict.fromkeys(("worker_options", "worker_extra_args", "extra"), "workers.options"),
    **dict.fromkeys(("modules", "module", "job_script_prologue", "env_extra"), _SETUP),
    **dict.fromkeys(("nanny", "worker_command"), "workers.worker_class"),
    **dict.fromkeys(("wait_for_workers", "min_workers", "minimum"), "start_workers"),
    "rmm_allocator_external_lib_list": "workers.set_rmm_allocator_for_libs",
    **dict.fromkeys(("rmm_pool", "pool_size"), "workers.rmm_pool_size"),
    "log_spilling": "workers.cudf_spill_stats",
    "jit_unspill": "workers.enable_cudf_spill",
    "dashboard_address": "network.dashboard",
    "ip": "network.interface",
    # Coiled and SkyPilot
    **dict.fromkeys(("worker_gpu_type", "worker_vm_types", "accelerators"), "gpu_type"),
    **dict.fromkeys(("software", "conda", "conda_env", "venv", "host_setup_script"), _SETUP),
    **dict.fromkeys(("image", "image_id", "docker"), "environment.container"),
    **dict.fromkeys(("spot_policy", "use_spot", "max_restarts_on_errors"), "requeue"),
    **dict.fromkeys(("autostop", "idle_minutes_to_autostop"), "idle_timeout"),
    "num_nodes": _GPUS,
    "worker_cpu": _CPUS,
    "scheduler_cpu": "head.cpus",
    "scheduler_memory": "head.memory",
    "no_client_timeout": "client_timeout",
}
"""Words of other programs, and the keys of a profile that they mean."""

_NONE = {
    **dict.fromkeys(
        ("output", "error", "log_directory", "logs"), "`gpujobs logs` shows the logs of a cluster"
    ),
    **dict.fromkeys(
        ("cloud", "region", "zone", "spot", "disk_size", "file_mounts", "package_sync", "tags"),
        "leave it out: it is for machines of a cloud",
    ),
    **dict.fromkeys(
        ("header_skip", "job_directives_skip", "resource_spec", "request"),
        "`request` of the site file has the lines that request resources",
    ),
    "array": "leave it out: `gpus` and `gpus_per_job` give the number of jobs",
    "dashboard_link": "`cluster.dashboard_link` has it, as distributed.dashboard.link of dask says",
    "shebang": "`shell` of the site file is the first line of scripts",
    "scheduler": "`site`: the site file names the batch scheduler",
    "scheduler_options": "`network` and `head` are about the dask scheduler",
}
"""Words that mean no key of a profile, and why."""

_DETAILS = {
    _GPUS: "each GPU has one worker, or as `workers` says; GPUs of one job: `gpus_per_job`",
    _CPUS: "threads of a worker: `workers.threads`",
    _MEMORY: "memory of each worker: `workers.memory`",
    "workers.gpus_per_worker": "GPUs of one job: `gpus_per_job`",
}
"""What else the user of one of the words may have meant."""

_INSIDE: dict[str, dict[str, str]] = {
    "Workers": {
        **dict.fromkeys(("cpus", "cores", "ncpus", "ncores"), "workers.threads"),
        "mem": "workers.memory",
        **dict.fromkeys(("n_workers", "nworkers", "number"), "workers.count"),
        **dict.fromkeys(("gpus", "gpu", "ngpus"), "workers.gpus_per_worker"),
    },
    "Site": {
        **dict.fromkeys(("qos", "constraint"), "directives"),
        **dict.fromkeys(("partition", "partitions", "queue"), "queues"),
        "modules": "setup",
        **dict.fromkeys(("walltime", "time"), "defaults.walltime"),
        **dict.fromkeys(("host", "hostname"), "hostnames"),
        "name": "the name of the file is the name of the site",
    },
    "Queue": {
        **dict.fromkeys(("qos", "constraint"), "directives"),
        **dict.fromkeys(("mem", "memory"), "memory_per_node"),
        **dict.fromkeys(("cpus", "cores", "ncpus"), "cpus_per_node"),
        **dict.fromkeys(("gpus", "gpu", "ngpus"), "gpus_per_node"),
        **dict.fromkeys(("time", "max_time", "time_limit"), "max_walltime"),
        **dict.fromkeys(("partition", "queue"), "name"),
        "node_count": "nodes",
    },
}
"""Words that mean something else in these sections, and the keys of site files."""

_FIRST = {"Workers": "count", "Container": "image", "Network": "protocol", "Environment": "setup"}
"""The key of these sections that a plain value is probably meant for."""

_OF_A_SITE = ("Site", "Queue")
_MOST_LISTED = 12
"""Keys of a section that are listed for a word that is like none of them."""
_SAME_LEVEL, _ELSEWHERE = 0.8, 0.87
"""How similar a word must be to a key: to be a misspelling of it, not another word."""


def unknown_key(
    word: str,
    model: str,
    place: str,
    known: Iterable[str],
    keys: Sequence[str],
    *,
    python: bool = False,
) -> str:
    """Return a hint for the key ``word``, which the section ``model`` at ``place`` does not have.

    ``place`` ends with a dot, ``known`` are the keys of the section, ``keys`` the dotted ones of
    the whole file. ``python``: the file is made of keywords.
    """
    if hint := missing_space(word):
        return hint
    word, known = word.replace("-", "_"), sorted(known)
    target = _INSIDE.get(model, {}).get(word)
    if model not in _OF_A_SITE:
        target = target or WORDS.get(word) or _NONE.get(word)
    group = ".".join(place.split(".")[:2]) + "." if place.startswith("groups.") else ""
    if target is None and model == "Queue" and word in keys:
        return f"`{word}` is for the whole site: write it outside of `queues`"
    if target is None and group and word in keys:
        return f"`{word}` is for the whole cluster: write it outside of `groups`"
    if target is None:
        fitting = (key for key in keys if key.startswith("groups.") is bool(group))
        there = (f"{group}{key.removeprefix('groups.')}" for key in fitting)
        here = [f"{place}{key}" for key in known]
        return misspelled(word, here, list(there)) or _keys_like(word, known, model)
    if " " in target:
        return target
    if target == _LINE and model not in _OF_A_SITE:
        option = word.replace("_", "-")
        return f"write it as a line for the batch scheduler, as in directives: [--{option}=NAME]"
    if group and f"groups.{target}" in keys:
        target = f"{group}{target}"
    details = f": {_DETAILS[target]}" if target in _DETAILS and not place else ""
    return f"use {keyword_text(target) if python else f'`{target}`'}{details}"


def _keys_like(word: str, known: Sequence[str], model: str) -> str:
    """Return all keys of a small section; of a large one those like ``word``, and where all are."""
    if len(known) <= _MOST_LISTED:
        return f"keys: {', '.join(known)}"
    kind = "site" if model in _OF_A_SITE else "profile"
    found = alike(word, known)
    similar = f"similar keys: {', '.join(found)}; " if found else ""
    return f"{similar}`gpujobs schema {kind}` lists all"


def unknown_keyword(
    word: str, known: Sequence[str], refused: Mapping[str, str], keys: Sequence[str]
) -> str:
    """Return a hint for an unknown keyword in Python; see `unknown_key`.

    ``refused`` are keywords without a meaning there, and their replacements.
    """
    target = WORDS.get(word, _NONE.get(word, ""))
    if " " in target:
        return target
    if (first := target.partition(".")[0]) in refused:
        return refused[first]
    if target == _LINE:
        return f"use directives=['--{word.replace('_', '-')}=NAME']"
    if target:
        return f"use {keyword_text(target)}"
    if exact := next((key for key in keys if key.rpartition(".")[2] == word), ""):
        return f"use {keyword_text(exact)}"
    near = nearest(word, [*known, *refused], _SAME_LEVEL)
    if near in refused:
        return refused[near]
    if near:
        return f"did you mean `{near}`?"
    parts = {key.rpartition(".")[2]: key for key in keys}
    if near := nearest(word, parts, _ELSEWHERE):
        return f"did you mean {keyword_text(parts[near])}?"
    return ""


def no_mapping(model: str, key: str, value: object, *, python: bool) -> str:
    """Return a hint for a plain value of a key that has the keys of ``model``, or ""."""
    first = _FIRST.get(model)
    if not first or not isinstance(value, str | int | float):
        return ""
    if python:
        return f"n_workers={value!r}" if model == "Workers" else f"{key}={{{first!r}: {value!r}}}"
    text = f"{key}: {{{first}: {value}}}"
    return f"{text} for CPU workers; `gpus` has a worker each" if model == "Workers" else text


_GPUS_IN_PYTHON = (
    (
        "gpus: auto takes the free ones, else",
        "n_workers='auto' takes the free ones, gpus_per_job=0",
    ),
    ("gpus: 0", "gpus_per_job=0"),
    (r"gpus: (\d+(?: or \d+)?)", r"n_workers for \1 GPUs"),
)
"""The number of GPUs, which Python classes do not have, in hints."""


def in_python(hint: str, keys: Iterable[str]) -> str:
    """Return a hint such as ``queue: main`` as keywords; ``keys`` are those of profiles."""
    for words, python in _GPUS_IN_PYTHON:
        hint = re.sub(rf"(?<![\w.]){words}(?!\w)", python, hint)
    names = "|".join(sorted(map(re.escape, keys), key=len, reverse=True))
    pattern = rf"(?<![\w.{{])`?({names}): (\{{[^{{}}]*\}}|\[[^\[\]]*\]|\d+:[\d:]+|[\w.+-]+)`?"
    return re.sub(pattern, lambda found: keyword_text(found[1], _python_value(found[2])), hint)


def _python_value(text: str) -> str:
    if text == "…" or re.fullmatch(r"\d+(\.\d+)?", text):
        return text
    if text[0] in "[{":
        inner = [part.partition(": ") for part in text[1:-1].split(", ")]
        items = [
            f"{name!r}: {_python_value(value)}" if value else _python_value(name)
            for name, _, value in inner
        ]
        return f"{text[0]}{', '.join(items)}{text[-1]}"
    return {"true": "True", "false": "False"}.get(text, repr(text))


def keyword_text(key: str, value: str = "…") -> str:
    """Return a dotted key of a profile as a keyword: ``workers={'threads': …}``."""
    first, *rest = key.split(".")
    for name in reversed(rest):
        value = f"{{{name!r}: {value}}}"
    return f"{first}={value}"


def misspelled(word: str, here: Sequence[str], keys: Sequence[str]) -> str:
    """Return "did you mean …?" for the key of which ``word`` is a misspelling, or "".

    A key of that name elsewhere comes first, then the keys ``here``, then all.
    """
    word = word.replace("-", "_")
    for names, similarity in ((keys, 1.0), (here, _SAME_LEVEL), (keys, _ELSEWHERE)):
        by_last_part = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
        if near := nearest(word, by_last_part, similarity):
            return f"did you mean `{by_last_part[near]}`?"
    return ""
