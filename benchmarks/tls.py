"""Compare TLS with plain tcp between two workers, with several settings of TLS.

Run ``python benchmarks/tls.py`` at the top of a checkout, or ``--module cupy`` on a machine with
two GPUs. Each worker gets arrays of the other one, in both directions at the same time, as in a
transpose. All clusters stay up and take turns. ``speed`` and ``CPU`` are relative to plain tcp:
medians of the durations, and the least CPU seconds of both workers.

``--variables LD_LIBRARY_PATH=/opt/openssl-3.5/lib`` adds a row with these environment variables, to
try another OpenSSL.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpujobs.injob.certificate import make_certificate
from gpujobs.injob.network import dask_config

TLS = "DASK_DISTRIBUTED__COMM__TLS__"
AES_128 = {f"{TLS}MAX_VERSION": "1.2", f"{TLS}CIPHERS": "ECDHE+AESGCM+AES128"}
CHACHA20 = {f"{TLS}MAX_VERSION": "1.2", f"{TLS}CIPHERS": "ECDHE+CHACHA20"}
OPENSSL = "openssl_conf = a\n[a]\nssl_conf = b\n[b]\nsystem_default = c\n[c]\n{}\n"
"""A configuration of OpenSSL that applies to all connections of a process."""
ULP = Path("/proc/sys/net/ipv4/tcp_available_ulp")
REFERENCE, PROTECTED, OWN = "plain tcp", "TLS, as gpujobs sets it", "TLS with --variables"


# -- one cluster, in its own process ---------------------------------------------------------------
def serve(protocol: str, module: str, size: int, count: int) -> None:
    """Start two workers; measure one exchange for each line on the standard input."""
    from distributed import Client, LocalCluster
    from distributed.security import Security

    options: dict[str, Any] = {
        "n_workers": 2,
        "threads_per_worker": 1,
        "protocol": protocol,
        "dashboard_address": ":0",
    }
    if protocol == "tls":
        options["security"] = Security()
    kind: Any = LocalCluster
    if module == "cupy":
        from dask_cuda import LocalCUDACluster

        kind = LocalCUDACluster
    with kind(**options) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=60)
        cipher = client.scheduler_comm.comm.extra_info.get("cipher", ["none"])
        answer({"cipher": cipher[0], "openssl": ssl.OPENSSL_VERSION})
        for _ in sys.stdin:
            answer(exchange(client, module, size, count))


def answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def exchange(client: Any, module: str, size: int, count: int) -> dict[str, float]:
    """Move ``count`` arrays of ``size`` bytes from each worker to the other one."""
    from distributed import wait

    pair = list(client.nthreads())
    arrays = {
        target: [
            client.submit(filled, module, size, workers=[source], pure=False) for _ in range(count)
        ]
        for source, target in (pair, pair[::-1])
    }
    wait(arrays)
    used, started = sum(client.run(cpu).values()), time.perf_counter()
    results = [
        client.submit(last, array, workers=[target], pure=False)
        for target, found in arrays.items()
        for array in found
    ]
    assert client.gather(results) == [1.0] * len(results)
    seconds = time.perf_counter() - started
    used = sum(client.run(cpu).values()) - used
    del arrays, results
    client.run(free, module)
    return {"seconds": seconds, "cpu": used}


def filled(module: str, size: int) -> Any:
    array = importlib.import_module(module).ones(size // 8)
    last(array)  # until CuPy's asynchronous kernel has finished
    return array


def last(array: Any) -> float:
    return float(array[-1])


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def free(module: str) -> None:
    """Return the GPU memory that CuPy keeps, for the other clusters."""
    if module == "cupy":
        importlib.import_module(module).get_default_memory_pool().free_all_blocks()


# -- all clusters ----------------------------------------------------------------------------------
class Row(NamedTuple):
    """A cluster to measure."""

    name: str
    protocol: str
    variables: dict[str, str]


def rows(folder: Path, module: str, own: list[str]) -> list[Row]:
    """Return what can be measured on this machine."""

    def openssl(name: str, *lines: str) -> dict[str, str]:
        path = folder / f"{name}.cnf"
        path.write_text(OPENSSL.format("\n".join(lines)))
        return {"OPENSSL_CONF": str(path)}

    shard = "DASK_DISTRIBUTED__COMM__SHARD"
    short = openssl("aes128", "Ciphersuites = TLS_AES_128_GCM_SHA256")
    settings = {
        PROTECTED: {},
        "TLS 1.3, AES-128 (OPENSSL_CONF)": short,
        "TLS 1.2, AES-128": AES_128,
        "TLS 1.2, ChaCha20": CHACHA20,
        "frames of 4 MiB": {shard: "4MiB"},
        "frames of 1 GiB": {shard: "1GiB"},
        "serialized in the event loop": {"DASK_DISTRIBUTED__COMM__OFFLOAD": "False"},
    }
    if ULP.exists() and "tls" in ULP.read_text().split():
        kernel = openssl("kernel", "Options = KTLS")
        settings["kernel TLS, 1.3"] = kernel
        settings["kernel TLS, 1.2, AES-128"] = {**kernel, **AES_128}
    if own:
        settings[OWN] = dict(item.split("=", 1) for item in own)
    protect = dask_config(folder, "tls")
    found = [Row(REFERENCE, "tcp", {})]
    found += [Row(name, "tls", {**protect, **variables}) for name, variables in settings.items()]
    if module == "cupy" and importlib.util.find_spec("distributed_ucxx"):
        found.append(Row("ucxx, not encrypted", "ucxx", {}))
    return found


class Served:
    """The process of one cluster."""

    def __init__(self, row: Row, arguments: list[str], log: IO[str]) -> None:
        self.name = row.name
        argv = [sys.executable, __file__, "--serve", row.protocol, *arguments]
        environ = {**os.environ, **row.variables}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            argv, env=environ, stdin=pipe, stdout=pipe, stderr=log, text=True
        )
        self.runs: list[dict[str, float]] = []

    def read(self) -> dict[str, Any]:
        for line in cast("IO[str]", self.process.stdout):
            if line.startswith("{"):  # UCX writes its warnings to stdout
                return cast("dict[str, Any]", json.loads(line))
        raise RuntimeError(f"{self.name}: the cluster ended")

    def measure(self) -> dict[str, Any]:
        print(file=self.process.stdin, flush=True)
        return self.read()

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(run["seconds"] for run in self.runs)

    @property
    def cpu(self) -> float:
        """The least, because other load on the machine only adds to it."""
        return min(run["cpu"] for run in self.runs)

    def close(self) -> None:
        cast("IO[str]", self.process.stdin).close()
        self.process.wait()


def compare(served: list[Served], gigabytes: float, seconds: float) -> None:
    """Measure all clusters in turn until ``seconds`` have passed, and print one table."""
    until = time.monotonic() + seconds
    started = {each.name: each.read() for each in served}
    for each in served:
        each.measure()
    while time.monotonic() < until or not served[0].runs:
        for each in served:
            each.runs.append(each.measure())
    plain = served[0]
    print(f"{len(plain.runs)} alternating runs; {plain.name}: {gigabytes / plain.seconds:.2f} GB/s")
    print(f"{'':<34}{'speed':>7}{'CPU':>7}{'CPU s/GB':>10}  cipher")
    for each in served:
        speed, used = plain.seconds / each.seconds, each.cpu / plain.cpu
        print(f"{each.name:<34}{speed:>7.2f}{used:>7.2f}{each.cpu / gigabytes:>10.2f}", end="")
        print("  {cipher}, {openssl}".format(**started[each.name]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--module", choices=["cupy", "numpy"], default="numpy")
    parser.add_argument("--size", type=int, default=500_000_000, help="bytes of an array")
    parser.add_argument("--count", type=int, default=2, help="arrays in each direction")
    parser.add_argument("--seconds", type=float, default=45, help="no round begins later")
    parser.add_argument("--only", nargs="*", help="rows whose names contain one of these texts")
    parser.add_argument("--variables", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.module, options.size, options.count)
        return
    arguments = [f"--{key}={getattr(options, key)}" for key in ("module", "size", "count")]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        make_certificate(folder)
        log = stack.enter_context((folder / "log").open("w"))
        served = []
        for row in rows(folder, options.module, options.variables):
            wanted = options.only is None or any(text in row.name for text in options.only)
            if wanted or row.name in (REFERENCE, PROTECTED, OWN):
                served.append(Served(row, arguments, log))
                stack.callback(served[-1].close)
        try:
            compare(served, 2 * options.count * options.size / 1e9, options.seconds)
        except RuntimeError:
            sys.stderr.write((folder / "log").read_text())
            raise


if __name__ == "__main__":
    main()
