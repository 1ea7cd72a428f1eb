"""The program that `gpujobs doctor --run` runs inside a job.

It is copied into a shared folder as one file: standard library and distributed only, Python 3.9.
``python jobcheck.py HOST:PORT…`` connects to the dask cluster of its job, collects facts about the
job's node and prints them as one line of JSON. `gpujobs doctor` judges them.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import sys
from importlib import metadata
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from distributed import Client

PREFIX = "gpujobs doctor: "
"""Start of the line with the facts; `run` may print other lines."""
PACKAGES = ("dask", "distributed", "dask-cuda", "cuda-bindings")
"""Packages whose versions should be the same in a job and on the client."""
CONNECT_TIMEOUT = 5.0
WORKERS_TIMEOUT = 120.0


class Driver(TypedDict):
    """The NVIDIA driver. ``cuda``: the newest CUDA that it supports, 12040 for 12.4."""

    version: str
    cuda: int
    error: str
    """Why there is none; "" if there is one."""


class Scratch(TypedDict):
    """The node-local scratch space; ``free`` is in bytes."""

    path: str
    free: int
    filesystem: str
    writable: bool


class Exchange(TypedDict):
    """GB/s of a protocol between two workers; 0 with a problem."""

    rate: float
    problem: str


class Bandwidth(TypedDict):
    """How fast two workers exchange data in GPU memory or host memory, by protocol."""

    protocols: dict[str, Exchange]
    gpu_memory: bool


class JobFacts(TypedDict):
    """All facts about a job."""

    node: str
    versions: dict[str, str]
    """By package, also "python"."""
    driver: Driver
    interfaces: list[str]
    scratch: Scratch
    client: str
    """``host:port`` of the client, as the job reached it; "" if it did not."""
    client_error: str
    address: str
    """Address of the dask scheduler."""
    bandwidth: Bandwidth | None
    """None with fewer than two workers."""
    ucx: str
    """Version of UCX; "" without ucxx."""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed `PACKAGES`."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def driver() -> Driver:
    """Return the NVIDIA driver of this node."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    except Exception as error:  # no driver, or no pynvml
        return {"version": "", "cuda": 0, "error": f"{type(error).__name__}: {error}"}
    text = version.decode() if isinstance(version, bytes) else str(version)
    return {"version": text, "cuda": cuda, "error": ""}


def interfaces() -> list[str]:
    """Return the network interfaces of this node."""
    return [name for _, name in socket.if_nameindex()]


def first_reachable(addresses: list[str]) -> tuple[str, str]:
    """Return the first ``host:port`` that accepts a connection, or "" and why none does."""
    problem = ""
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT):
                return address, ""
        except OSError as error:
            problem = f"{address}: {error}"
    return "", problem


def scratch() -> Scratch:
    """Return the scratch space of this job: `$TMPDIR`, or /tmp."""
    path = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - the default of all programs
    try:
        return {
            "path": path,
            "free": shutil.disk_usage(path).free,
            "filesystem": filesystem(os.path.realpath(path)),
            "writable": os.access(path, os.W_OK),
        }
    except OSError:
        return {"path": path, "free": 0, "filesystem": "?", "writable": False}


def filesystem(path: str) -> str:
    """Return the type of the file system that holds the absolute ``path``, such as nfs4 or xfs."""
    mounts = {}
    with open("/proc/mounts", encoding="utf-8") as file:  # noqa: PTH123
        for line in file:
            _, mount_point, kind = line.split()[:3]
            mounts[mount_point] = kind
    holding = [point for point in mounts if f"{path}/".startswith(point.rstrip("/") + "/")]
    return mounts[max(holding, key=len)] if holding else "?"


def bandwidth(client: Client, source: str, target: str) -> Bandwidth:
    """Return how fast one worker receives data from another, over each protocol of the site."""
    sys.path.append(os.path.join(os.environ["GPUJOBS_FOLDER"], "injob.pyz"))  # noqa: PTH118
    exchange = importlib.import_module("gpujobs_injob.exchange")
    found: Bandwidth = {"protocols": {}, "gpu_memory": False}
    for protocol in os.environ["DOCTOR_PROTOCOLS"].split(","):
        one: Exchange = {"rate": 0.0, "problem": ""}
        try:
            served = client.run(exchange.serve_from_worker, protocol=protocol, workers=[source])
            address, found["gpu_memory"] = served[source]
            measured = client.run(exchange.measured_rate, address, workers=[target])
            one["rate"] = measured[target]
        except Exception as error:  # each protocol has errors of its own
            one["problem"] = str(error) or type(error).__name__
        found["protocols"][protocol] = one
    return found


def ucx_version() -> str:
    """Return the version of UCX, "" without ucxx."""
    try:
        return ".".join(map(str, importlib.import_module("ucxx").get_ucx_version()))
    except Exception:  # not installed, or its libraries do not load
        return ""


def collect(client_addresses: list[str]) -> JobFacts:
    """Return all facts. ``client_addresses``: ``host:port`` of the client under several names."""
    from distributed import Client

    reached, problem = first_reachable(client_addresses)
    rate = None
    with Client() as client:
        client.wait_for_workers(int(os.environ["DOCTOR_WORKERS"]), timeout=WORKERS_TIMEOUT)
        # The first and the last name are in different jobs, if there are several.
        names = client.run(lambda dask_worker: str(dask_worker.name))
        workers = sorted(names, key=names.__getitem__)
        if len(workers) > 1:
            rate = bandwidth(client, workers[0], workers[-1])
        return {
            "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "versions": versions(),
            "driver": driver(),
            "interfaces": interfaces(),
            "scratch": scratch(),
            "client": reached,
            "client_error": problem,
            "address": client.scheduler.address,
            "bandwidth": rate,
            "ucx": ucx_version(),
        }


if __name__ == "__main__":
    print(PREFIX + json.dumps(collect(sys.argv[1:])), flush=True)
