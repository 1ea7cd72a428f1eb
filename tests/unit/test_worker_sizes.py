"""Workers of several GPUs, and several workers on one GPU."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from gpujobs.cli.plan_text import plan_json, plan_text
from gpujobs.clusters.ledger import GroupRecord
from gpujobs.deploy.clusteroptions import first_jobs
from gpujobs.deploy.keywords import spec_of
from gpujobs.errors import InputError
from gpujobs.injob.gpus import shared_gpu_message
from gpujobs.injob.job import worker_names
from gpujobs.injob.names import WorkerSize, worker_devices
from gpujobs.injob.options import parse
from gpujobs.planning import workeroptions
from gpujobs.planning.plan import Machine, make_plan
from gpujobs.planning.render import render

from ..support.each import each
from .support import error_of, made_plan

PAIRS = {"gpus_per_worker": 2}
HALVES = {"workers_per_gpu": 2}


def profile(gpus: int, workers: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"gpus": gpus, "workers": workers, **others}


# -- plan --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("workers", "others", "expected"),
    [  # jobs, GPUs, workers, threads and GiB of a worker
        ({}, {}, (2, 4, 4, 1, 120)),
        (PAIRS, {}, (2, 4, 2, 1, 240)),
        (PAIRS, {"gpus_per_job": 2, "cpus_per_job": 32}, (4, 2, 1, 32, 240)),
        ({"gpus_per_worker": 4}, {}, (2, 4, 1, 1, 480)),
        (HALVES, {}, (2, 4, 8, 1, 60)),
        (HALVES, {"gpus_per_job": 1, "cpus_per_job": 16}, (8, 1, 2, 8, 60)),
    ],
)
def test_the_shape_of_jobs_follows_from_the_size_of_workers(
    home: Path, workers: Any, others: Any, expected: tuple[int, ...]
) -> None:
    (group,) = made_plan(home, profile(8, workers, **others)).groups
    shape = group.shape
    memory = (shape.worker_memory or 0) // 2**30
    found = shape.jobs, shape.gpus, shape.workers, shape.worker_threads, memory
    assert found == expected


@pytest.mark.parametrize(
    ("workers", "memory", "said"),
    [
        ({}, "1GiB", "each CUDA worker has 512MiB of host memory: with less than about 1GiB"),
        ({}, "2GiB", ""),
        (PAIRS, "1GiB", ""),
        ({"worker_class": "nanny"}, "1GiB", ""),
    ],
)
def test_a_cuda_worker_with_too_little_memory_is_noted(
    home: Path, workers: Any, memory: str, said: str
) -> None:
    """It is paused while it imports its libraries, and its tasks never start."""
    notes = made_plan(home, profile(2, workers, gpus_per_job=2, memory_per_job=memory)).notes
    found = [note for note in notes if "host memory" in note]
    assert len(found) == bool(said) and all(note.startswith(said) for note in found)


def test_an_allocation_has_names_by_node_and_ranks_of_a_script_by_rank(home: Path) -> None:
    (home / "s.yaml").write_text(
        (home / "s.yaml").read_text().replace("max_nodes: 1", "max_nodes: 9")
    )
    for workers, ranks, names in (
        (PAIRS, 4, [f"svd-{rank}" for rank in range(4)]),
        (HALVES, 16, [f"svd-{rank}" for rank in range(16)]),
    ):
        nodes = [f"svd-{node}-{n}" for node in range(2) for n in range(len(names) // 2)]
        for worker_class, found, named in (("cuda", 2, nodes), ("nanny", ranks, names)):
            of_class = {**workers, "worker_class": worker_class}
            script = profile(8, of_class, layout="mpi", run_on="ranks", run=["all.py"])
            made = made_plan(home, script)
            assert made.working_ranks == found and made.worker_names("svd") == named
            for layout in ("allocation", "mpi"):
                made = made_plan(home, profile(8, of_class, layout=layout))
                assert made.working_ranks == 2 and made.worker_names("svd") == nodes
                assert made.start_workers == len(nodes)


def test_the_job_and_the_plan_have_the_same_names(home: Path) -> None:
    for workers in (PAIRS, HALVES, {**HALVES, "worker_class": "nanny"}):
        for layout in ("workers", "mpi"):
            made = made_plan(home, profile(4, workers, layout=layout))
            text = render(made, "svd-1")[0].text.replace("\\\n", " ")
            words = shlex.split(next(line for line in text.splitlines() if "--gpus=" in line))
            options = [word for word in words if word.startswith("--") and "$" not in word]
            options = options[
                : next((n for n, word in enumerate(options) if word == "--scheduler"), None)
            ]
            size = [
                word for word in options if word.startswith(("--gpus", "--workers-per", "--ranks="))
            ]
            argv = [
                "supervise",
                "--folder=/x/svd-1",
                "--job=0",
                "--started=0",
                *dict.fromkeys(size),
            ]
            parsed = parse(argv)
            assert worker_names(parsed) == made.worker_names("svd-1")


def test_the_number_of_gpus_may_be_left_out(home: Path) -> None:
    assert made_plan(home, {"workers": PAIRS}).gpus == 2
    assert made_plan(home, {"workers": HALVES}).n_workers == 2


@each(
    ("wrong", "words"),
    [
        (profile(5, PAIRS), ["svd.yaml:2", "`gpus` is 5, not a multiple of `workers.gpus_per_worker`, which is 2", "gpus: 4 or 6"]),
        (profile(8, {"gpus_per_worker": 3}), ["`gpus` is 8", "gpus: 6 or 9"]),
        (profile(4, PAIRS, gpus_per_job=1), ["`gpus_per_job` is 1, not a multiple", "gpus_per_job: 2"]),
        (profile(12, {"gpus_per_worker": 6}), ["nodes have 4 GPUs"]),
        (profile(6, {"gpus_per_worker": 3}, layout="mpi"), ["whole nodes"]),
        (profile(4, {**PAIRS, **HALVES}), ["`gpus_per_worker` and `workers_per_gpu`, which exclude each other"]),
        (profile(0, PAIRS), ["`workers.gpus_per_worker` is for GPU workers"]),
        (profile(0, HALVES), ["`workers.workers_per_gpu` is for GPU workers"]),
        (profile(4, {**HALVES, "threads": 40}), ["8 workers of 40 threads"]),
        (profile(4, HALVES, start_workers=9), ["start_workers is 9, but there will be 8 workers"]),
        ({"gpus_per_worker": 2}, ["`workers.gpus_per_worker`"]),
        ({"workers_per_gpu": 2}, ["`workers.workers_per_gpu`"]),
    ],
)  # fmt: skip
def test_contradicting_sizes_of_workers_are_refused(
    home: Path, wrong: dict[str, Any], words: list[str]
) -> None:
    error = error_of(home, wrong)
    for word in words:
        assert word in error


def test_whole_nodes_need_whole_workers(home: Path) -> None:
    text = (home / "s.yaml").read_text().replace("max_nodes: 1", "max_nodes: 1, exclusive: true")
    (home / "s.yaml").write_text(text)
    error = error_of(home, profile(12, {"gpus_per_worker": 3}))
    assert "4 GPUs of a job on a node; a worker has 3" in error and "s.yaml" in error


def test_groups_may_differ(home: Path) -> None:
    groups = {
        "serve": {"gpus": 4, "workers": PAIRS},
        "prep": {"gpus": 1, "workers": {"workers_per_gpu": 3}},
    }
    made = made_plan(home, {"groups": groups})
    assert [group.n_workers for group in made.groups] == [2, 3] and made.gpus == 5
    assert made.worker_names("p")[-3:] == ["p-prep-1-0", "p-prep-1-1", "p-prep-1-2"]
    assert "5 requested, 2 workers with 2 of them each, 3 workers, 3 on each" in plan_text(
        made, "p"
    )
    rows: Any = plan_json(made, "p")["groups"]
    assert [(row["gpus_per_worker"], row["workers_per_gpu"]) for row in rows] == [(2, 1), (1, 3)]


def test_workers_of_two_gpus_use_whole_pairs_of_the_free_gpus_of_this_machine(home: Path) -> None:
    machine = Machine(gpus=("0", "1", "2"), cpus=8, memory=32 * 2**30, busy={})
    made = made_plan(home, {"gpus": "auto", "workers": PAIRS}, "local", machine)
    assert (made.gpus, made.n_workers) == (2, 1)
    assert "gpus: auto: 3 free GPUs on this machine, 1 worker" in made.notes
    error = error_of(home, {"gpus": "auto", "workers": {"gpus_per_worker": 4}}, "local", machine)
    assert "3 free on this machine; a worker has 4" in error


def test_a_machine_without_gpus_ignores_options_of_cuda_workers(home: Path) -> None:
    """The same profile runs on a laptop and on a workstation."""
    machine = Machine(gpus=(), cpus=2, memory=2**33, busy={})
    workers = {"rmm_pool_size": 0.5, "enable_cudf_spill": True, "threads": 1}
    made = made_plan(home, {"gpus": "auto", "workers": workers}, "local", machine)
    assert (made.gpus, made.n_workers) == (0, 2)
    assert "gpus: auto: no NVIDIA GPU on this machine, so CPU workers" in made.notes
    assert "CPU workers do not use enable_cudf_spill, rmm_pool_size" in made.notes
    text = render(made, "p-0000")[0].text
    assert "rmm" not in text and "cudf" not in text
    error = error_of(home, {"gpus": 0, "workers": workers}, "local", machine)
    assert "`workers.rmm_pool_size` is an option of CUDA workers" in error


# -- options of the workers ------------------------------------------------------------------------------------------
def test_workers_announce_their_share_of_gpus_as_resource(home: Path) -> None:
    for given, expected in (
        (PAIRS, "--resources=GPU=2"),
        (HALVES, "--resources=GPU=1"),
        ({**PAIRS, "resources": "GPU=1, MEMORY=10"}, "--resources=GPU=1 MEMORY=10"),
    ):
        made = made_plan(home, profile(4, given))
        workers = made.profile.workers
        words = [
            *workeroptions.default_resources(workers, True),
            *workeroptions.words(workers, True),
        ]
        assert expected in words


def test_memory_of_a_shared_gpu_is_divided(home: Path) -> None:
    workers = {**HALVES, "rmm_pool_size": 0.8, "rmm_maximum_pool_size": "6GiB"}
    made = made_plan(home, profile(4, workers))
    words = workeroptions.words(made.profile.workers, True)
    assert {"--device-memory-limit=0.4", "--rmm-pool-size=0.4"} < set(words)
    assert f"--rmm-maximum-pool-size={6 * 2**30}" in words  # a size is that of each worker
    assert "40% of the GPU's memory" in plan_text(made, "svd")
    keywords = workeroptions.keywords(made.profile, cuda=True)
    assert keywords["rmm_pool_size"] == keywords["device_memory_limit"] == "0.4"
    third = made_plan(
        home, profile(4, {"workers_per_gpu": 3, "enable_cudf_spill": True})
    ).profile.workers
    assert not any("device-memory-limit" in word for word in workeroptions.words(third, True))
    plain = made_plan(home, profile(4, {**HALVES, "worker_class": "nanny"})).profile.workers
    assert not any("memory-limit" in word for word in workeroptions.words(plain, True))


def test_scripts_of_usual_workers_do_not_change(home: Path) -> None:
    for workers in ({}, {"worker_class": "nanny"}):
        for layout in ("workers", "mpi"):
            (script,) = render(made_plan(home, profile(4, workers, layout=layout)), "svd-1")
            assert "per-worker" not in script.text and "per-gpu" not in script.text


# -- words of other programs -----------------------------------------------------------------------------------------
def test_words_of_dask_and_dask_cuda_mean_the_same_workers(home: Path) -> None:
    workers = {"worker_class": "dask_cuda.CUDAWorker", "resources": "GPU=2"}
    made = made_plan(home, profile(4, workers)).profile.workers
    assert (made.worker_class, made.resources) == ("cuda", {"GPU": 2.0})
    plain = made_plan(home, profile(4, {"worker_class": "distributed.Nanny"})).profile.workers
    assert plain.worker_class == "nanny"
    network = {"network": {"protocol": "ucx"}, "gpus": 1}
    machine = Machine(gpus=("0",), cpus=8, memory=32 * 2**30, busy={})
    assert made_plan(home, network, "local", machine).transport.protocols == ("ucxx",)
    error = error_of(home, profile(4, {"resources": "GPU"}))
    assert "`workers.resources`" in error and "write {GPU: 2} or GPU=2" in error


# -- Python ------------------------------------------------------------------------------------------------------
def python_plan(home: Path, n_workers: int, **keywords: Any) -> Any:
    spec = spec_of(keywords, str(home / "s.yaml"), n_workers)
    return make_plan(spec, python="python", replaces="owner")


@each(
    ("n_workers", "keywords", "expected"),
    [  # GPUs and workers of a job, jobs at the start
        (2, {"gpus_per_worker": 2}, (4, 2, 1)),
        (3, {"worker_gpu": 2}, (2, 1, 3)),
        (0, {"gpus_per_worker": 2}, (2, 1, 0)),
        (4, {"gpus_per_worker": 2, "gpus_per_job": 4}, (4, 2, 2)),
        (2, {"gpus_per_worker": 2, "gpus_per_job": 4}, (4, 2, 1)),
        (3, {"workers_per_gpu": 2, "gpus_per_job": 1}, (1, 2, 2)),
        (2, {"gpus_per_worker": 2, "processes": 2}, (4, 2, 1)),
        (4, {"workers_per_gpu": 2, "processes": 4}, (2, 4, 1)),
        (1, {"worker_options": {"gpus_per_worker": 4}}, (4, 1, 1)),
    ],
)
def test_keywords_of_workers_give_the_same_jobs_as_a_profile(
    home: Path, n_workers: int, keywords: Any, expected: tuple[int, ...]
) -> None:
    made = python_plan(home, n_workers, **keywords)
    shape = made.groups[0].shape
    assert (shape.gpus, shape.workers, first_jobs(made, n_workers)[""]) == expected


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        (
            {"gpus_per_worker": 2, "gpus_per_job": 3},
            "keyword gpus_per_job: `gpus_per_job` is 3, not a multiple",
        ),
        ({"gpus_per_worker": 0}, "keyword gpus_per_worker: must be at least 1"),
        ({"gpus_per_worker": 2, "workers_per_gpu": 2}, "exclude each other"),
        (
            {"gpus_per_worker": 2, "gpus_per_job": 4, "processes": 4},
            "gpus_per_job is 4, 2 GPUs per worker",
        ),
        ({"workers_per_gpu": 2, "processes": 3}, "processes is 3, but there are 2 workers per GPU"),
    ],
)
def test_errors_of_sizes_name_the_keyword(home: Path, keywords: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        python_plan(home, 0, **keywords)


def test_auto_is_a_number_only_for_this_machine(home: Path) -> None:
    with pytest.raises(InputError, match="GPULocalCluster"):
        spec_of({}, str(home / "s.yaml"), "auto")  # type: ignore[arg-type]


# -- in the job --------------------------------------------------------------------------------------------------
def test_each_worker_gets_its_own_devices() -> None:
    four = ["0", "1", "2", "3"]
    assert WorkerSize(gpus=2).devices(four) == ["0,1", "2,3"]
    assert WorkerSize(per_gpu=2).devices(["7", "GPU-9"]) == ["7,GPU-9"] * 2 + ["GPU-9,7"] * 2
    environ = WorkerSize(gpus=2).environ(["0,1", "2,3"])
    assert environ["CUDA_VISIBLE_DEVICES"] == "0,2"  # dask-cuda starts two workers
    assert worker_devices("p-0-1", environ) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert worker_devices("p-7", WorkerSize(gpus=2).environ(["4,5"])) == {
        "CUDA_VISIBLE_DEVICES": "4,5"
    }
    assert worker_devices("p-0-1", {}) == {}
    assert WorkerSize.of(environ) == WorkerSize(gpus=2) and WorkerSize.of({}).usual


def worker(*uuids: str, sharing: int = 1) -> Any:
    first, *others = [{"node": "n1", "uuid": uuid} for uuid in uuids]
    return {"gpu": {**first, "others": others, **({"sharing": sharing} if sharing > 1 else {})}}


def test_only_workers_that_are_meant_to_share_a_gpu_do() -> None:
    pairs = {"a-0": worker("G0", "G1"), "a-1": worker("G2", "G3")}
    assert shared_gpu_message(pairs) == ""
    pairs["b-0"] = worker("G4", "G1")
    assert shared_gpu_message(pairs) == "workers a-0 and b-0 share GPU G1 on n1"
    halves = {f"a-0-{n}": worker(f"G{n // 2}", sharing=2) for n in range(4)}
    assert shared_gpu_message(halves) == ""
    halves["b-0"] = worker("G1", sharing=2)
    assert (
        shared_gpu_message(halves)
        == "workers a-0-2, a-0-3 and b-0 share GPU G1 on n1, which is for 2"
    )
    mixed = {"a-0": worker("G0", sharing=2), "b-0": worker("G0")}
    assert shared_gpu_message(mixed) == "workers a-0 and b-0 share GPU G0 on n1"


def test_the_ledger_counts_gpus() -> None:
    assert GroupRecord("", workers=4, workers_per_job=2, gpus_per_job=4).gpus == 8
    assert GroupRecord("", workers=8, workers_per_job=8, gpus_per_job=4).gpus == 4
    assert json.dumps(GroupRecord("", 4, 2, 4).gpus)
