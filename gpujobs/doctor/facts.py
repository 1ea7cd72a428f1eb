"""Judge the facts that `jobcheck` collected in a job of `gpujobs doctor --run`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..clusters import findings
from ..clusters.report import ClusterReport, numa_text
from ..injob.gpus import binding_messages
from ..injob.transport import Choice, Measured, choose
from . import jobcheck
from .checks import Check, failed, passed, warning
from .jobcheck import JobFacts, Scratch

COMPARED = ("python", "dask", "distributed", "dask-cuda")
"""Versions that must be the same in the job and on this side."""
OLDEST_DASK_CUDA = (26, 8)
"""As the extras `cuda12` and `cuda13` require it."""
GIB = 2**30
SHARED_FILESYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs")


def check_facts(facts: JobFacts, report: ClusterReport) -> Iterator[Check]:
    """Check the facts of a job, and the GPUs that its workers reported."""
    record, node = report.record, facts["node"]
    yield passed("job", f"{record.id} ran on {node}")
    yield passed("shared folder", f"{record.path.parent} is writable on {node}")
    yield _check_versions(facts["versions"])
    yield _check_driver(facts)
    yield passed("interfaces", f"in the job: {', '.join(facts['interfaces'])}")
    yield _check_route(facts)
    yield _check_transport(facts, report)
    yield _check_scratch(facts["scratch"])
    yield _check_gpus(report)
    yield _check_cpus(report)


def _check_versions(there: dict[str, str]) -> Check:
    here = jobcheck.versions()
    names = [name for name in COMPARED if name in here or name in there]
    different = [
        f"{name} {here.get(name, 'none')} here, {there.get(name, 'none')} in the job"
        for name in names
        if here.get(name) != there.get(name)
    ]
    version = there.get("dask-cuda", "")
    if version and tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_DASK_CUDA:
        remedy = "pip install -U 'gpujobs[cuda12]' (or [cuda13]) for the jobs"
        return failed("versions", f"dask-cuda {version} in the job is too old", remedy)
    if different:
        remedy = "use one environment for both (`environment.python`)"
        return warning("versions", "; ".join(different), remedy)
    same = ", ".join(f"{name} {there[name]}" for name in names)
    return passed("versions", f"the same in the job: {same}")


def _check_driver(facts: JobFacts) -> Check:
    driver = facts["driver"]
    if driver["error"]:
        return warning("driver", f"no NVIDIA driver on {facts['node']}: {driver['error']}")
    newest = driver["cuda"] // 1000
    result = f"{driver['version']}, supports CUDA {newest}"
    remedy = f"pip install 'dask-cuda[cu{newest}]'"
    bindings = facts["versions"].get("cuda-bindings", "")
    if not bindings:
        return failed("driver", f"{result}; cuda-bindings is missing", remedy)
    cuda = int(bindings.split(".")[0])
    result = f"{result}; the job's python has CUDA {cuda}"
    if cuda > newest:
        return failed("driver", result, f"{remedy}, or install a newer driver")
    return passed("driver", result)


def _check_route(facts: JobFacts) -> Check:
    if facts["client"]:
        return passed("route", f"the job reaches this host ({facts['client']})")
    result = f"the job does not reach this host: {facts['client_error']}"
    remedy = 'set network.interface in the site file, or use scheduler="job" for Python clusters'
    return warning("route", result, remedy)


def _check_transport(facts: JobFacts, report: ClusterReport) -> Check:
    folder, measured = report.folder, measured_rates(facts, report)
    parts, reason = [rate_text(facts)], folder.transport.reason
    if len(measured) > 1:
        chosen, faster = choose(list(measured), measured, len(folder.dask.connected))
        parts.append(Choice(chosen, measured=measured).text())
        if facts["bandwidth"] and facts["bandwidth"]["gpu_memory"]:
            reason = reason or faster
    if not reason and not findings.unused_networks(folder):
        return passed("transport", "; ".join(parts))
    remedy = (
        "list ucxx in `network.protocols` of the site file, if its traffic may be sent unencrypted"
    )
    if reason:  # it is listed
        remedy = "if ucxx is missing: pip install 'gpujobs[cuda12]' (or [cuda13]) for the jobs"
    notes = dict.fromkeys(filter(None, (reason, *findings.notes(folder))))
    return warning("transport", "; ".join([*parts, *notes]), remedy)


def rate_text(facts: JobFacts) -> str:
    """Return the protocol of a job, and GB/s between two workers if they were measured."""
    protocol, measured = facts["address"].split("://")[0], facts["bandwidth"]
    if not measured or protocol not in measured["protocols"]:
        return protocol
    one = measured["protocols"][protocol]
    if one["problem"]:
        return f"{protocol}, not measured: {one['problem']}"
    memory = "GPU" if measured["gpu_memory"] else "host"
    return f"{protocol}, {one['rate']:.3g} GB/s between two workers ({memory} memory)"


def measured_rates(facts: JobFacts, report: ClusterReport) -> dict[str, Measured]:
    """Return the rates between two workers: those of a job, or of two jobs if there are several."""
    bandwidth = facts["bandwidth"]
    if not bandwidth:
        return {}
    found: dict[str, Measured] = {}
    for protocol, one in bandwidth["protocols"].items():
        if one["problem"]:
            problem = f"{protocol} does not work on {facts['node']}: {one['problem']}"
            found[protocol] = Measured(problem=problem)
        elif len(report.jobs) == 1:
            found[protocol] = Measured(within=one["rate"])
        else:
            found[protocol] = Measured(between=one["rate"])
    return found


def _check_scratch(scratch: Scratch) -> Check:
    path = scratch["path"]
    if not scratch["writable"]:
        return failed("scratch space", f"{path} is not writable", "set `scratch` in the site file")
    result = f"{path}: {scratch['free'] / GIB:.1f} GiB free ({scratch['filesystem']})"
    if scratch["filesystem"] in SHARED_FILESYSTEMS:
        remedy = "set `scratch` in the site file to node-local space"
        return warning("scratch space", result, remedy)
    return passed("scratch space", result)


def _check_gpus(report: ClusterReport) -> Check:
    requested = report.record.gpus
    if not requested:
        return warning("GPUs", "none requested: CPU workers")
    found = {gpu.uuid: gpu for job in report.jobs for gpu in job.gpus}
    if len(found) != requested:
        remedy = "see `request` and `visible_devices` of the site file"
        return failed("GPUs", f"{requested} requested, {len(found)} found", remedy)
    return passed("GPUs", ", ".join(f"{gpu.model} {gpu.uuid}" for gpu in found.values()))


def _check_cpus(report: ClusterReport) -> Check:
    workers = report.folder.dask.connected
    result = "; ".join(
        f"{name}: {binding['cpus']} (NUMA node {numa_text(binding)})"
        for name, worker in sorted(workers.items())
        if (binding := worker.get("binding"))
    )
    if not (messages := binding_messages(workers)):
        return passed("CPUs", result)
    remedy = "Slurm: `--gres-flags=enforce-binding` in `request`; else a larger `cpus_per_gpu`"
    return warning("CPUs", "; ".join([*messages, result]), remedy)
