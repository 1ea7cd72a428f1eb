"""The machines of a site that ssh reaches: their free GPUs, and one job on all of them."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from ..batch import process
from ..config.document import Document
from ..config.model import build
from ..config.site import Site
from ..config.sitefiles import SiteFile, load_site
from ..config.spec import ClusterSpec, make_spec, with_settings
from ..errors import InputError, UnavailableError
from ..injob.folder import DamagedError, parse_json
from ..planning.requested import Machine
from ..schedulers.local import AGENT, INHERIT, SSH
from ..text import plural
from .freequeues import gpus_of_clusters, this_machine

_SOURCE = "the machines of the site"
_GPU = re.compile(r"[A-Za-z0-9/-]{1,100}")
"""Index or UUID of a GPU, or of a MIG slice."""
_MOST_OUTPUT = 2**20
"""Bytes that a machine may say, with what the start-up files of its shell print."""


def machine_names(value: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of machines; a text has them with commas between."""
    names = value.split(",") if isinstance(value, str) else value
    return tuple(name.strip() for name in names)


def with_machines(site: SiteFile, names: Sequence[str], *, inherit: bool = False) -> SiteFile:
    """Return a site of this machine with these machines instead. Raises InputError.

    ``inherit``: its jobs have the environment of this process, and end with it.
    """
    value: dict[str, object] = {"machines": list(names)}
    if inherit:
        value["submit_arguments"] = [INHERIT]
    document = Document(value, source="machines").over(site.document)
    return replace(site, site=build(Site, document), document=document)


def spec_on_machines(
    profile: Document, names: Sequence[str], *, site: str | None, base: Path | None, name: str
) -> ClusterSpec:
    """Return the specification of a cluster on machines, which ends with this process.

    The arguments are those of `make_spec`; without a site it is the local one. Raises InputError.
    """
    own = with_machines(load_site(site or "local"), names, inherit=True)
    return make_spec(profile, site=own, base=base, name=name)


# -- the free GPUs of machines ---------------------------------------------------------------------
def read_machines(names: Sequence[str], python: str) -> list[Machine]:
    """Return the machines of these names, all at the same time, by the interpreter ``python``.

    Raises UnavailableError with the name of one that cannot be used.
    """
    own = gpus_of_clusters()  # whose workers may start only now
    with ThreadPoolExecutor(len(names)) as threads:
        found = list(threads.map(lambda name: _read(name, python), names))
    for number, (name, machine) in enumerate(zip(names, found, strict=True)):
        taken = {gpu: own[f"{name}:{gpu}"] for gpu in machine.gpus if f"{name}:{gpu}" in own}
        free = tuple(gpu for gpu in machine.gpus if gpu not in taken)
        found[number] = replace(machine, gpus=free, busy={**machine.busy, **taken})
    return found


def _read(name: str, python: str) -> Machine:
    command = shlex.join([python, "-P", "-m", __spec__.name])
    environ = process.environment((AGENT,))
    result = process.run([*SSH, name, command], env=environ, most=_MOST_OUTPUT)
    lines = result.stdout.splitlines()  # a start-up file of the shell may print others
    said = result.stderr.strip().splitlines() or [result.problem or "it has not answered"]
    if result.exit_code == 0 and lines:
        try:
            return _parse(lines[-1])
        except DamagedError as error:
            said = [f"in its answer, {error}"]
    message = f"machine {name} cannot be used: {said[-1]}"
    hint = f"`ssh {name} {python} -V` must work without a password; or leave the machine out"
    raise UnavailableError(message, hint=hint)


def _parse(line: str) -> Machine:
    """Return what another machine says that it has. Raises DamagedError."""
    machine: Machine = parse_json(line, Machine)
    numbers = {"cpus": machine.cpus, "memory": machine.memory, "gpu_memory": machine.gpu_memory}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise DamagedError(f"`{name}` is {number}")
    if len(set(machine.gpus)) < len(machine.gpus) or not all(map(_GPU.fullmatch, machine.gpus)):
        raise DamagedError("`gpus` are not indices or UUIDs")
    return machine


# -- one job on all machines -----------------------------------------------------------------------
def on_machines(spec: ClusterSpec) -> tuple[ClusterSpec, Machine]:
    """Return the specification of one job on all machines of its site, and what each of them has.

    Each gives the same number of GPUs. Raises InputError, or UnavailableError for a machine.
    """
    names, profile = spec.site.site.machines, spec.profile
    if profile.layout == "mpi":
        message = "machines are started by ssh, not by MPI"
        raise InputError(message, hint="layout: allocation")
    found = read_machines(names, spec.python)
    fewest = min(found, key=lambda one: len(one.gpus))
    which = f"{names[found.index(fewest)]} has {_free_text(fewest)}"
    gpus = _wanted(spec, len(fewest.gpus), which)
    each = gpus // len(names)
    places = tuple(
        f"{name}:{gpu}"
        for name, machine in zip(names, found, strict=True)
        for gpu in machine.gpus[:each]
    )
    machine = Machine(
        gpus=fewest.gpus[:each],
        cpus=min(one.cpus for one in found),
        memory=min(one.memory for one in found),
        busy={},
        gpu_memory=min(one.gpu_memory or 0 for one in found) or None,
        nodes=len(names),
        places=places,
    )
    settings = Document({"layout": "allocation", "gpus": gpus}, source=_SOURCE)
    note = f"machines {', '.join(names)}: {plural(each, 'GPU')} of each, by ssh"
    return replace(with_settings(spec, settings), notes=(*spec.notes, note)), machine


def _free_text(machine: Machine) -> str:
    busy = "".join(f"; GPU {gpu} is used by {user}" for gpu, user in machine.busy.items())
    return f"{plural(len(machine.gpus), 'free GPU')}{busy}"


def _wanted(spec: ClusterSpec, least: int, which: str) -> int:
    """Return the GPUs of the job, whole workers on each machine; ``least``: free ones of each.

    ``which`` says which machine that is.
    """
    profile, number = spec.profile, len(spec.site.site.machines)
    size = profile.workers.gpus_per_worker
    most = least // size * size * number
    if profile.gpus == "auto" or "gpus" not in profile.given:
        if not most:
            raise InputError(f"{which}; a worker needs {size}", hint="leave the machine out")
        return most
    gpus = int(profile.gpus)
    step = size * number
    if gpus == 0 or gpus % step:
        fewer, more = gpus // step * step, (gpus // step + 1) * step
        choices = f"{fewer} or {more}" if fewer else str(more)
        message = (
            f"{plural(gpus, 'GPU')} on {plural(number, 'machine')}: each gives the same number"
        )
        raise InputError(message, hint=f"gpus: {choices}")
    if gpus > most:
        message = f"{gpus // number} GPUs of each machine wanted; {which}"
        raise InputError(message, hint="gpus: auto takes the free ones")
    return gpus


def main() -> None:
    """Print what this machine has, for `read_machines` on another one."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    print(json.dumps(asdict(this_machine())))


if __name__ == "__main__":
    main()
