"""The private parts of distributed and dask_jobqueue that the cluster class leans on, held still.

This runs on the installed release; `tests/slow/test_releases.py` runs it, and a cluster, on the oldest and the newest.
"""

from __future__ import annotations

import asyncio
import inspect
import re

import pytest

distributed = pytest.importorskip("distributed")

from distributed.deploy.adaptive import Adaptive  # noqa: E402
from distributed.deploy.cluster import Cluster  # noqa: E402
from distributed.deploy.spec import ProcessInterface, SpecCluster  # noqa: E402

from gpujobs.deploy.cluster import AttachedCluster, GPUJobQueueCluster  # noqa: E402
from gpujobs.injob.demand import add_handlers  # noqa: E402

OURS = {
    "_abort", "_check_open", "_close_all", "_close_task", "_dask", "_devices", "_job_reports", "_known_report", "_lease", "_lease_thread", "_open", "_owner",
    "_end", "_pool", "_refresh", "_register", "_renew_lease", "_report", "_scaler", "_start_dask", "_submit_first_jobs", "_to", "_view",
    "_card", "_card_of", "_drawing", "_keep_card", "_last_card", "_live_card", "_reporting",
}  # fmt: skip
"""Private names that this package adds: no base may come to have them."""


def source(function: object) -> str:
    return re.sub(r"\s+", " ", inspect.getsource(function))  # type: ignore[arg-type]


def test_what_is_overridden_is_there() -> None:
    for name in (
        "_start", "_correct_state", "_correct_state_internal", "_update_worker_status", "_close", "scale", "scale_down", "adapt", "plan",
        "requested", "_threads_per_worker", "_memory_per_worker",
    ):  # fmt: skip
        assert name in vars(SpecCluster), name
    for name in (
        "_wait_for_workers",
        "_get_logs",
        "_repr_html_",
        "_widget",
        "_update_worker_status",
        "_log",
        "sync",
        "observed",
    ):
        assert hasattr(Cluster, name), name


def test_a_client_connects_again_by_its_own_method() -> None:
    text = source(distributed.Client._handle_report)
    assert "await self._reconnect()" in text
    assert inspect.iscoroutinefunction(distributed.Client._reconnect)


def test_calls_of_one_moment_share_a_task() -> None:
    text = source(SpecCluster._correct_state)
    assert (
        "if self._correct_state_waiting: " in text and "return self._correct_state_waiting" in text
    )
    assert "asyncio.ensure_future(self._correct_state_internal())" in text
    assert "async with self._lock: self._correct_state_waiting = None" in source(
        SpecCluster._correct_state_internal
    )


def test_a_scheduler_spec_is_made_and_awaited() -> None:
    text = source(SpecCluster._start)
    assert 'cls = self.scheduler_spec["cls"]' in text
    assert 'self.scheduler = cls(**self.scheduler_spec.get("options", {}))' in text
    assert "self._lock = asyncio.Lock()" in text
    assert 'raise RuntimeError(f"Cluster failed to start: {e}") from e' in text


def test_close_scales_to_nothing_and_asserts_on_what_was_created() -> None:
    text = source(SpecCluster._close)
    for part in (
        "f = self.scale(0)",
        "if isawaitable(f): await f",
        "await self._correct_state()",
        "for w in self._created",
        "self.scheduler.close()",
    ):
        assert part in text, part


def test_connections_of_workers_are_known_by_their_operation() -> None:
    from distributed import Scheduler
    from distributed.core import Server

    assert "self._comms[comm] = op" in source(Server._handle_comm)
    assert '"register-worker": self.add_worker' in source(Scheduler.__init__)


def test_a_listener_prepares_its_connections_by_a_method_of_its_own() -> None:
    """`Handshakes` of `injob/network.py` replaces it, and `stop`."""
    from distributed.comm.tcp import BaseTCPListener
    from distributed.core import Server

    text = source(BaseTCPListener._handle_stream)
    assert "stream = await self._prepare_stream(stream, address)" in text
    assert "if stream is None:" in text
    assert "for listener in self.listeners:" in source(Server)
    assert "listener.stop()" in source(Server)


def test_a_process_interface_says_that_it_runs() -> None:
    assert "assert self.status == Status.running" in source(ProcessInterface.__await__)
    assert {"start", "close"} <= vars(ProcessInterface).keys()


def test_workers_that_come_and_go_are_told() -> None:
    text = source(Cluster._update_worker_status)
    assert 'self.scheduler_info["workers"].update(workers)' in text
    assert 'del self.scheduler_info["workers"][msg]' in text


def test_a_notebook_displays_the_widget_and_html() -> None:
    text = source(Cluster._ipython_display_)
    assert "widget = self._widget()" in text
    assert 'mimebundle["text/html"] = self._repr_html_()' in text
    assert "def update(): status.value = self._repr_html_()" in source(Cluster._widget)


def test_adaptive_asks_for_recommendations() -> None:
    text = source(Adaptive.adapt)
    for part in (
        "target = await self.safe_target()",
        "await self.recommendations(target)",
        "self.scale_up(**recommendations)",
        "self.scale_down(**recommendations)",
    ):
        assert part in text, part
    assert "f = self.cluster.scale_down(workers)" in source(Adaptive.scale_down)
    assert "retire_workers" in source(Adaptive.scale_down)


def test_signatures_fit_those_of_the_base() -> None:
    import dask_jobqueue

    base = inspect.signature(dask_jobqueue.JobQueueCluster.scale).parameters
    own = list(inspect.signature(GPUJobQueueCluster.scale).parameters)
    assert own == [*base, "groups"]
    known = set(inspect.signature(SpecCluster.__init__).parameters)
    assert {
        "scheduler",
        "worker",
        "asynchronous",
        "loop",
        "security",
        "silence_logs",
        "name",
    } <= known


def test_a_nanny_starts_its_worker_with_an_environment_in_a_process_of_multiprocessing() -> None:
    from multiprocessing import forkserver, popen_forkserver, spawn

    from distributed.nanny import WorkerProcess
    from distributed.process import AsyncProcess

    text = source(WorkerProcess.start)
    assert "self.process = AsyncProcess( target=functools.partial( self._run," in text
    assert "env=self.env, config=self.config, )," in text
    text = source(AsyncProcess.__init__)
    assert "target=self._run, name=name, args=( target, args, kwargs," in text
    text = source(popen_forkserver.Popen._launch)  # type: ignore[attr-defined]
    assert "self.sentinel, w = forkserver.connect_to_new_process(self._fds)" in text
    assert "forkserver.read_signed(self.sentinel)" in text
    text = source(spawn._main)
    assert "preparation_data = reduction.pickle.load(from_parent)" in text
    assert "self = reduction.pickle.load(from_parent)" in text
    assert "return self._bootstrap(parent_sentinel)" in text
    text = source(forkserver._serve_one)  # type: ignore[attr-defined]
    assert "*_forkserver._inherited_fds) = fds" in text
    assert "spawn._main(child_r, parent_sentinel)" in text


def test_a_worker_and_the_scheduler_can_be_extended_by_a_preload() -> None:
    from distributed import Scheduler, Worker

    assert "startup_information" in inspect.signature(Worker.__init__).parameters
    assert "extra=await self.get_startup_information()" in source(Worker._register_with_scheduler)
    assert hasattr(Scheduler, "add_plugin") and not hasattr(Worker, "add_plugin")
    assert "extra" in source(Scheduler.add_worker)


def test_every_private_name_is_ours_or_really_overrides_one() -> None:
    for cls in (GPUJobQueueCluster, AttachedCluster):
        bases = [base for base in cls.__mro__ if not base.__module__.startswith("gpujobs")]
        inherited = {name for base in bases for name in vars(base)}
        # Attributes of instances are only in the text of the methods that set them.
        inherited |= {
            name for base in bases[:-1] for name in re.findall(r"self\.(_\w+)", source(base))
        }
        text = "".join(
            source(base) for base in cls.__mro__ if base.__module__.startswith("gpujobs")
        )
        used = set(re.findall(r"\b(?:self|cluster)\.(_[a-z]\w*)", text)) | {
            n for n in vars(cls) if re.match(r"_[a-z]", n)
        }
        assert used <= OURS | inherited, (
            used - OURS - inherited
        )  # in vain: a release does without it
        assert not OURS & inherited, OURS & inherited  # by accident


def test_what_is_asked_of_the_dask_scheduler_and_of_adaptive_is_there() -> None:
    from distributed import Client, Scheduler

    async def ask() -> None:
        spec = {"cls": Scheduler, "options": {"dashboard_address": ":0"}}
        async with SpecCluster(workers={}, scheduler=spec, asynchronous=True) as cluster:
            comm = cluster.scheduler_comm
            assert (await comm.identity())["workers"] == {}
            assert await comm.processing() == {}
            assert not await comm.retire_workers(names=["nobody"], close_workers=True, remove=True)
            add_handlers(cluster.scheduler)
            group = {
                "prefix": "x-gpu-",
                "resources": {"GPU": 1},
                "threads": 1,
                "plain_tasks": False,
            }
            async with Client(cluster, asynchronous=True) as client:
                futures = client.map(abs, range(3), resources={"GPU": 1})
                others = client.map(abs, range(9, 19))
                while len(cluster.scheduler.tasks) < 13:
                    await asyncio.sleep(0.01)
                assert await comm.gpujobs_demand(**group, target_duration=0.1) == 3
                plain = {**group, "plain_tasks": True, "resources": {}}
                assert await comm.gpujobs_demand(**plain, target_duration=0.1) == len(others)
                await client.cancel([*futures, *others])
            assert cluster._adaptive is None
            adaptive = cluster.adapt(minimum=0, maximum=1)
            assert cluster._adaptive is adaptive and adaptive.state in ("starting", "running")
            adaptive.stop()
            assert adaptive.state not in ("starting", "running")

    asyncio.run(ask())


def test_a_cluster_without_a_spec_can_be_attached() -> None:
    known = set(inspect.signature(Cluster.__init__).parameters)
    assert {"asynchronous", "loop", "name"} <= known
    text = source(Cluster._start)
    assert "self.scheduler_comm" in text
    assert "self._watch_worker_status" in text
    assert "self.status = Status.running" in text


def test_a_server_of_workers_can_be_forked() -> None:
    """`injob/workerhost.py` and `injob/workerhost.py` depend on these."""
    from multiprocessing import forkserver, resource_tracker

    for module in (forkserver, resource_tracker):
        assert "util.spawnv_passfds(exe, args, fds_to_pass)" in source(module)
    assert "args += ['-c', cmd]" in source(forkserver)
    assert 'if method == "forkserver" and not _forkserver_preload_set' in source(
        distributed.utils.get_mp_context
    )
    start = source(distributed.Nanny.start_unsafe)
    assert start.index("self.preloads.start()") < start.index("self.instantiate()")
    instantiate = source(distributed.Nanny.instantiate)
    assert "env=self.env" in instantiate
    assert "pre_spawn_env=self.pre_spawn_env" in instantiate


def test_what_a_drain_uses_of_dask_is_there() -> None:
    """`injob/drain.py` and `injob/rest.py`; `tests/unit/test_drain.py` tests what it does."""
    from distributed import Scheduler, SchedulerPlugin, Worker
    from distributed.core import Server, Status
    from distributed.scheduler import TaskPrefix, WorkerState, heartbeat_interval
    from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin

    change = source(Scheduler.handle_worker_status_change)
    assert "ws = self.workers.get(worker) if isinstance(worker, str) else worker" in change
    assert "self.running.discard(ws) self.idle.pop(ws.address, None)" in change
    assert "handler = self.stream_handlers[op]" in source(Server.handle_stream)
    assert "extra = {**(extra or {}), " in source(Scheduler.handle_worker) or (
        'extra={"worker": worker}' in source(Scheduler.handle_worker)
    )
    for name in ("transitions", "stimulus_queue_slots_maybe_opened", "worker_send", "set_restrictions"):  # fmt: skip
        assert callable(getattr(Scheduler, name)), name
    assert "startstops" in source(Scheduler.stimulus_task_finished) or (
        "startstops" in source(Scheduler._transition_processing_memory)
    )
    for name in ("processing", "executing", "actors", "nbytes", "extra"):
        assert name in WorkerState.__slots__, name
    for name in ("states", "max_exec_time"):
        assert name in TaskPrefix.__slots__ or hasattr(TaskPrefix, name), name
    assert heartbeat_interval(1) > 0
    parameters = inspect.signature(SchedulerPlugin.update_graph).parameters
    assert {"tasks", "annotations"} <= parameters.keys()
    assert "startstops" not in inspect.signature(SchedulerPlugin.transition).parameters
    assert issubclass(Worker, Server) and Status.closing_gracefully
    assert "if self.status in (Status.closing, Status.closing_gracefully):" in source(
        Worker.close_gracefully
    )  # so that a lifetime never ends a worker that leaves
    assert "self.active_shuffles" in source(ShuffleSchedulerPlugin)
    assert "workers = list(barrier.worker_restrictions)" in source(
        ShuffleSchedulerPlugin._calculate_worker_for
    )
    text = source(Scheduler.retire_workers)
    assert "workers_info_ok" in text and "return workers_info_ok" in text
