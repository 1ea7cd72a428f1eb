"""What `gpujobs doctor --run` runs inside a job. Standard library and distributed only; Python 3.9 and newer.

``python jobcheck.py HOST:PORT…`` connects to the cluster that it is in, looks around, and prints one JSON object: what
is here, as facts. What they mean is for `doctor` to say.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from typing import Any

LARGE = 256 * 2**20
"""Bytes that are moved between two workers to see how fast that is."""


def versions() -> dict[str, str]:
    """Return the versions of what a job and its client should have alike, as far as they are here."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("dask", "distributed", "dask-cuda", "cuda-bindings"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def driver() -> dict[str, Any]:
    """Return the NVIDIA driver's version and the newest CUDA that it can do (12.4 is 12040)."""
    try:
        import pynvml

        pynvml.nvmlInit()
        name = pynvml.nvmlSystemGetDriverVersion()
        return {
            "version": name.decode() if isinstance(name, bytes) else str(name),
            "cuda": int(pynvml.nvmlSystemGetCudaDriverVersion_v2()),
        }
    except Exception as error:  # no driver, or no package to ask it with
        return {"error": f"{type(error).__name__}: {error}"}


def interfaces() -> list[str]:
    """Return the network interfaces of this node."""
    return [name for _, name in socket.if_nameindex()]


def reached(doors: list[str]) -> str:
    """Return the first of ``host:port`` that answers, or why the last one does not."""
    why = ""
    for door in doors:
        host, _, port = door.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=5):
                return door
        except OSError as error:
            why = f"{door}: {error}"
    raise OSError(why)


def scratch() -> dict[str, Any]:
    """Return the node-local scratch space: path, bytes free, and the file system it is on."""
    path = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - what a job is given
    try:
        kinds = {}
        with open("/proc/mounts") as mounts:  # noqa: PTH123
            for line in mounts:
                _, where, kind = line.split()[:3]
                kinds[where] = kind
        inside = [
            where
            for where in kinds
            if f"{os.path.realpath(path)}/".startswith(where.rstrip("/") + "/")
        ]
        kind = kinds[max(inside, key=len)] if inside else "?"
        return {
            "path": path,
            "free": shutil.disk_usage(path).free,
            "kind": kind,
            "writable": os.access(path, os.W_OK),
        }
    except OSError as error:
        return {"path": path, "error": str(error)}


def block(count: int, key: int) -> Any:
    """Return ``count`` bytes, on the GPU where CuPy is there to put them."""
    try:
        import cupy

        return cupy.full(count, key % 251, dtype="u1")
    except Exception:  # no CuPy, no CUDA: host memory does as well
        return bytes([key % 251]) * count


def on_gpu(value: Any) -> bool:
    """Tell whether a block is on a GPU."""
    return not isinstance(value, bytes)


def bandwidth(client: Any, addresses: list[str]) -> dict[str, Any]:
    """Return GB/s from the first worker to the second one, the best of three."""
    from distributed import wait

    source, sink = addresses[:2]
    best, where = 0.0, False
    for key in range(4):  # the first one opens the connection
        made = client.submit(block, LARGE, key, workers=[source], pure=False)
        wait(made)
        started = time.perf_counter()
        where = client.submit(on_gpu, made, workers=[sink], pure=False).result()
        if key:
            best = max(best, LARGE / 1e9 / (time.perf_counter() - started))
    return {"GB/s": round(best, 2), "gpu_memory": where}


def look(doors: list[str]) -> dict[str, Any]:
    """Return all of it."""
    from distributed import Client

    found: dict[str, Any] = {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "versions": versions(),
        "driver": driver(),
        "interfaces": interfaces(),
        "scratch": scratch(),
    }
    try:
        found["client"] = reached(doors)
    except OSError as error:
        found["client_unreachable"] = str(error)
    with Client() as client:
        client.wait_for_workers(int(os.environ["GPUJOBS_DOCTOR_WORKERS"]), timeout=120)
        found["address"] = client.scheduler.address
        addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])
        if len(addresses) > 1:
            found["bandwidth"] = bandwidth(client, addresses)
    return found


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1:])), flush=True)
