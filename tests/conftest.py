"""Fixtures: a private batch scheduler per test process, and a command line with a home of its own."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from .support import sge as sge_support
from .support import site as site_support
from .support import slurm as slurm_support
from .support.backend import Backend, SlurmBackend
from .support.cli import (
    ORDINARY_USER,
    QUIET_DASK,
    STUB,
    Cli,
    python_for,
    text_of,
    with_stub,
    without_dashboard,
)
from .support.fake_lsf import LsfBackend
from .support.fakes import FakeBackend, PbsBackend, TorqueBackend
from .support.processes import patience, reaper

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts us so in the background, and what we start would not hear Ctrl-C either.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["DASK_ROOT_CONFIG"] = str(QUIET_DASK)  # dask is imported later

REQUIRED = set(os.environ.get("GPUJOBS_REQUIRE", "").replace(",", " ").split())

FAKES = ["pbs", "torque", "lsf"]
"""Fake batch schedulers with a fixture ``NAME_backend``, with faults that can be switched on."""

BACKENDS = ["slurm", "sge", *FAKES]
"""Batch schedulers with a fixture ``NAME_backend``; the first one runs every test in `make test`."""

slow_variant = functools.partial(pytest.param, marks=pytest.mark.slow)
"""A parameter for `make slow`: `make test` has another one, or few, of the same feature."""

SITE = "site"
"""The batch scheduler of ``--site``, which then replaces the others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpujobs")
    group.addoption("--site", help="run the tests on the batch scheduler of this site")
    words = "nodes of the site that tests may fill; without it, those tests are skipped"
    group.addoption("--site-nodes", type=int, default=0, help=words)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "waits: a minute or longer, with little to do; starts early")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import a share of the test modules: pytest keeps what it compiles, and each process needs all of them.

    In a fresh clone, each process would compile all modules by itself.
    """
    gc.disable()  # until the collection has ended
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1 or session.config.args != session.config.getini("testpaths"):
        return
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("test_*.py"))[number::processes]:
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # which the collection shows
            importlib.import_module(name)


def pytest_collection_finish() -> None:
    """Keep what the collection has made from the garbage collector, which would look at it again and again.

    Later it looks less often than usual: tests make much that lives for a moment, in a sixth of their time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def backend_of(item: pytest.Item) -> str:
    """Return the batch scheduler of a test, ``""`` if it needs no particular one."""
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("backend", "")) if callspec else ""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Scale the time limits to the machine; mark as slow the tests that `make test` leaves out.

    On another batch scheduler than the first, `make test` has only the tests whose mark
    ``conformance`` names it; `make slow` has those of Grid Engine and those that it names with ``slow``, and
    `make variants` the rest of the fakes.
    """
    at_site = bool(config.getoption("--site"))
    left_out = [item for item in items if (backend_of(item) == SITE) is not at_site]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if (backend_of(item) == SITE) is at_site]
    usual = float(config.getini("timeout") or 0)
    for item in items:
        own = item.get_closest_marker("timeout")
        limit = float(own.args[0]) if own else usual
        item.add_marker(pytest.mark.timeout(patience(limit)), append=False)
        name = backend_of(item) or BACKENDS[0]
        conformance = item.get_closest_marker("conformance")
        if name != BACKENDS[0] and not (conformance and name in (SITE, *conformance.args)):
            item.add_marker(pytest.mark.slow)
            if name in FAKES and not (conformance and name in conformance.kwargs.get("slow", ())):
                item.add_marker(pytest.mark.variant)
    yield  # to the option -m
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        items[:] = waiting_first(items, processes)


def waiting_first(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Begin with the tests that wait: those with the mark ``waits`` in every second process, then those of tests/real.

    ``--dist worksteal`` gives each process a part of the list. A test of minutes that began late would be the last one,
    alone; in all processes at once, they would leave the CPUs idle. Tests of real clusters wait, too: each process has
    some of their files, and then short tests, of which others take the last ones.
    """
    waiting = [item for item in items if item.get_closest_marker("waits")]
    short: list[pytest.Item] = []
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("waits"):
            real = item.path.parent.name == "real"
            (files.setdefault(item.path, []) if real else short).append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for file in sorted(files.values(), key=len, reverse=True):
        min(shares, key=len).extend(file)
    others = iter(short)
    found: list[pytest.Item] = []
    for number, share in enumerate(shares):
        size = (len(items) - len(found)) // (processes - number)
        begin = waiting[number // 2 :: (processes + 1) // 2] if number % 2 == 0 else []
        part = [*begin, *share]
        found += [*part, *itertools.islice(others, max(0, size - len(part)))]
    return [*found, *others]


def nothing_left(backend: Backend) -> None:
    """Fail where a test leaves jobs behind; a busy batch scheduler takes a while to end one."""
    try:
        backend.wait_empty(60)
    finally:
        backend.clean()


def unavailable(what: str, why: str) -> None:
    """Skip, or fail where ``GPUJOBS_REQUIRE`` names it."""
    if what in REQUIRED:
        pytest.fail(f"GPUJOBS_REQUIRE={what}, but {why}")
    pytest.skip(f"no real {what}: {why}")


def need_library(name: str) -> None:
    """Skip, or fail where ``GPUJOBS_REQUIRE`` names it, if a library of the examples is missing."""
    if importlib.util.find_spec(name) is None:
        unavailable(name, "it is not installed")


@pytest.fixture(scope="session")
def shared_folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder that every user can enter: what login and compute nodes share."""
    if request.config.getoption("--site"):
        folder = site_support.shared_home()
        yield folder
        site_support.remove(folder)
        return
    folder = Path(tempfile.mkdtemp(prefix="gpujobs-tests-"))
    folder.chmod(0o755)
    with reaper(str(folder)):
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


def fresh_folder(parent: Path, name: str) -> Path:
    """Make a folder for one boot: a fixture of a module may be set up twice in a test process."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def slurm_backend(shared_folder: Path) -> Iterator[SlurmBackend]:
    """A real Slurm of 4 nodes with 4 fake GPUs each."""
    if why := slurm_support.missing():
        unavailable("slurm", why)
    with slurm_support.PrivateSlurm(shared_folder / "slurm").running() as running:
        yield SlurmBackend(running)


@pytest.fixture(scope="session")
def sge_backend(shared_folder: Path) -> Iterator[sge_support.SgeBackend]:
    """A real Grid Engine of 2 nodes with 4 fake GPUs each."""
    if why := sge_support.missing():
        unavailable("sge", why)
    with sge_support.PrivateSge(shared_folder / "sge").running() as running:
        yield sge_support.SgeBackend(running)


@pytest.fixture(scope="session")
def pbs_backend(shared_folder: Path) -> Iterator[FakeBackend]:
    """A fake OpenPBS of 4 nodes with 4 fake GPUs each."""
    with PbsBackend(shared_folder / "pbs").running() as running:
        yield running


@pytest.fixture(scope="session")
def torque_backend(shared_folder: Path) -> Iterator[FakeBackend]:
    """A fake Torque of 4 nodes with 4 fake GPUs each."""
    with TorqueBackend(shared_folder / "torque").running() as running:
        yield running


@pytest.fixture(scope="session")
def lsf_backend(shared_folder: Path) -> Iterator[FakeBackend]:
    """A fake LSF of 4 nodes with 4 fake GPUs each."""
    with LsfBackend(shared_folder / "lsf").running() as running:
        yield running


@pytest.fixture(scope="session")
def site_backend(shared_folder: Path, request: pytest.FixtureRequest) -> Backend:
    """The batch scheduler of ``--site``."""
    site, nodes = request.config.getoption("--site"), request.config.getoption("--site-nodes")
    return site_support.SiteBackend(site, nodes, shared_folder)


@pytest.fixture(params=[*BACKENDS, SITE])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each batch scheduler in turn; nothing is left in it after a test."""
    found: Backend = request.getfixturevalue(f"{request.param}_backend")
    yield found
    nothing_left(found)


@pytest.fixture
def home(shared_folder: Path, request: pytest.FixtureRequest) -> Path:
    """A new home folder."""
    return Path(tempfile.mkdtemp(prefix="home-", dir=shared_folder))


@pytest.fixture(params=["ordinary"])
def cli(backend: Backend, home: Path, request: pytest.FixtureRequest) -> Cli:
    """The command line of an ordinary user (or root), with the site file of ``backend`` as the site `here`.

    With the mark ``stub``, jobs import the stub of dask instead of dask; with ``others``, not on the first batch
    scheduler. Jobs of ``--site`` always import dask.
    """
    mark = request.node.get_closest_marker("stub")
    with_dask = [SITE, BACKENDS[0]] if mark and mark.kwargs.get("others") else [SITE]
    stub = mark is not None and (backend_of(request.node) or BACKENDS[0]) not in with_dask
    return make_cli(backend, home, request.param, stub=stub)


def make_cli(backend: Backend, home: Path, kind: str, *, stub: bool = False) -> Cli:
    """Return the command line of an ordinary user, or of root."""
    other = kind == "ordinary" and os.geteuid() == 0 and backend.same_host
    user = ORDINARY_USER if other else None
    try:
        python_for(user)
    except LookupError as error:
        unavailable(backend.name, str(error))
    sites = home / "sites"
    made = Cli(
        home, {**backend.env(), "GPUJOBS_SITE_PATH": str(sites), "GPUJOBS_SITE": "here"}, user
    )
    sites.mkdir()
    sites.chmod(0o755)
    site = without_dashboard(backend.site()) if backend.same_host else backend.site()
    made.site = with_stub(site) if stub else site
    (sites / "here.yaml").write_text(text_of(made.site))
    if templates := backend.templates():
        (sites / "templates").symlink_to(templates)
    return made


def local_cli(home: Path, request: pytest.FixtureRequest) -> Cli:
    """Return the command line of the user who runs the tests, with this machine as the site.

    With the mark ``stub``, jobs import the stub of dask instead of dask.
    """
    made = Cli(home, {"GPUJOBS_SITE": "local"}, None)
    if request.node.get_closest_marker("stub"):
        sites = home / "sites"
        sites.mkdir()
        site = {"description": "this machine", "scheduler": "local", "queues": {"local": {}}}
        site["setup"] = f"export PYTHONPATH={STUB}"
        (sites / "local.yaml").write_text(text_of(site))
        made.env["GPUJOBS_SITE_PATH"] = str(sites)
    return made
