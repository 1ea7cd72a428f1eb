"""Profiles that cannot become a script: values, templates, directives and limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpujobs.cli.main import main
from gpujobs.cli.plan_text import plan_text
from gpujobs.clusters.prepare import make_cluster_plan
from gpujobs.errors import InputError
from gpujobs.planning.limits import JobLimit, QueuedJobs, job_limits, most_allowed
from gpujobs.planning.render import render

from ..support.each import each
from .support import SLURM, error_of, made_plan, make_spec


@pytest.mark.parametrize(
    "key", ["account", "queue", "gpu_type", "name", "workdir", "walltime", "directives", "run", "env", "workers.local_directory",
            "network.interface", "environment.python", "workers.pre_import", "workers.options"]
)  # fmt: skip
@pytest.mark.parametrize(
    "bad", ["a\nb", "a\rb", "a\x1bb", "a\u2028b", "a\u0085b"], ids=["LF", "CR", "ESC", "LS", "NEL"]
)
def test_a_control_character_is_refused_in_every_key(home: Path, key: str, bad: str) -> None:
    value: Any = {"directives": [f"--comment={bad}"], "run": ["echo", bad], "env": {"A": bad}, "workers.pre_import": [bad],
                  "workers.options": {"x": bad}}.get(key, bad)  # fmt: skip
    for part in reversed(key.split(".")[1:]):
        value = {part: value}
    message = error_of(home, {"gpus": 1, key.split(".")[0]: value})
    reasons = ("control character", "is not", "up to 40", "has several lines")
    assert any(reason in message for reason in reasons)


@pytest.mark.parametrize(
    "text",
    [
        r'"\e[31mred": 1',
        r'workers: {"\e[31mred": 1}',
        r'groups: {"\e[31mred": {gpus: 1}}',
        r'env: {"\e[31mred": x}',
        r'queue: "\e[31mred"',
        r'site: "\e[31mred"',
    ],
)
def test_messages_have_no_control_characters(home: Path, text: str) -> None:
    (home / "p.yaml").write_text(f"gpus: 1\n{text}\n")
    site = [] if text.startswith("site") else ["--site", "s.yaml"]
    done = CliRunner().invoke(main, ["plan", "p.yaml", *site])
    assert done.exit_code == 2 and "red" in done.output and "\x1b" not in done.output


def test_messages_have_no_control_characters_of_a_site(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("  gpu: {", r'  "\e[31mred": {'))
    (home / "p.yaml").write_text("gpus: 1\nqueue: blue\n")
    done = CliRunner().invoke(main, ["plan", "p.yaml", "--site", "s.yaml"])
    assert done.exit_code == 2 and "red" in done.output and "\x1b" not in done.output


@each(
    "name",
    [
        "A;x",
        "A-B",
        "1A",
        "",
        "A B",
        "BASH_ENV",
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "IFS",
        "A=B",
        "BASH_FUNC_x",
    ],
)
def test_a_wrong_name_of_a_variable_is_refused(home: Path, name: str) -> None:
    assert "svd.yaml" in error_of(home, {"gpus": 1, "env": {name: "1"}})


def test_braces_are_no_templates(home: Path) -> None:
    text = render(
        made_plan(
            home,
            {
                "gpus": 1,
                "run": ["echo", "{{7919*7927}}", "{% raw %}"],
                "env": {"A": "{{ 7919*7927 }}"},
            },
        ),
        "svd-0000",
    )[0].text
    assert (
        "'{{7919*7927}}' '{% raw %}'" in text
        and "export A='{{ 7919*7927 }}'" in text
        and "62773913" not in text
    )


@pytest.mark.parametrize("name", ["-x", "a" * 41, "a b", "a/b", "ä", ""])
def test_a_wrong_name_of_a_job_is_refused(home: Path, name: str) -> None:
    assert "up to 40 letters, digits and '-'" in error_of(home, {"gpus": 1, "name": name})


def test_a_path_with_spaces_arrives_whole(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strange = home / "my #1 dir 50%"
    strange.mkdir()
    monkeypatch.setenv("HOME", str(strange))
    text = render(made_plan(home, {"gpus": 1, "workdir": str(strange), "run": ["ls"]}), "svd-0000")[
        0
    ].text
    assert (
        f'#SBATCH --output="{strange}/.gpujobs/%x/logs/slurm-%j.log"'.replace("50%", "50%%") in text
    )
    assert f"cd '{strange}'" in text


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ jobs.__init__.__globals__ }}", "{{ bash.__base__ }}", "{{ env.update(a=1) }}",
     "{% set x = jobs.source.shape.__class__ %}{{ x.__name__ }}", "{{ cycler.__init__.__globals__.os }}"],
)  # fmt: skip
def test_a_template_cannot_reach_python(home: Path, template: str) -> None:
    (home / "templates").mkdir()
    (home / "templates" / "slurm.sh.j2").write_text(f"#!/bin/bash\n{template}\n")
    with pytest.raises(InputError, match=r"slurm\.sh\.j2:2"):
        render(made_plan(home, {"gpus": 1}), "svd-0000", site_folder=home)


def test_an_undefined_variable_in_a_template_is_named(home: Path) -> None:
    (home / "templates").mkdir()
    (home / "templates" / "slurm.sh.j2").write_text("#!/bin/bash\n\necho {{ walltimes }}\n")
    with pytest.raises(InputError, match=r"slurm\.sh\.j2:3:1: template: 'walltimes' is undefined"):
        render(made_plan(home, {"gpus": 1}), "svd-0000", site_folder=home)
    (home / "templates" / "slurm.sh.j2").write_text("#!/bin/bash\n{% if %}\n")
    with pytest.raises(InputError, match=r"slurm\.sh\.j2:2"):
        render(made_plan(home, {"gpus": 1}), "svd-0000", site_folder=home)


@each(
    ("directive", "option"),
    [
        ("-pgpu", "partition"), ("--part=gpu", "partition"), ("-p gpu", "partition"), ("--partition gpu", "partition"), ("-t 1", "time"),
        ("--tim=1", "time"), ("-J x", "job-name"), ("--job-n=x", "job-name"), ("-o x", "output"), ("--array=1-5", "array"), ("-a 1", "array"),
        ("--mem-per-cpu=1", "mem"), ("--mem-per-gpu=4G", "mem"), ("-G 4", "gres/gpu"), ("--gpus-per-node=4", "gpus-per-node"), ("-N2", "nodes"),
        ("--gpu-bind=closest", "NVLink"), ("--gpus-per-task=1", "NVLink"),
        ("--tres-bind=gres/gpu:single:1", "NVLink"), ("--tres-per-task=gres/gpu:1", "NVLink"), ("--tres-per-t cpu:2", "--cpus-per-task"),
        ("--ntasks=4", "one task per node"), ("-d after:1", "dependency"),
        ("--cluster=x", "cluster"), ("--test-only", "submit nothing"), ("--test", "submit nothing"), ("--requeue", "started again"),
        ("--export=ALL", "in `env`"), ("--export-file=x", "in `env`"), ("--gres=nvme:100,gpu:1", "gres"), ("--gres gpu:8", "gres"),
        ("--comment='x' --partition=gpu", "partition"), ("--signal=USR1", "signal"), ("-c 4", "cpus-per-task"), ("-M other", "cluster"),
    ],
)  # fmt: skip
def test_a_directive_that_overrides_a_managed_one_is_refused(
    home: Path, directive: str, option: str
) -> None:
    message = error_of(home, {"gpus": 1, "directives": ["--qos=high", directive]})
    assert option in message and "svd.yaml:" in message and directive in message


@pytest.mark.parametrize(
    "directive",
    [
        "--constraint=a100",
        "--qos=high",
        "--comment=--partition",
        "--mail-type=END",
        "--reservation=x",
        "--exclude=n1",
    ],
)
def test_another_directive_is_allowed(home: Path, directive: str) -> None:
    assert made_plan(home, {"gpus": 1, "directives": [directive]}).groups[0].lines[-1] == directive


def test_an_unbalanced_quote_in_a_directive_is_refused(home: Path) -> None:
    assert "is no directive" in error_of(home, {"gpus": 1, "directives": ["--comment='x"]})


@pytest.mark.parametrize(
    ("profile", "limit", "message"),
    [
        ("gpus: 1\nwalltime: 25h\n", "max_walltime", "walltime 25h is more than its 24h"),
        ("gpus: 1\nwalltime:\n", "", "`walltime` is empty"),
        ("gpus: 8\ngpus_per_job: 8\n", "gpus_per_node", "its nodes have 4 GPUs"),
        ("gpus: 4\nworkers: {memory: 121GiB}\n", "memory_per_node", "at most 120GiB"),
        ("gpus: 4\nworkers: {threads: 17}\n", "", "the job has 64 CPUs"),
        ("gpus: 7\ngpus_per_job: 2\n", "", "not whole jobs of 2"),
        ("gpus: 1\ngpu_type: h100\n", "gpu_type", "of no named type"),
    ],
)
def test_a_limit_of_the_queue_names_both_positions(
    home: Path, profile: str, limit: str, message: str
) -> None:
    error = error_of(home, profile)
    assert message in error
    assert re.search(r"svd\.yaml:\d:\d", error)
    if limit and limit in SLURM:
        assert re.search(r"see .*s\.yaml:5:\d", error)


QUEUES = """\
description: x
scheduler: slurm
queues:
  short: {gpus_per_node: 4, max_walltime: 1h}
  big: {gpus_per_node: 4, max_walltime: 1d, min_nodes: 2}
"""


def test_queues_with_different_reasons_have_no_line_in_common(home: Path) -> None:
    (home / "s.yaml").write_text(QUEUES)
    error = error_of(home, "gpus: 4\nwalltime: 2h\n")
    assert re.search(
        r"svd\.yaml: no queue fits:\n  short: .* \(\S+s\.yaml:4:43; `walltime`\)\n", error
    )
    assert re.search(r"  big: jobs of 1 node; it requires 2 \(\S+s\.yaml:5:\d+; `gpus`\)", error)
    error = error_of(home, "gpus: 8\nwalltime: 2d\nlayout: mpi\n")
    assert "svd.yaml:2:11: no queue fits:" in error and "`walltime`" not in error


def test_a_hint_names_its_queue(home: Path) -> None:
    (home / "s.yaml").write_text(QUEUES.replace("4, max_walltime: 1h", "2, max_walltime: 1h"))
    error = error_of(home, "gpus: 8\nwalltime: 1h\ngpus_per_job: 8\n")
    assert "hint: for queue short: gpus_per_job: 2, or" in error
    assert "; for queue big: gpus_per_job: 4, or" in error
    error = error_of(home, "gpus: 0\nwalltime: 1h\n")
    assert error.endswith("hint: `queue: short` runs CPU workers there anyway")


def test_more_jobs_than_allowed_are_refused(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1", "max_jobs: 2"))
    message = error_of(home, "gpus: 12\n")
    assert "3 jobs; the queue allows 2 of one user" in message and "s.yaml:5" in message


@pytest.mark.parametrize(
    ("head", "queue_limit", "site_limit", "error"),
    [
        (None, 3, 3, ""),
        (None, 2, 3, "3 jobs; the queue allows 2 of one user (`max_jobs`)"),
        (None, 3, 2, "3 jobs; the site allows 2 of one user (`max_queued_jobs`)"),
        ("cpu", 3, 4, ""),
        ("cpu", 3, 3, "4 jobs; the site allows 3 of one user (`max_queued_jobs`)"),
        ("gpu", 3, 4, "4 jobs; the queue allows 3 of one user (`max_jobs`)"),
        ("gpu", 4, 4, ""),
    ],
)
def test_the_heads_own_job_counts_against_limits(
    home: Path, head: str | None, queue_limit: int, site_limit: int, error: str
) -> None:
    site = SLURM.replace("max_nodes: 1}", f"max_jobs: {queue_limit}}}\n  cpu: {{}}")
    (home / "s.yaml").write_text(f"{site}max_queued_jobs: {site_limit}\n")
    profile = {"gpus": 12, "queue": "gpu", **({"head": {"queue": head}} if head else {})}
    if not error:
        assert len(made_plan(home, profile).all_jobs) == (2 if head else 1)
        return
    message = error_of(home, profile)
    assert error in message and "svd.yaml:2:" in message
    assert ("s.yaml:5:" if "max_jobs" in error else "s.yaml:8:") in message


def test_another_queue_is_tried_if_there_are_too_many_jobs(home: Path) -> None:
    larger = "max_jobs: 2}\n  large: {gpus_per_node: 8}"
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1}", larger))
    assert made_plan(home, "gpus: 12\n").groups[0].queue == "large"


def test_the_smallest_limit_counts(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1", "max_jobs: 5"))
    site = made_plan(home, "gpus: 1\n").site
    assert most_allowed(job_limits(site, "gpu", 4)) == 5
    assert most_allowed(job_limits(site, "gpu", 4, [QueuedJobs("gpu", 1)])) == 4
    (home / "s.yaml").write_text(SLURM + "max_queued_jobs: 3\n")
    site = made_plan(home, "gpus: 1\n").site
    assert most_allowed(job_limits(site, "gpu", 4, [QueuedJobs("other", 1)])) == 2
    (home / "s.yaml").write_text(SLURM)
    assert most_allowed(job_limits(made_plan(home, "gpus: 1\n").site, "gpu", 4)) is None


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ("run_on: ranks\nrun: [a.py]\n", "`run_on: ranks` needs `layout: mpi`"),
        ("layout: mpi\nrun_on: ranks\n", "`run_on: ranks` needs `layout: mpi` and a script"),
        ("layout: mpi\nrun_on: ranks\nrun: [python3, a.py]\n", "hint: run: [a.py]"),
        ("layout: mpi\ngpus_per_job: 2\n", "`gpus_per_job` has no meaning in `layout: mpi`"),
        ("layout: mpi\nhead: {cpus: 1}\n", "`head` has no meaning in `layout: mpi`"),
    ],
)
def test_keys_that_contradict_the_layout_are_refused(home: Path, keys: str, error: str) -> None:
    assert error in error_of(home, f"gpus: 4\n{keys}")


def test_the_default_gpus_per_job_is_within_max_gpus(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1", "max_gpus: 3"))
    for gpus, per_job in ((8, 2), (9, 3), (7, 1), (3, 3)):
        assert made_plan(home, f"gpus: {gpus}\n").groups[0].shape.gpus == per_job
    message = error_of(home, "gpus: 8\ngpus_per_job: 4\n")
    assert "jobs of 4 GPUs; it allows 3 a job" in message and "gpus_per_job: 3" in message


def test_a_job_has_one_mig_slice(home: Path) -> None:
    (home / "s.yaml").write_text(
        SLURM.replace("gpus_per_node: 4", "gpus_per_node: 28, max_gpus: 1")
    )
    shape = made_plan(home, "gpus: 8\n").groups[0].shape
    assert (shape.jobs, shape.gpus) == (8, 1)


@pytest.mark.parametrize(
    ("scheduler", "request_", "hint"),
    [
        ("sge", ["-pe smp {cpus_per_job}", "-l gpu={gpus_per_job}"], "parallel environment"),
        ("sge", [], "parallel environment"),
        ("slurm", ["--gres=gpu:{gpus_per_node}"], "{nodes}"),
        ("pbs", ["-l select=1:ngpus={gpus_per_node}"], "{nodes}"),
        ("lsf", ["-n {cpus_per_job}", '-R "span[hosts=1]"', '-gpu "num={gpus_per_node}"'], "ptile"),
    ],
)
def test_a_request_for_one_node_refuses_a_job_of_two(
    home: Path, scheduler: str, request_: list[str], hint: str
) -> None:
    lines = "".join(f"  - '{line}'\n" for line in request_)
    site = (
        SLURM.replace("slurm", scheduler)
        .replace("account:", "#")
        .replace("max_nodes: 1", "max_nodes: 2")
    )
    site += "visible_devices: scheduler\n" + (f"request:\n{lines}" if lines else "")
    (home / "s.yaml").write_text(site)
    message = error_of(home, "gpus: 8\nlayout: mpi\n")
    assert "jobs of 2 nodes; its `request` is for one node" in message and hint in message
    assert made_plan(home, "gpus: 4\nlayout: mpi\n").groups[0].shape.nodes == 1


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "torque", "lsf"])
def test_built_in_requests_span_nodes(home: Path, scheduler: str) -> None:
    site = (
        SLURM.replace("slurm", scheduler)
        .replace("account:", "#")
        .replace("max_nodes: 1", "max_nodes: 2")
    )
    (home / "s.yaml").write_text(site + "visible_devices: scheduler\n")
    assert made_plan(home, "gpus: 8\nlayout: mpi\n").groups[0].shape.nodes == 2


def test_a_parallel_environment_spans_several_nodes(home: Path) -> None:
    site = (
        SLURM.replace("slurm", "sge")
        .replace("account:", "#")
        .replace("max_nodes: 1", "max_nodes: 2")
    )
    request = "request: ['-pe mpi-{nodes} {cpus_per_job}', '-l gpu={gpus_per_node}']\n"
    (home / "s.yaml").write_text(site + "visible_devices: scheduler\n" + request)
    assert made_plan(home, "gpus: 8\nlayout: mpi\n").groups[0].shape.nodes == 2


def test_a_queue_for_large_jobs_comes_before_smaller_jobs(home: Path) -> None:
    large = "max_gpus: 2}\n  large: {gpus_per_node: 4}"
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1}", large))
    for gpus, queue, per_job in ((8, "large", 4), (2, "gpu", 2)):
        (workers,) = made_plan(home, f"gpus: {gpus}\n").groups
        assert (workers.queue, workers.shape.gpus) == (queue, per_job)


# -- what no job can do ------------------------------------------------------------------------------------------------
GPU_40 = SLURM.replace("gpus_per_node: 4,", "gpus_per_node: 4, gpu_memory: 40GiB,")


@each(
    ("profile", "message"),
    [
        ("gpus: 4\nworkers: {workers_per_gpu: 100000000}\n", "at most 100\n"),
        ("gpus: 4\nworkers: {workers_per_gpu: 101}\n", "`workers.workers_per_gpu` must be at most 100\n"),
        ("gpus: 1\nrequeue: 1000000\n", "`requeue` must be at most 100\n"),
        ("gpus: 1000000\n", "`gpus` must be at most 100000\n"),
        ("gpus: 1" + 5000 * "0" + "\n", "`gpus` must be at most"),
        ("gpus: 0\nworkers: {count: 100001}\n", "`workers.count` must be at most 100000\n"),
        ("gpus: 1\nworkers: {cudf_spill_stats: 100000000000}\n", "must be at most 10000000\n"),
        ("gpus: 1\nmemory_per_job: 1" + 400 * "0" + "GiB\n", "is too large"),
        ("gpus: 100000\nworkers: {workers_per_gpu: 2}\n", "200000 workers; a cluster has at most 100000"),
    ],
)  # fmt: skip
def test_numbers_have_an_upper_bound(home: Path, profile: str, message: str) -> None:
    assert message in error_of(home, profile) + "\n"


@each(
    ("workers", "message"),
    [
        ("rmm_pool_size: 60GiB", "pools of 60GiB on a GPU, which has 40GiB"),
        ("rmm_pool_size: 30GiB, workers_per_gpu: 4", "pools of 120GiB on a GPU, which has 40GiB"),
        ("rmm_pool_size: 0.8, rmm_maximum_pool_size: 0.5", "`workers.rmm_pool_size` is more than `rmm_maximum_pool_size`"),
        ("rmm_pool_size: 0.8, rmm_maximum_pool_size: 20GiB", "is more than `rmm_maximum_pool_size`"),
        ("rmm_pool_size: 3GiB, rmm_maximum_pool_size: 2GiB", "is more than `rmm_maximum_pool_size`"),
        ("worker_port: 8000", "4 workers on a node need 4 ports, not 1"),
        ("worker_port: '8000:8002'", "worker_port: 8000:8003"),
        ("worker_port: '9000:8000'", "ports are from 1024 to 65535, the smaller one first"),
        ("worker_port: 99999", "ports are from 1024 to 65535"),
        ("options: {rmm_pool_size: 0.8}", "rmm_pool_size is a key of `workers`: write `workers: {rmm_pool_size: …}`"),
        ("options: {no-rmm-async: true}", "no-rmm-async is a key of `workers`"),
        ("worker_class: nanny, rmm_pool_size: 0.5", "is an option of CUDA workers, not of `worker_class: nanny`"),
        ("options: {colour: red}", "`dask cuda worker` has no option colour"),
        ("worker_class: nanny, options: {multiprocessing_method: spawn}", "`dask worker` has no option multiprocessing_method"),
    ],
)  # fmt: skip
def test_options_of_workers_that_no_job_can_have_are_refused(
    home: Path, workers: str, message: str
) -> None:
    (home / "s.yaml").write_text(GPU_40)
    error = error_of(home, f"gpus: 4\nworkers: {{{workers}}}\n")
    assert "svd.yaml:2" in error and message in error


@pytest.mark.parametrize(
    "workers",
    [
        "rmm_pool_size: 0.8, rmm_maximum_pool_size: 0.9, workers_per_gpu: 2",
        "rmm_pool_size: 10GiB, workers_per_gpu: 4",
        "rmm_pool_size: 60GiB, rmm_managed_memory: true",  # which may be more than the GPU has
        "rmm_pool_size: 0.5, rmm_maximum_pool_size: 30GiB",
        "worker_port: '8000:8003'",
        "options: {multiprocessing_method: spawn, dashboard_prefix: x, pid_file: w.pid}",
        "worker_class: nanny, options: {no-nanny: true, lifetime: 1h}",
    ],
)
def test_options_of_workers_that_jobs_can_have_are_accepted(home: Path, workers: str) -> None:
    (home / "s.yaml").write_text(GPU_40)
    made_plan(home, f"gpus: 4\nworkers: {{{workers}}}\n")


def test_ranks_refuse_options_of_the_command(home: Path) -> None:
    """The rank's class takes keywords, not the options of the command."""
    profile = "gpus: 4\nlayout: mpi\nrun_on: ranks\nrun: [all.py]\nworkers: {{worker_class: {0}, options: {{{1}: x}}}}\n"
    error = error_of(home, profile.format("cuda", "multiprocessing_method"))
    assert "CUDAWorker has no option multiprocessing_method" in error
    assert "set DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD in `env`" in error
    assert "Nanny has no option pid_file" in error_of(home, profile.format("nanny", "pid_file"))
    made_plan(home, profile.format("cuda", "lifetime"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("GPUJOBS_JOB", "is gpujobs' own"),
        ("GPUJOBS_FOLDER", "is gpujobs' own"),
        ("CUDA_VISIBLE_DEVICES", "is set for each worker"),
        ("DASK_SCHEDULER_ADDRESS", "is set to the dask scheduler of the cluster"),
        ("DASK_DISTRIBUTED__COMM__TLS__CA_FILE", "use `network.protocol`"),
        ("UID", "bash refuses it"),
    ],
)
def test_variables_that_would_break_the_cluster_are_refused(
    home: Path, name: str, reason: str
) -> None:
    error = error_of(home, f"gpus: 1\nenv:\n  A: x\n  {name}: '9'\n")
    assert "svd.yaml:4:" in error and f"`env.{name}`: {name} " in error and reason in error


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|aa)*b", "((a?)b)*", "(?:x*){20}", "(?P<n>[a-z]+,?)+"]
)
def test_patterns_of_sites_cannot_hang(home: Path, pattern: str) -> None:
    (home / "s.yaml").write_text(SLURM.replace("[a-z0-9]+", pattern))
    error = error_of(home, {"gpus": 1, "account": 60 * "a"})
    assert "s.yaml:3" in error and "repeats a group" in error


@pytest.mark.parametrize(
    "pattern", [8 * "a*" + "b", 30 * "a?" + 30 * "a", r"(\w*)(\w*)(\w*)(\w*)(\w*)!"]
)
def test_patterns_with_many_repeats_cannot_hang(home: Path, pattern: str) -> None:
    (home / "s.yaml").write_text(SLURM.replace("[a-z0-9]+", pattern))
    assert "does not match" in error_of(home, {"gpus": 1, "account": 100 * "a" + "-"})


def test_a_setup_that_is_no_bash_is_refused_with_its_line(home: Path) -> None:
    text = "gpus: 0\nenvironment:\n  setup: |\n    module load cuda\n    if\n"
    spec = make_spec(home, text, "local")
    with pytest.raises(InputError, match=r"svd\.yaml:6:1: `environment\.setup`: bash -n refuses"):
        make_cluster_plan(spec)
    for setup in ("shopt -s extglob\nls !(x)", "if true; then :; fi", ""):
        make_cluster_plan(make_spec(home, {"gpus": 0, "environment": {"setup": setup}}, "local"))


def test_gpus_that_are_no_whole_jobs_get_the_two_nearest_numbers(home: Path) -> None:
    assert "gpus: 4 or 8" in error_of(home, "gpus: 6\ngpus_per_job: 4\n")
    assert "gpus: 4 or 8" in error_of(home, "gpus: 7\ngpus_per_job: 4\n")


def test_a_limit_that_others_fill_leaves_no_job() -> None:
    place = ("queues", "gpu", "max_jobs")
    assert JobLimit(2, place, others=3).most_jobs == 0
    assert JobLimit(8, place, others=1, gpus=2).most_jobs == 3


def test_a_key_of_a_queue_comes_before_the_same_name_of_another(home: Path) -> None:
    queue = "gpus_per_node: 4, cpus_per_node: 64, memory_per_node: 480GiB"
    (home / "s.yaml").write_text(
        "description: test\nscheduler: slurm\nqueues:\n"
        f"  short: {{name: gpu, {queue}, max_walltime: 1h, directives: [--qos=short]}}\n"
        f"  gpu: {{{queue}, max_walltime: 1d}}\n"
    )
    group = made_plan(home, "gpus: 1\nqueue: gpu\nwalltime: 10m\n").groups[0]
    assert "--qos=short" not in group.lines


def test_the_text_of_a_plan_says_where_the_head_is_and_what_each_worker_has(home: Path) -> None:
    text = plan_text(made_plan(home, "gpus: 4\n"), "svd-0000")
    assert "in the job that starts first\n" in text and "of a GPU" not in text
    shared = "gpus: 4\nworkers: {workers_per_gpu: 2}\n"
    assert "1/2 of a GPU" in plan_text(made_plan(home, shared), "svd-0000")
    own = "gpus: 4\nhead: {cpus: 2, memory: 4GiB, queue: cpu}\n"
    (home / "s.yaml").write_text(
        f"{SLURM}  \n".replace(
            "defaults", "  cpu: {cpus_per_node: 8, memory_per_node: 32GiB}\ndefaults"
        )
    )
    plan = made_plan(home, own)
    assert plan.head and plan.head.shape.jobs == 1
    assert "in a job of its own\n" in plan_text(plan, "svd-0000")


def test_workers_of_two_gpus_do_not_share_them(home: Path) -> None:
    message = error_of(home, "gpus: 4\nworkers: {gpus_per_worker: 2, workers_per_gpu: 2}\n")
    assert "which exclude each other" in message
