"""The result of one check of `gpujobs doctor`, and how results are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

<<<<<<< HEAD
=======
from ..batch.client import SchedulerClient
from ..batch.process import is_available
from ..clusters import monitor as clusters
from ..clusters.ledger import ClusterRecord, Ledger, private_folder
from ..clusters.prepare import make_cluster_plan
from ..clusters.submit import submit
from ..config.sitefiles import SiteFile
from ..config.spec import make_spec, settings_document
from ..errors import GpujobsError, RefusedError
from ..planning.directory import expand_directory
from ..schedulers import get_scheduler
from ..text import size_text
from . import jobcheck
>>>>>>> core

class CheckState(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One check: its subject, how it ended, the facts it found, and a remedy if one is known."""

    name: str
    state: CheckState
    result: str
    remedy: str = ""


def passed(name: str, result: str) -> Check:
    """Return a check that is ok."""
    return Check(name, CheckState.OK, result)


def warning(name: str, result: str, remedy: str = "") -> Check:
    """Return a check that found a limitation; the site can be used."""
    return Check(name, CheckState.WARNING, result, remedy)


def failed(name: str, result: str, remedy: str = "") -> Check:
    """Return a check that found an error; clusters will not work."""
    return Check(name, CheckState.FAILED, result, remedy)


def any_failed(checks: Sequence[Check]) -> bool:
    """Return whether a check has failed."""
    return any(check.state is CheckState.FAILED for check in checks)


def checks_text(checks: Sequence[Check]) -> str:
    """Return one line for each check, and a second one for its remedy."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:<7}  {check.name:<{width}}  {check.result}")
        if check.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    return "\n".join(lines)


<<<<<<< HEAD
def checks_json(checks: Sequence[Check]) -> dict[str, object]:
    """Return the checks as JSON."""
    return {"version": 2, "checks": [asdict(check) for check in checks]}
=======
def as_json(diagnostics: list[Finding]) -> dict[str, Any]:
    """Return the findings for programs."""
    return {"version": 1, "findings": [asdict(finding) for finding in diagnostics]}


# -- on this side of the batch scheduler ----------------------------------------------------------------------
def here(site_file: SiteFile) -> Iterator[Finding]:
    """Look at what can be seen without a job."""
    site = site_file.site
    yield Finding("site", OK, f"{site_file.name} ({site.scheduler}): {site_file.path}")
    scheduler = get_scheduler(site.scheduler)(site.cluster)
    yield from _commands(SchedulerClient(scheduler, site.commands, timeout=10.0))
    yield _directory(site.directory)
    yield _interface(site.network.interface)
    found = jobcheck.versions()
    seen = ", ".join(f"{name} {version}" for name, version in found.items())
    yield Finding("versions", OK, seen)
    if "ucxx" in site.network.protocols:
        yield _ucxx()


def _commands(batch: SchedulerClient) -> Iterator[Finding]:
    name = batch.scheduler.name
    wanted = {
        argv[0]
        for argv in (
            batch.scheduler.submit_command(),
            batch.scheduler.find_command("gpujobs", "nobody"),
            batch.scheduler.cancel_command(["1"]),
        )
    }
    missing = [word for word in sorted(wanted) if not is_available(batch.commands.get(word, word))]
    if missing:
        do = f"is this a login node? Else name their paths in the site file: commands: {{{missing[0]}: /path}}"
        yield Finding("commands", FAILED, f"not found: {', '.join(missing)}", do)
        return
    yield Finding("commands", OK, ", ".join(sorted(Path(word).name for word in wanted)))
    try:
        batch.find("gpujobs-doctor")
        yield Finding("batch scheduler", OK, f"{name} answers")
    except GpujobsError as error:
        yield Finding(
            "batch scheduler", FAILED, str(error).splitlines()[0], "try again when it answers"
        )


def _directory(template: str) -> Finding:
    try:
        path = Path(expand_directory(template))
        private_folder(path)
        probe = path / f".doctor-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except (GpujobsError, OSError) as error:
        do = "name a folder that login and compute nodes can write: `directory` of the site file"
        return Finding("directory", FAILED, str(error).splitlines()[0], do)
    return Finding("directory", OK, f"{path} can be written from here")


def _interface(name: str | None) -> Finding:
    there = jobcheck.interfaces()
    if name is None:
        return Finding("interface", OK, f"none named; here are {', '.join(there)}")
    if name in there:
        return Finding("interface", OK, f"{name} is here")
    seen = f"{name} is not on this host, which has {', '.join(there)}"
    return Finding("interface", WARNING, seen, 'Python clusters need scheduler="job" from here')


def _ucxx() -> Finding:
    from importlib.util import find_spec

    if find_spec("distributed_ucxx"):
        return Finding("ucxx", OK, "distributed-ucxx is installed")
    do = "pip install distributed-ucxx-cu12 (or -cu13) where the jobs' python is; else dask talks over tcp"
    return Finding(
        "ucxx", WARNING, "the site lists ucxx, and distributed-ucxx is not installed here", do
    )


# -- inside a job -----------------------------------------------------------------------------------------------
def in_a_job(
    site: str | None, settings: tuple[str, ...], ledger: Ledger, tell: Callable[[str], None]
) -> list[Finding]:
    """Submit a small cluster, run `jobcheck` in it, and say what that saw."""
    site_file = make_spec(settings_document(()), site=site).site
    folder = Path(expand_directory(site_file.site.directory)) / f"doctor-{os.urandom(4).hex()}"
    private_folder(folder)
    check = folder / "jobcheck.py"
    check.write_bytes(Path(jobcheck.__file__).read_bytes())
    try:
        with _door() as doors:
            record = _submit(site, settings, ["python", str(check), *doors], ledger, tell)
            view = _wait(record, ledger, tell)
            log = record.path / "logs" / "run.log"
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    except RefusedError as error:
        return [
            Finding(
                "job",
                FAILED,
                "\n".join(str(error).splitlines()[:3]),
                "mend `request` of the site file",
            )
        ]
    finally:
        check.unlink(missing_ok=True)
        folder.rmdir()
    facts = next((json.loads(line) for line in reversed(lines) if line.startswith('{"node"')), None)
    if facts is None:
        reason = view.reason or f"no answer within {PATIENCE:.0f} s"
        return [
            Finding(
                "job",
                FAILED,
                f"{record.id}: {reason}",
                _remedy(reason) or f"gpujobs logs --all {record.id}",
            )
        ]
    return [*_meaning(facts, view, record), *_gpus(view, record)]


def _submit(
    site: str | None,
    settings: tuple[str, ...],
    run: list[str],
    ledger: Ledger,
    tell: Callable[[str], None],
) -> ClusterRecord:
    """Submit two workers in one job, or one where the site's queues give no more."""
    failure: GpujobsError | None = None
    for wanted in ("gpus=2", "gpus=1", "workers.count=2"):
        own = (wanted, "gpus=0") if wanted.startswith("workers") else (wanted,)
        words = ("name=doctor", "walltime=10m", f"run={json.dumps(run)}", *own, *settings)
        try:
            spec = make_spec(settings_document(words), site=site)
            plan = make_cluster_plan(spec)
            words = (
                *words,
                f"start_workers={plan.n_workers}",
                f"env.GPUJOBS_DOCTOR_WORKERS={plan.n_workers}",
            )
            spec = make_spec(settings_document(words), site=site)
            record = submit(spec, make_cluster_plan(spec), ledger, tell)
        except RefusedError:
            raise
        except GpujobsError as error:
            failure = failure or error
            continue
        tell(
            f"{record.id}: a job with {plan.n_workers} workers on queue {plan.workers.queue}; gpujobs cancel ends it"
        )
        return record
    assert failure is not None  # noqa: S101 - the loop ran
    raise failure


def _wait(record: ClusterRecord, ledger: Ledger, tell: Callable[[str], None]) -> Any:
    watch, deadline = clusters.ClusterWatcher(record, ledger, tell), time.monotonic() + PATIENCE
    try:
        while not (view := watch.look()).over and time.monotonic() < deadline:
            time.sleep(1)
    finally:
        clusters.cancel(record, tell)
    return view


@contextmanager
def _door() -> Iterator[list[str]]:
    """Listen as a client's dask scheduler would; yield where, as ``host:port`` under each name of this host."""
    with socket.create_server(("", 0)) as server:
        threading.Thread(target=_open_to_all, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        from distributed.utils import get_ip

        yield [f"{name}:{port}" for name in dict.fromkeys((get_ip(), socket.getfqdn()))]


def _open_to_all(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


# -- what it means ------------------------------------------------------------------------------------------------
def _remedy(reason: str) -> str:
    if "dask_cuda" in reason or "bindings" in reason or "dask-cuda" in reason:
        return "pip install 'dask-cuda[cu12]' (or [cu13], by the driver) in the jobs' python"
    if "pynvml" in reason or "NVML" in reason or "libnvidia-ml" in reason:
        return "the node has no NVIDIA driver, or the job no GPU: see `request` and `visible_devices` of the site file"
    if "exit code 127" in reason or "exit code 126" in reason:
        return (
            "the jobs' python is not there: `environment: {python: …}`, or a setup that provides it"
        )
    return ""


def _meaning(facts: dict[str, Any], view: Any, record: ClusterRecord) -> Iterator[Finding]:
    yield Finding("job", OK, f"{record.id} ran on {facts['node']}")
    yield Finding("shared folder", OK, f"{record.path.parent} can be written on {facts['node']}")
    yield from _versions(facts["versions"])
    yield from _cuda(facts)
    yield from _network(facts, view)
    scratch = facts["scratch"]
    if scratch.get("writable"):
        local = scratch["kind"] not in ("nfs", "nfs4", "lustre", "gpfs", "beegfs")
        do = "" if local else "name node-local space: `scratch` of the site file"
        seen = f"{scratch['path']}: {size_text(scratch['free'])} free ({scratch['kind']})"
        yield Finding("scratch space", OK if local else WARNING, seen, do)
    else:
        yield Finding(
            "scratch space",
            FAILED,
            f"{scratch['path']} cannot be written",
            "`scratch` of the site file",
        )


def _versions(there: dict[str, str]) -> Iterator[Finding]:
    mine = jobcheck.versions()
    names = [
        name
        for name in ("python", "dask", "distributed", "dask-cuda")
        if name in mine or name in there
    ]
    differing = [f"{name} {mine.get(name, 'none')} here, {there.get(name, 'none')} in the job" for name in names
                 if mine.get(name) != there.get(name)]  # fmt: skip
    if differing:
        yield Finding(
            "versions",
            WARNING,
            "; ".join(differing),
            "use one environment for both (`environment.python`)",
        )
    else:
        yield Finding(
            "versions",
            OK,
            "the same in the job: " + ", ".join(f"{name} {there[name]}" for name in names),
        )


def _cuda(facts: dict[str, Any]) -> Iterator[Finding]:
    driver, bindings = facts["driver"], facts["versions"].get("cuda-bindings", "")
    if "error" in driver:
        yield Finding("driver", WARNING, f"no NVIDIA driver on {facts['node']}: {driver['error']}")
        return
    most = driver["cuda"] // 1000
    seen = f"{driver['version']}, good for CUDA {most}"
    if not bindings:
        yield Finding(
            "driver",
            FAILED,
            f"{seen}; cuda-bindings is missing",
            f"pip install 'dask-cuda[cu{most}]'",
        )
    elif int(bindings.split(".")[0]) > most:
        seen = f"{seen}; the job's python has CUDA {bindings.split('.')[0]}"
        yield Finding(
            "driver", FAILED, seen, f"pip install 'dask-cuda[cu{most}]', or a newer driver"
        )
    else:
        yield Finding("driver", OK, f"{seen}; the job's python has CUDA {bindings.split('.')[0]}")


def _gpus(view: Any, record: ClusterRecord) -> Iterator[Finding]:
    gpus = [worker["gpu"] for worker in view.facts.workers.values() if worker.get("gpu")]
    uuids = [gpu["uuid"] for gpu in gpus if gpu.get("uuid")]
    if not record.gpus:
        yield Finding("GPUs", WARNING, "none were asked for: CPU workers")
    elif len(set(uuids)) == record.gpus:
        yield Finding("GPUs", OK, ", ".join(f"{gpu['model']} {gpu['uuid']}" for gpu in gpus))
    else:
        seen = f"{record.gpus} asked for, {len(set(uuids))} seen"
        yield Finding("GPUs", FAILED, seen, "see `request` and `visible_devices` of the site file")


def _network(facts: dict[str, Any], view: Any) -> Iterator[Finding]:
    yield Finding("interfaces", OK, f"in the job: {', '.join(facts['interfaces'])}")
    if "client" in facts:
        yield Finding("route", OK, f"the job reaches this host ({facts['client']})")
    else:
        do = 'network.interface of the site file, or scheduler="job" for clusters from Python'
        yield Finding(
            "route", WARNING, f"the job does not reach this host: {facts['client_unreachable']}", do
        )
    notes = view.facts.notes
    speed = facts.get("bandwidth")
    seen = f"{facts['address'].split('://')[0]}"
    if speed:
        seen += f", {speed['GB/s']} GB/s between two workers ({'GPU' if speed['gpu_memory'] else 'host'} memory)"
    unused = [note for note in notes if "left unused" in note or "does not work" in note]
    do = (
        "list ucxx in `network.protocols` of the site file, where its traffic may go unencrypted"
        if unused
        else ""
    )
    yield Finding("transport", WARNING if unused else OK, "; ".join([seen, *unused]), do)
>>>>>>> core
