"""Keywords, configuration and attributes of dask-jobqueue: docs/migrating.md says what becomes of each."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.config
import dask_jobqueue
import pytest
import yaml

import gpujobs
from gpujobs.config.hints import in_python
from gpujobs.config.model import key_names
from gpujobs.config.profile import Profile
from gpujobs.deploy.clusteroptions import Amount, ClusterOptions, configured
from gpujobs.deploy.group import WorkerGroup
from gpujobs.deploy.jobnumbers import JobNumbers
from gpujobs.deploy.keywords import spec_of
from gpujobs.deploy.vocabulary import PARAMETERS, extra_args_settings
from gpujobs.errors import InputError
from gpujobs.injob.names import WorkerSize
from gpujobs.planning.plan import Plan, make_plan
from gpujobs.planning.render import JobRoles, render_jobs

from ..support.dask_jobqueue import EXAMPLES, Example
from ..support.each import each
from ..support.migrating import names
from .support import PYTHON

CLASSES = {
    "Slurm": (dask_jobqueue.SLURMCluster, gpujobs.GPUSLURMCluster, "slurm"),
    "PBS": (dask_jobqueue.PBSCluster, gpujobs.GPUPBSCluster, "pbs"),
    "LSF": (dask_jobqueue.LSFCluster, gpujobs.GPULSFCluster, "lsf"),
    "SGE": (dask_jobqueue.SGECluster, gpujobs.GPUSGECluster, "sge"),
}
DEFAULTS = yaml.safe_load((Path(dask_jobqueue.__file__).parent / "jobqueue.yaml").read_text())
WORKERS = JobRoles(scheduler=True, workers=True, run=False, replaces="owner")


KEYWORDS = {
    name: row._replace(classes=row.classes or list(CLASSES))
    for name, row in names("dask-jobqueue keywords").items()
}
ATTRIBUTES = names("dask-jobqueue attributes")


def site(home: Path, batch_scheduler: str, name: str = "big") -> str:
    """Write a site file with nodes that are large enough for every example."""
    node = {"gpus_per_node": 28, "cpus_per_node": 64, "memory_per_node": "512GiB"}
    text = {
        "description": "large nodes",
        "scheduler": batch_scheduler,
        "visible_devices": {"variable": "GPUS"},
        "account": {"directive": "-A {account}" if batch_scheduler != "lsf" else "-P {account}"},
        "queues": {"gpu": node, "other": {**node, "max_walltime": "2d"}},
        "defaults": {"walltime": "1h"},
    }
    path = home / f"{name}.yaml"
    path.write_text(json.dumps(text))
    return str(path)


def planned(
    batch_scheduler: str, site: str | None, keywords: dict[str, Any], n_workers: int = 0
) -> Plan:
    """Return the plan of keywords, and of the dask configuration of this moment."""
    configuration = configured(batch_scheduler, keywords.pop("config_name", None))
    ClusterOptions.of({}, configuration)
    spec = spec_of(keywords, site, n_workers, (batch_scheduler,), configuration)
    return make_plan(spec, python=PYTHON, replaces="owner")


def script(plan: Plan) -> str:
    """Return the script of the plan's first worker job."""
    scripts = render_jobs(
        plan, f"{plan.name}-0000", plan.groups[0], WORKERS, 0, 1, site_folder=Path.cwd(), devices=()
    )
    return scripts[0].text


# -- the table -----------------------------------------------------------------------------------------------------------
def keywords_of(cluster: type) -> set[str]:
    """Return the keywords of a class of dask-jobqueue."""
    job = cluster.job_cls
    methods = [cluster.__init__, *(base.__init__ for base in job.__mro__[:2])]
    names = {name for method in methods for name in inspect.signature(method).parameters}
    return names - {"self", "scheduler", "kwargs", "job_kwargs", "base_class_kwargs"}


def test_every_keyword_and_configuration_key_has_a_row() -> None:
    for kind, (cluster, _, section) in CLASSES.items():
        configuration = {key.replace("-", "_") for key in DEFAULTS["jobqueue"][section]}
        expected = keywords_of(cluster) | configuration
        assert expected == {name for name, row in KEYWORDS.items() if kind in row.classes}, kind


VALUES: dict[str, tuple[Any, str]] = {
    "name": ("mine", "mine-0000"),
    "job_name": ("mine", "mine-0000"),
    "queue": ("other", "other"),
    "account": ("p1", "p1"),
    "project": ("p1", "p1"),
    "walltime": ("02:00:00", "2:00"),
    "cores": (8, "--nthreads=8"),
    "memory": ("28GiB", "--memory-limit=28GiB"),
    "processes": (2, r"gpus?\S*[:=]2\b"),
    "job_cpu": (8, "--cpus-per-task=8"),
    "ncpus": (8, "-n 8"),
    "job_mem": ("28GiB", "--mem=28672M"),
    "mem": (28 * 2**30, "mem=28672MB"),
    "interface": ("ib0", "--interface=ib0"),
    "protocol": ("wss://", "--schemes=wss?\\b"),
    "python": ("/my/python", "/my/python"),
    "local_directory": ("/fast", "--local-directory=/fast"),
    "death_timeout": (77, "--death-timeout=77"),
    "worker_extra_args": (["--pid-file", "w.pid"], "--pid-file=w.pid"),
    "extra": (["--pid-file", "w.pid"], "--pid-file=w.pid"),
    "job_script_prologue": (["module load a", "module load b"], "module load a\nmodule load b\n"),
    "env_extra": (["module load a", "module load b"], "module load a\nmodule load b\n"),
    "job_directives_skip": (["--mem"], ""),
    "header_skip": (["--mem"], ""),
    "worker_command": ("dask_cuda.cli", "dask_cuda"),
}
"""A value of each keyword that becomes part of a plan, and its trace in a script."""


def value_of(name: str, kind: str) -> tuple[Any, str]:
    """Return a value of a keyword, and its trace in a script of this batch scheduler."""
    if name in ("job_extra_directives", "job_extra"):
        line = "--comment=x" if kind == "Slurm" else "-P p1"
        return [line], line
    if name == "resource_spec":
        return "select=1:ncpus=4:ngpus=2" if kind == "PBS" else "gpu=2", r"gpus?\S*[:=]2\b"
    return VALUES.get(name, ("x", ""))


OF_THE_CLASS = {
    "n_workers", "asynchronous", "loop", "silence_logs", "scheduler_options", "log_directory",
    "config_name", "host",
}  # fmt: skip
"""Keywords that are no part of a plan."""

EACH = [(name, kind) for name, row in KEYWORDS.items() for kind in row.classes]
CONFIGURED = [
    (name, kind)
    for name, kind in EACH
    if name.replace("_", "-") in DEFAULTS["jobqueue"][CLASSES[kind][2]]
]


@each(("name", "kind"), EACH)
def test_a_keyword_does_what_its_row_says(home: Path, name: str, kind: str) -> None:
    batch_scheduler, row = CLASSES[kind][2], KEYWORDS[name]
    here = site(home, batch_scheduler)
    if row.here == "refused":
        with pytest.raises(InputError) as caught:
            planned(batch_scheduler, here, {name: "x"})
        problem = caught.value.problems[0]
        assert (str(problem.position), problem.hint) == (f"keyword {name}", row.text)
    elif row.here == "noted":
        assert f"{name}: {row.text}" in planned(batch_scheduler, here, {name: "x"}).notes
    elif name in OF_THE_CLASS:
        parameters = inspect.signature(gpujobs.GPUJobQueueCluster.__init__).parameters
        assert name in parameters or name == "config_name"
    else:
        value, trace = value_of(name, kind)
        assert re.search(trace, script(planned(batch_scheduler, here, {name: value})))


@each(("name", "kind"), CONFIGURED)
def test_a_configuration_key_counts_as_its_keyword_does(home: Path, name: str, kind: str) -> None:
    section, row, key = CLASSES[kind][2], KEYWORDS[name], name.replace("_", "-")
    value, trace = value_of(name, kind)
    if name == "scheduler_options":
        value = {"dashboard_address": ":1"}
    with dask.config.set({f"jobqueue.{section}.{key}": value}):
        if name in OF_THE_CLASS:
            options = ClusterOptions.of({}, configured(section))
            assert str(getattr(options, name)) == str(value)
        elif row.here == "refused":
            with pytest.raises(InputError) as caught:
                planned(section, site(home, section), {})
            problem = caught.value.problems[0]
            expected = f"dask configuration jobqueue.{section}.{key}"
            assert (str(problem.position), problem.hint) == (expected, row.text)
        elif row.here == "noted":
            assert f"{name}: {row.text}" in planned(section, site(home, section), {}).notes
        else:
            assert re.search(trace, script(planned(section, site(home, section), {})))


def test_every_attribute_has_a_row() -> None:
    options = {"dashboard_address": ":0"}
    with dask_jobqueue.SLURMCluster(cores=1, memory="1GB", scheduler_options=options) as cluster:
        expected = {*dir(cluster), *vars(cluster)}
    assert {name for name in expected if not name.startswith("_")} == set(ATTRIBUTES)


@pytest.mark.parametrize("method", ["scale", "adapt", "get_logs", "close", "wait_for_workers"])
def test_methods_take_the_same_arguments(method: str) -> None:
    theirs, ours = (
        inspect.signature(getattr(cluster, method)).parameters
        for cluster in (dask_jobqueue.SLURMCluster, gpujobs.GPUSLURMCluster)
    )
    assert [*theirs] == [name for name in ours if name in theirs]


@each("name", [name for name, row in ATTRIBUTES.items() if row.here == "refused"])
def test_refused_attributes_name_their_replacement(name: str) -> None:
    for owner in (
        gpujobs.GPUSLURMCluster,
        gpujobs.GPUSLURMCluster.__new__(gpujobs.GPUSLURMCluster),
    ):
        with pytest.raises(AttributeError, match=f"^{name} has no meaning here; ") as caught:
            getattr(owner, name)
        assert str(caught.value).endswith(ATTRIBUTES[name].text)


# -- the configuration --------------------------------------------------------------------------------------------------
@pytest.fixture
def files(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that writes the user's ~/.config/dask/jobqueue.yaml."""
    monkeypatch.setattr(dask.config, "paths", [str(home)])
    monkeypatch.setattr(dask.config.collect, "__defaults__", ([str(home)], None))

    def write(text: str) -> None:
        (home / "jobqueue.yaml").write_text(text)

    return write


def test_a_default_counts_if_it_is_in_a_file(home: Path, files: Callable[[str], None]) -> None:
    here = site(home, "slurm")
    assert planned("slurm", here, {}).profile.walltime == 3600
    files("jobqueue: {slurm: {walltime: '00:30:00', shebang: '#!/usr/bin/env bash', extra: []}}")
    assert planned("slurm", here, {}).profile.walltime == 1800


def test_a_default_counts_if_it_is_in_a_variable(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_JOBQUEUE__SLURM__WALLTIME", "'00:30:00'")
    assert planned("slurm", site(home, "slurm"), {}).profile.walltime == 1800


def test_a_configuration_that_a_parent_passes_on_has_no_wishes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = dask.config.serialize(dask.config.config)
    monkeypatch.setenv("DASK_INTERNAL_INHERIT_CONFIG", inherited)
    assert planned("slurm", site(home, "slurm"), {}).profile.walltime == 3600


def test_a_keyword_has_priority_over_the_configuration(home: Path) -> None:
    here = site(home, "slurm")
    keys = {"queue": "nowhere", "project": "p0", "env-extra": ["false"], "cores": 2}
    with dask.config.set({f"jobqueue.slurm.{key}": value for key, value in keys.items()}):
        text = script(
            planned(
                "slurm",
                here,
                {"queue": "gpu", "account": "p1", "job_script_prologue": ["true"], "cores": 4},
            )
        )
    assert "--partition=gpu" in text and "-A p1" in text and "--nthreads=4" in text
    assert "nowhere" not in text and "p0" not in text and "false\n" not in text


def test_a_section_of_ones_own_replaces_the_usual_one(home: Path) -> None:
    here = site(home, "slurm")
    with dask.config.set({"jobqueue.mine": {"queue": "other", "shebang": "#!/usr/bin/env bash"}}):
        assert planned("slurm", here, {"config_name": "mine"}).groups[0].queue == "other"
    with pytest.raises(InputError, match=r"no section jobqueue.yours"):
        planned("slurm", here, {"config_name": "yours"})


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("waltime", "did you mean `walltime`"),
        ("gpu", "use n_workers"),
        ("gpus", "use n_workers"),
        ("quiet", "unknown keyword"),
        ("cores", "not a whole number"),
    ],
)
def test_bad_configuration_names_its_key(home: Path, key: str, error: str) -> None:
    with dask.config.set({f"jobqueue.slurm.{key}": "x"}), pytest.raises(InputError) as caught:
        planned("slurm", site(home, "slurm"), {})
    assert f"dask configuration jobqueue.slurm.{key}" in str(caught.value)
    assert error in str(caught.value)


def test_two_names_of_one_key_may_not_differ(home: Path) -> None:
    here = site(home, "slurm")
    with pytest.raises(
        InputError, match=r"keyword account: sets `account`, as keyword project does"
    ):
        planned("slurm", here, {"project": "p0", "account": "p1"})
    assert "-A p1" in script(planned("slurm", here, {"project": "p1", "account": "p1"}))
    with pytest.raises(InputError, match=r"sets `workers.memory`"):
        planned("slurm", here, {"worker_memory": "1GiB", "workers": {"memory": "2GiB"}})


def test_the_users_mappings_are_not_changed(home: Path) -> None:
    workers = {"memory": "2GiB"}
    planned("slurm", site(home, "slurm"), {"workers": workers, "worker_threads": 2})
    assert workers == {"memory": "2GiB"}


# -- one job --------------------------------------------------------------------------------------------------------------
@each(("gpus_per_node", "noted"), [(4, True), (1, False)])
def test_jobs_of_one_gpu_are_noted_where_a_node_has_several(
    gpus_per_node: int, noted: bool, home: Path
) -> None:
    path = home / "one.yaml"
    queue = f"{{gpus_per_node: {gpus_per_node}, cpus_per_node: 8, memory_per_node: 64GiB}}"
    path.write_text(f"description: x\nscheduler: slurm\nqueues: {{gpu: {queue}}}\n")
    notes = planned("slurm", str(path), {"walltime": "1h"}).notes
    assert any("cannot use NVLink" in note for note in notes) is noted


def test_cores_and_memory_are_requested(home: Path) -> None:
    plan = planned("slurm", site(home, "slurm"), {"cores": 8, "memory": "28GiB", "gpus_per_job": 2})
    assert "--cpus-per-task=8" in plan.groups[0].lines and "--mem=28672M" in plan.groups[0].lines
    assert "--nthreads=4" in script(plan) and "--memory-limit=14GiB" in script(plan)


def test_cores_and_memory_are_those_of_workers_beside_a_request(home: Path) -> None:
    keywords = {"cores": 4, "job_cpu": 8, "memory": "8GiB", "job_mem": "16GiB", "gpus_per_job": 2}
    text = script(planned("slurm", site(home, "slurm"), keywords))
    assert "--cpus-per-task=8" in text and "--mem=16384M" in text
    assert "--nthreads=2" in text and "--memory-limit=4GiB" in text


@pytest.mark.parametrize(
    "words",
    [
        ["--resources", "GPU=2", "--nthreads", "2", "--memory-limit", "4GiB"],
        ["--resources GPU=2 --nthreads 2", "--memory-limit=4GiB"],
    ],
)
def test_worker_extra_args_keep_their_meaning(home: Path, words: list[str]) -> None:
    text = script(planned("slurm", site(home, "slurm"), {"worker_extra_args": words}))
    for expected in ("--resources=GPU=2", "--nthreads=2", "--memory-limit=4GiB"):
        assert re.search(rf"{expected}\b", text), expected


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--resources", "ssdGB=200,GPU=2"], {("workers", "resources"): "ssdGB=200,GPU=2"}),
        (["--preload", "a", "--preload=b"], {("workers", "preload"): ["a", "b"]}),
        (["--death-timeout", "60"], {("workers", "death_timeout"): "60s"}),
        (["--interface ib0"], {("network", "interface"): "ib0"}),
        (["--no-dashboard"], {("workers", "options", "dashboard"): False}),
        (["--local-directory", "$TMPDIR"], {("workers", "local_directory"): "$TMPDIR"}),
        (["--lifetime", "'1 hour'"], {("workers", "options", "lifetime"): "1 hour"}),
    ],
)  # fmt: skip
def test_words_of_a_command_line_become_keys(words: list[str], found: dict[Any, Any]) -> None:
    assert dict(extra_args_settings(words)) == found


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["x"], "does not follow an option"),
        (["--lifetime", "1h", "2h"], "'2h' does not follow"),
        (["--lifetime", "1h", "--lifetime=2h"], "--lifetime is given twice"),
        (["--pid-file", "$HOME/pid"], "variables are not expanded"),
        (['--lifetime "1h'], "cannot be split"),
        ("--lifetime 1h", "must be a list"),
    ],
)
def test_words_without_a_meaning_are_refused(words: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        dict(extra_args_settings(words))


def test_a_positional_number_is_not_a_site() -> None:
    with pytest.raises(InputError, match=r"2 is not the name of a site") as caught:
        gpujobs.GPUSLURMCluster(2, gpus_per_job=1)  # type: ignore[arg-type]
    assert "n_workers=2" in str(caught.value)


# -- the examples of its documentation -----------------------------------------------------------------------------------
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
@pytest.mark.parametrize("with_site", [True, False], ids=["site", "no-site"])
def test_the_examples_make_a_plan_or_name_the_line(
    home: Path, example: Example, with_site: bool
) -> None:
    section = CLASSES[example.kind][2]
    keywords, configuration = example.on(queue="gpu")
    keywords.setdefault("queue", "gpu")
    here = site(home, section) if with_site else None
    refused = example.refused
    if not (with_site or refused) and section in ("pbs", "sge"):
        refused = ("visible_devices",)  # these batch schedulers do not list a job's GPUs
    with dask.config.set(
        {f"jobqueue.{section}.{key}": configuration[key] for key in configuration}
    ):
        if not refused:
            text = script(planned(section, here, keywords))
            assert f"--nthreads={_threads(example)}" in text
            return
        with pytest.raises(InputError) as caught:
            planned(section, here, keywords)
    place = f"dask configuration jobqueue.{section}." if example.configuration else "keyword "
    # Those that are left are named once these are gone, see tests/real/test_dask_jobqueue.py.
    text = str(caught.value)
    assert any(f"{place}{key}: " in text or f"`{key}` is needed" in text for key in refused)


def _threads(example: Example) -> int:
    given = {**example.configuration, **example.keywords}
    return int(given.get("cores", 1)) // int(given.get("processes", 1))


# -- scale ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "jobs"),
    [
        ({"n": 3}, 2), ({"jobs": 3}, 3), ({"n": 4, "jobs": 7}, 2), ({"cores": 17}, 3),
        ({"memory": "28GiB"}, 2), ({"jobs": 1, "cores": 17}, 3), ({}, 0),
    ],
)  # fmt: skip
def test_scale_counts_as_dask_jobqueue_does(
    home: Path, arguments: dict[str, Any], jobs: int
) -> None:
    keywords = {"gpus_per_job": 2, "cores": 8, "memory": "14GiB"}
    plan = planned("slurm", site(home, "slurm"), keywords)
    group = WorkerGroup(plan.groups[0])
    assert Amount(**arguments).in_jobs(group, lambda message: None) == jobs


def test_scale_by_memory_that_is_not_known_is_refused(home: Path) -> None:
    plan = planned("slurm", None, {"queue": "gpu"})
    with pytest.raises(InputError, match="the memory of a worker is not known"):
        Amount(memory="1GiB").in_jobs(WorkerGroup(plan.groups[0]), lambda message: None)


@pytest.mark.parametrize(
    ("keywords", "noted"),
    [
        ({"cores": 4, "memory": "8GB"}, True),
        ({"cores": 32, "processes": 1}, False),
        ({"cores": 32, "gpus_per_job": 4}, False),
        ({"cores": 1}, False),
        ({"cores": None}, False),
        ({}, False),
    ],
)
def test_one_worker_where_dask_jobqueue_starts_several_is_noted(
    keywords: dict[str, Any], noted: bool
) -> None:
    assert [note.partition(":")[0] for note in JobNumbers(keywords, WorkerSize()).notes()] == [
        "cores=4"
    ] * noted


@each(
    ("keywords", "hint"),
    [
        ({"n_worker": 4}, "use n_workers: each worker has one GPU"),
        ({"workers": 4}, "n_workers=4"),
        ({"container": "mine"}, "container={'image': 'mine'}"),
        ({"partition": "x"}, "use queue=…"),
        ({"time": "1h"}, "use walltime=…"),
        ({"qos": "high"}, "use directives=['--qos=NAME']"),
        ({"memory_limit": "1GiB"}, "use workers={'memory': …}"),
        ({"nthreads": 2}, "use workers={'threads': …}"),
        ({"ngpus": 2}, "use n_workers"),
        ({"ncores": 2}, "use cpus_per_job=…"),
        ({"script": "x.py"}, "use `gpujobs submit`"),
        ({"conda_env": "x"}, "use environment={'setup': …}"),
        ({"environ": {}}, "use env=…"),
        ({"logdirectory": "/x"}, "did you mean `log_directory`?"),
        ({"rmm_pool_sise": 0.5}, "did you mean workers={'rmm_pool_size': …}?"),
        ({"workers": {"nthreads": 2}}, "use workers={'threads': …}"),
        ({"colour": "red"}, "`gpujobs schema profile` lists the keys"),
    ],
)  # fmt: skip
def test_hints_are_in_python(home: Path, keywords: dict[str, Any], hint: str) -> None:
    with pytest.raises(InputError) as caught:
        gpujobs.GPUSLURMCluster(site(home, "slurm"), quiet=True, **keywords)
    found = caught.value.problems[0].hint
    assert found.startswith(hint)


def test_hints_about_values_are_in_python(home: Path) -> None:
    with pytest.raises(InputError) as caught:
        gpujobs.GPUSLURMCluster(
            site(home, "slurm"), n_workers=8, quiet=True, workers={"worker_port": 8000}
        )
    assert "workers={'worker_port': '8000:" in str(caught.value)


def test_the_parameters_of_the_classes_are_listed() -> None:
    own = inspect.signature(gpujobs.GPUJobQueueCluster.__init__).parameters
    assert set(own) - {"self", "keywords"} == set(PARAMETERS)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"quiet": True}, "keyword quiet: has no meaning here"),
        ({"scheduler": "local"}, "keyword scheduler: 'local' is not 'job'"),
        ({"gpus": 2}, "use n_workers"),
        ({"walltimes": "2h"}, "walltime"),
        ({"n_workers": "2"}, "not a number of workers"),
    ],
)
def test_keywords_that_have_no_meaning_on_a_host_are_refused(
    keywords: dict[str, Any], words: str
) -> None:
    """Before ssh is started."""
    with pytest.raises(InputError, match=words):
        gpujobs.GPUSLURMCluster(host="login", **keywords)


@pytest.mark.parametrize(
    ("hint", "python"),
    [
        ("gpus: 4 or 8", "n_workers for 4 or 8 GPUs"),
        ("gpus: 0", "gpus_per_job=0"),
        ("walltime: 2h", "walltime='2h'"),
        ("gpus_per_job: 2, or layout: mpi", "gpus_per_job=2, or layout='mpi'"),
    ],
)
def test_hints_about_gpus_are_about_workers(hint: str, python: str) -> None:
    assert in_python(hint, key_names(Profile)) == python


def test_a_log_directory_that_is_no_path_is_refused(home: Path) -> None:
    with pytest.raises(InputError, match="log_directory: 5 is not the path of a folder"):
        gpujobs.GPUSLURMCluster(site(home, "slurm"), log_directory=5, quiet=True)  # type: ignore[arg-type]
