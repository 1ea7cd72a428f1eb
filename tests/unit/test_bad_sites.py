"""Invalid site files, and profiles that contradict their site."""

from __future__ import annotations

import inspect
import logging
import os
import re
import socket
from pathlib import Path

import pytest

from gpujobs.config.sitefiles import NoSiteHereError, data_folder, load_site, site_of_this_host
from gpujobs.config.spec import load_spec, settings_document
from gpujobs.errors import InputError
from gpujobs.planning.plan import Machine
from gpujobs.planning.sitecheck import site_problems
from gpujobs.schedulers import get_scheduler, scheduler_names
from gpujobs.schedulers.base import all_commands

from ..support.each import each
from .support import SLURM, error_of, made_plan, make_spec


@each(
    ("change", "message"),
    [
        (("--account={account}", "--account={acount}"), "s.yaml:3"),
        (("scheduler: slurm", "scheduler: slurn"), "s.yaml:2:12: `scheduler`: 'slurn' is not one of"),
        (("description: test\n", ""), "`description` is required"),
        (("gpus_per_node", "gpus_pernode"), "did you mean `queues.gpu.gpus_per_node`?"),
        (("'[a-z0-9]+'", "'[a-z'"), "is not a regular expression"),
        (("480GiB", "480"), "480 needs a unit"),
        (("queues:\n", "directives: [qos=high]\nqueues:\n"), "does not start with '-'"),
        (("queues:\n", "request: ['--gres=gpu:{gpus}']\nqueues:\n"), "s.yaml:4:23: `request[0]`: {gpus} is not a placeholder"),
        (("queues:\n", "request: ['--mem={memory_per_node}']\nqueues:\n"), "needs a unit, as in {memory_per_node:GB}"),
        (("queues:\n", "request: ['--mem={memory_per_node:XB}']\nqueues:\n"), "one of KB, MB, GB, TB"),
        (("queues:\n", "request: ['--mem={nodes:GB}']\nqueues:\n"), "cannot have a unit"),
        (("queues:\n", "request: ['{{7*7}}']\nqueues:\n"), "does not start with '-'"),
        (("queues:\n", "request: ['-x {{nodes}}']\nqueues:\n"), "{ is not a placeholder"),
        (("queues:\n", "shell: /bin/zsh\nqueues:\n"), "the jobs are bash scripts"),
        (("queues:\n", "directory: gpujobs\nqueues:\n"), "must be an absolute path"),
        (("queues:\n", "scratch: $(rm -rf /)\nqueues:\n"), "must be an absolute path"),
        (("queues:\n", "visible_devices: all\nqueues:\n"), "must be `scheduler`, `exclusive`"),
        (("queues:\n", "network: {protocols: [udp]}\nqueues:\n"), "'udp' is not one of"),
        (("queues:\n", "request: ['--gres=gpu:{gpus_per_nod}']\nqueues:\n"), "{gpus_per_nod} is not a placeholder; did you mean {gpus_per_node}? known: {queue}"),
        (("queues:\n", "request: ['--mem={memory_per_nod:GB}']\nqueues:\n"), "did you mean {memory_per_node:GB}?"),
        (("queues:\n", "options: {st: {directive: --comment=x}}\nqueues:\n"), "s.yaml:4:27: `options.st.directive` must have {st}"),
        (("gpus_per_node: 4", "options: {st: {directive: --comment=x}}"), "s.yaml:5:35: `queues.gpu.options.st.directive` must have {st}"),
        (("queues:\n", "options: {st: {directive: '-x={st}', pattern: '[0-9]+', default: ab}}\nqueues:\n"), "s.yaml:4:66: `options.st.default`: 'ab' does not match the option's pattern [0-9]+"),
        (("scheduler: slurm", "scheduler: sge\ncluster: b"), "s.yaml:3:10: `cluster`: sge does not support it here"),
        (("max_nodes: 1", "network: {protocols: [ucxx], encryption: required}"), "`queues.gpu.network` has `encryption: required`, but ucxx"),
        (("queues:\n", "\tqueues:\n"), "s.yaml:4:1: not valid YAML: a tab; YAML is indented with spaces only"),
        (("max_nodes: 1", "max_node_hours: -1"), "s.yaml:5:105: `queues.gpu.max_node_hours`: '-1' is not a number of at least 0"),
        (("max_nodes: 1", "charge: {per_gpu_hour: 1e308, unit: SU}"), f"1e+308 is not a number from 0 to 1{'0' * 18}"),
        (("max_nodes: 1", "max_node_hours: many"), "'many' is not a number of at least 0"),
        (("max_nodes: 1", "max_gpus_per_user: 0"), "`queues.gpu.max_gpus_per_user` must be at least 1"),
        (("max_nodes: 1", "max_gpu_per_user: 8"), "did you mean `queues.gpu.max_gpus_per_user`?"),
        (("gpu: {", "gpu: {like: gpu, "), "s.yaml:5:15: `like` forms a cycle: gpu → gpu"),
        (("queues:\n", "cluster_names: ['[a']\nqueues:\n"), "s.yaml:4:17: `cluster_names[0]`: '[a' is not a regular expression"),
    ],
)  # fmt: skip
def test_an_invalid_site_file_is_refused_with_its_position(
    home: Path, change: tuple[str, str], message: str
) -> None:
    (home / "s.yaml").write_text(SLURM.replace(*change))
    with pytest.raises(InputError) as caught:
        load_site(str(home / "s.yaml"))
    assert message in str(caught.value)


def test_a_wrong_extends_is_the_only_problem(home: Path) -> None:
    (home / "s.yaml").write_text("extends: [example-slurm]\n")
    with pytest.raises(InputError) as caught:
        load_site(str(home / "s.yaml"))
    (problem,) = caught.value.problems
    assert problem.message == "`extends` must be text, not a list" and problem.position


def test_site_defaults_are_checked_at_their_position(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("walltime: 1h", "waltime: 1h"))
    message = error_of(home, "gpus: 1\n")
    assert "s.yaml:6:12: unknown key `waltime`" in message


def test_request_without_gpus_needs_exclusive_nodes(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM + "request: ['--nodes={nodes}']\n")
    assert "must be `exclusive: true`" in error_of(home, "gpus: 4\n")
    (home / "s.yaml").write_text(
        SLURM.replace("max_nodes: 1", "exclusive: true") + "request: ['--nodes={nodes}']\n"
    )
    assert made_plan(home, "gpus: 4\n").groups[0].lines == ("--nodes=1",)


def test_a_required_account_that_is_missing_is_named(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("required: false", "required: true"))
    message = error_of(home, "gpus: 1\n")
    assert "requires an `account`" in message and "s.yaml:3" in message
    message = error_of(home, "gpus: 1\naccount: ABC\n")
    assert "svd.yaml:2:10" in message and "does not match the site's pattern [a-z0-9]+" in message


def test_account_is_ignored_if_the_site_has_none(home: Path) -> None:
    (home / "s.yaml").write_text(re.sub("account: .*", "account:", SLURM))
    found = made_plan(home, "gpus: 1\naccount: abc\n")
    assert not any("abc" in line for line in found.groups[0].lines)
    assert any("account abc is ignored" in note for note in found.notes)


def test_gpus_auto_needs_the_local_site(home: Path) -> None:
    assert "for the local site" in error_of(home, "gpus: auto\n")


def test_local_machine_has_too_few_gpus(home: Path) -> None:
    machine = Machine(gpus=("1",), cpus=8, memory=2**34, busy={"0": "process 4242"})
    message = error_of(home, "gpus: 2\n", "local", machine)
    assert "2 GPUs wanted, 1 free on this machine; GPU 0 is used by process 4242" in message
    assert "no directives" in error_of(home, "gpus: 0\ndirectives: [--x]\n", "local", machine)


def test_an_unknown_site_is_an_error_with_the_list(home: Path) -> None:
    with pytest.raises(
        InputError, match=r"no site `nosuch`\n  hint: .*`gpujobs sites list` shows all"
    ):
        make_spec(home, "gpus: 1\n", "nosuch")
    (home / "svd.yaml").write_text("site: nosuch\n")
    with pytest.raises(InputError, match=r"svd\.yaml:1:7: there is no site"):
        load_spec(home / "svd.yaml")


@pytest.mark.parametrize(
    "setting", ["gpus", "=8", "gpus=8=9", "workers.memory=16", "a b=1", "gpus=[1"]
)
def test_bad_settings_are_refused(home: Path, setting: str) -> None:
    (home / "svd.yaml").write_text("gpus: 1\n")
    with pytest.raises(InputError, match="--set"):
        load_spec(home / "svd.yaml", site="local", settings=settings_document((setting,)))


def test_an_unset_variable_in_directory_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "s.yaml").write_text(SLURM + "directory: $SCRATCH/gpujobs\n")
    monkeypatch.delenv("SCRATCH", raising=False)
    message = error_of(home, "gpus: 1\nstart_workers: 2\n")
    assert re.search(r"s\.yaml:7:12: the site's `directory` is \$SCRATCH/gpujobs, but", message)
    assert "start_workers is 2" in message  # with all other problems
    monkeypatch.setenv("SCRATCH", "/scratch/ada")
    assert made_plan(home, "gpus: 1\n").root == "/scratch/ada/gpujobs"
    monkeypatch.setenv("SCRATCH", "")
    (home / "s.yaml").write_text(SLURM + "directory: ${SCRATCH:-/tmp}/gpujobs\n")
    assert made_plan(home, "gpus: 1\n").root == "/tmp/gpujobs"


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [
        ("slurm", "--account=abc"), ("pbs", "-A abc"), ("torque", "-A abc"), ("lsf", "-P abc"),
        ("sge", "-P abc"),
    ],
)  # fmt: skip
def test_account_without_a_directive_is_written_as_usual(
    home: Path, scheduler: str, line: str
) -> None:
    text = SLURM.replace("scheduler: slurm", f"scheduler: {scheduler}\nvisible_devices: scheduler")
    for account in ("account: {required: true}", "account: {pattern: '[a-z]+'}", ""):
        (home / "s.yaml").write_text(re.sub("account: .*", account, text))
        found = made_plan(home, "gpus: 1\naccount: abc\n")
        assert line in found.groups[0].lines


@pytest.mark.parametrize("scheduler", ["lsf", "sge"])
def test_another_cluster_that_cannot_be_reached_is_refused(home: Path, scheduler: str) -> None:
    text = SLURM.replace("scheduler: slurm", f"scheduler: {scheduler}\ncluster: other")
    (home / "s.yaml").write_text(text)
    message = error_of(home, "gpus: 1\n")
    assert f"s.yaml:3:10: `cluster`: {scheduler} does not support it here" in message


PBS = SLURM.replace("slurm", "pbs").replace("--account={account}", "-A {account}")


@each(
    ("site", "message"),
    [
        (SLURM + "directives: [--job-name=x]\n", "s.yaml:7:14: `--job-name=x`: job-name is written by gpujobs"),
        (SLURM.replace("walltime: 1h", "waltime: 1h"), "s.yaml:6:12: unknown key `waltime`"),
        (PBS, "s.yaml:5:8: `visible_devices` is needed"),
        (PBS + "visible_devices: scheduler\nrequest: ['--gres=gpu:{gpus_per_node}']\n", "s.yaml:8:11: `--gres=gpu:1` is no directive"),
        (SLURM + "commands: {sbacth: /opt/sbatch}\n", "s.yaml:7:20: slurm has no command sbacth; it has sacct, sacctmgr, sbatch,"),
        (SLURM + "directory: $NOSUCH/x\n", "s.yaml:7:12: the site's `directory` is $NOSUCH/x"),
        (SLURM + "request: [--nodes=1]\n", "s.yaml:7:10: no line asks for GPUs"),
        (SLURM + "request: ['--mem={memory_per_gpu:GB}G', '-G {gpus_per_job}', --mem=0]\n", "mem is written by the site"),
        (SLURM.replace("cpus_per_node: 64, ", "") + "request: ['-c {cpus_per_node}', '-G {gpus_per_job}']\n", "does not state cpus_per_node"),
        (SLURM.replace("max_nodes: 1", "min_nodes: 2") + "request: ['--gres=gpu:{gpus_per_node}']\n", "its `request` is for one node"),
        (SLURM.replace("max_nodes: 1}", "max_nodes: 1}\n  cpu: {}") + "cpu_request: ['-l x']\n", "sbatch has no option -l"),
        (SLURM + "visible_devices: exclusive\n", "must be `exclusive: true`"),
    ],
)  # fmt: skip
def test_errors_that_make_every_plan_fail_are_told_once(
    home: Path, site: str, message: str
) -> None:
    (home / "s.yaml").write_text(site)
    found = "\n".join(str(problem) for problem in site_problems(load_site("./s.yaml")))
    assert message in found
    assert "a profile for every queue" not in found


def test_all_errors_of_all_queues_are_found(home: Path) -> None:
    queues = "max_nodes: 1}\n  b: {gpus_per_node: 1, directives: [--output=x]}\n  c: {directives: [--time=1]}"
    (home / "s.yaml").write_text(
        SLURM.replace("max_nodes: 1}", queues) + "directives: [--array=1]\n"
    )
    found = [str(problem).splitlines()[0] for problem in site_problems(load_site("./s.yaml"))]
    assert len(found) == 3 and all("is written by gpujobs" in line for line in found)


def test_a_broken_template_is_an_error_of_the_site(home: Path) -> None:
    (home / "templates").mkdir()
    (home / "templates" / "slurm.sh.j2").write_text("#!/bin/bash\n{{ nosuch }}\n")
    (problem,) = site_problems(load_site("./s.yaml"))
    assert "slurm.sh.j2:2" in str(problem)


@pytest.mark.parametrize(
    "change",
    [
        ("required: false", "required: true"),
        ("1d, max_nodes: 1}\ndefaults: {walltime: 1h}", "5m}\ndefaults: {walltime: 5m}"),
        ("max_nodes: 1", "max_gpus: 1"),
        ("max_nodes: 1", "exclusive: true, min_nodes: 2"),
        (
            "defaults: {walltime: 1h}",
            "defaults: {gpus: 3, gpus_per_job: 3, queue: auto}",
        ),
        ("defaults: {walltime: 1h}", ""),
    ],
)
def test_correct_sites_have_no_errors(home: Path, change: tuple[str, str]) -> None:
    (home / "s.yaml").write_text(SLURM.replace(*change))
    assert site_problems(load_site("./s.yaml")) == []


def test_examples_of_sites_have_no_errors(home: Path) -> None:
    """tests/golden/test_sites.py has those of real machines."""
    paths = sorted(data_folder("site_configs").glob("example-*.yaml"))
    assert {"example-slurm", "example-pbs"} <= {path.stem for path in paths}
    for path in [*paths, data_folder("site_configs") / "local.yaml"]:
        assert site_problems(load_site(str(path))) == [], path


# -- site files ------------------------------------------------------------------------------------
@pytest.fixture
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sites, of which `mine` matches this host."""
    sites = home / "sites"
    sites.mkdir()
    monkeypatch.setenv("GPUJOBS_SITE_PATH", str(sites))
    monkeypatch.setattr(socket, "gethostname", lambda: "login1")
    (sites / "mine.yaml").write_text(SLURM + "hostnames: [login1]\n")
    return sites


def test_files_that_cannot_be_read_do_not_stop_others(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "tab.yaml").write_text("a:\n\tb: 1\n")
    (folder / "directory.yaml").mkdir()
    (folder / "link.yaml").symlink_to("nosuch")
    (folder / "cycle.yaml").write_text("extends: cycle\n")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    os.mkfifo(folder / "pipe.yaml")
    (folder / ".#mine.yaml").symlink_to("ada@login1.4242")  # of Emacs
    with caplog.at_level(logging.WARNING, "gpujobs"):
        assert site_of_this_host() == "mine"
    found = sorted(record.getMessage() for record in caplog.records)
    assert len(found) == 6 and all("a site file is ignored: " in line for line in found)
    assert not any("Emacs" in line or ".#" in line for line in found)


def test_a_folder_of_sites_that_is_a_loop_of_links_is_ignored_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = folder.parent / "loop"
    loop.symlink_to("loop")
    monkeypatch.setenv("GPUJOBS_SITE_PATH", f"{loop}:{folder}")
    with caplog.at_level(logging.WARNING, "gpujobs"):
        assert site_of_this_host() == "mine"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"a folder of sites is ignored: {loop}: Too many levels of symbolic links"


def test_the_host_names_of_an_extended_site_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = folder.parent / "own"
    own.mkdir()
    (own / "mine.yaml").write_text("extends: mine\ndirectory: /scratch/x\n")
    monkeypatch.setenv("GPUJOBS_SITE_PATH", f"{own}:{folder}")
    assert site_of_this_host() == "mine"


def test_variables_select_a_site_before_the_host_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "environment_variables: {LMOD_SYSTEM_NAME: 'front.*', ARCH: x}\n"
    (folder / "other.yaml").write_text(SLURM + other)
    assert site_of_this_host() == "mine"
    monkeypatch.setenv("LMOD_SYSTEM_NAME", "frontera")
    assert site_of_this_host() == "mine"
    monkeypatch.setenv("ARCH", "x")
    assert site_of_this_host() == "other"
    (folder / "third.yaml").write_text(SLURM + "environment_variables: {ARCH: x}\n")
    with pytest.raises(InputError, match="several sites match the environment variables here: ot"):
        site_of_this_host()
    (folder / "third.yaml").write_text(SLURM + "environment_variables: {A-B: x}\n")
    with pytest.raises(InputError, match="'A-B' is not a variable's name"):
        load_site("third")


def test_the_name_of_the_cluster_selects_a_site_after_the_host_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = folder.parent / "slurm.conf"
    conf.write_text("# ClusterName=no\nSlurmctldHost=c1\n clustername = alps-eiger # of users\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    (folder / "other.yaml").write_text(SLURM + "cluster_names: [alps-.*]\n")
    assert site_of_this_host() == "mine"
    (folder / "mine.yaml").write_text(SLURM)
    assert site_of_this_host() == "other"
    (folder / "pbs.yaml").write_text(SLURM.replace("slurm", "pbs") + "cluster_names: [alps-.*]\n")
    assert site_of_this_host() == "other"
    (folder / "third.yaml").write_text(SLURM + "cluster_names: [alps-eiger]\n")
    with pytest.raises(InputError, match="several sites match the name of the cluster here: other"):
        site_of_this_host()
    conf.write_text("ClusterName=alps\n")
    with pytest.raises(NoSiteHereError):
        site_of_this_host()
    conf.unlink()
    with pytest.raises(NoSiteHereError):
        site_of_this_host()
    (folder / "third.yaml").write_text(SLURM + "cluster_names: ['(']\n")
    with pytest.raises(InputError, match="regular expression"):
        load_site("third")


def test_paths_that_are_no_files_are_errors(folder: Path) -> None:
    (folder / "directory.yaml").mkdir()
    (folder / "link.yaml").symlink_to("/nosuch/x.yaml")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    os.mkfifo(folder / "pipe.yaml")
    for name, message in (
        ("directory", "directory.yaml is a directory, not a site file"),
        (f"{folder}/directory.yaml", "directory.yaml is a directory, not a site file"),
        (f"{folder}/", "sites is a directory, not a site file"),
        ("link", "link.yaml is a link to /nosuch/x.yaml, which does not lead to a file"),
        ("loop", "loop.yaml is a link to loop.yaml, which does not lead to a file"),
        ("pipe", "pipe.yaml is not a regular file"),
        ("./nosuch.yaml", "there is no site file"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            load_site(name)


def test_a_name_that_is_almost_a_site_gets_a_hint(folder: Path) -> None:
    with pytest.raises(InputError, match=r"no site `min`\n  hint: did you mean mine\?"):
        load_site("min")
    (folder / "other.yml").write_text(SLURM)
    with pytest.raises(InputError, match=r"hint: rename .*other\.yml to other\.yaml"):
        load_site("other")


def test_a_queue_that_requires_an_account_is_refused_without_one(home: Path) -> None:
    queue = "max_nodes: 1, account: {required: true}}"
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1}", queue))
    assert "queue gpu of site s requires an `account`" in error_of(home, "gpus: 1\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "request: --partition={queue}\n",
            "`request` must be a list, as in ['--partition={queue}']",
        ),
        ("directives: --qos=a\n", "`directives` must be a list, as in [--qos=a]"),
        ("shell:\n", "s.yaml:7:1: `shell` must be a path, not nothing"),
    ],
)
def test_values_that_are_no_lists_are_refused_with_the_right_form(
    home: Path, text: str, message: str
) -> None:
    (home / "s.yaml").write_text(SLURM + text)
    with pytest.raises(InputError, match=re.escape(message)):
        load_site("./s.yaml")


def test_the_example_of_a_list_is_valid(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM + "request: \"-x '{queue}'\"\n")
    with pytest.raises(InputError) as caught:
        load_site("./s.yaml")
    example = re.search(r"as in (\[.*\])", str(caught.value))
    assert example
    (home / "s.yaml").write_text(SLURM + f"request: {example[1]}\n")
    assert load_site("./s.yaml").site.request == ("-x '{queue}'",)


@pytest.mark.parametrize("name", scheduler_names())
def test_commands_may_name_all_that_are_run(home: Path, name: str) -> None:
    """Also those of `queues`: each that a source of an inventory names."""
    scheduler = get_scheduler(name)
    if (kind := scheduler.inventory) is None:
        return
    used = set(re.findall(r'(?:ask\(|return )\["(\w+)"', inspect.getsource(kind))) - {"cat"}
    assert used and used | {*kind.version_command[:1]} <= all_commands(scheduler(None))
