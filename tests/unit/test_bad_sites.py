"""Invalid site files, and profiles that contradict their site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpujobs.config.sitefiles import load_site
from gpujobs.config.spec import load_spec
from gpujobs.errors import InputError
from gpujobs.planning.plan import Machine

from .support import SLURM, error_of, made_plan, make_spec


@pytest.mark.parametrize(
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
    ],
)  # fmt: skip
def test_site_files(home: Path, change: tuple[str, str], message: str) -> None:
    (home / "s.yaml").write_text(SLURM.replace(*change))
    with pytest.raises(InputError) as caught:
        load_site(str(home / "s.yaml"))
    assert message in str(caught.value)


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
    assert made_plan(home, "gpus: 4\n").workers.lines == ("--nodes=1",)


def test_required_account(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("required: false", "required: true"))
    message = error_of(home, "gpus: 1\n")
    assert "requires an `account`" in message and "s.yaml:3" in message
    message = error_of(home, "gpus: 1\naccount: ABC\n")
    assert "svd.yaml:2:10" in message and "does not match the site's pattern [a-z0-9]+" in message


def test_account_is_ignored_if_the_site_has_none(home: Path) -> None:
    (home / "s.yaml").write_text(re.sub("account: .*", "account:", SLURM))
    found = made_plan(home, "gpus: 1\naccount: abc\n")
    assert not any("abc" in line for line in found.workers.lines)
    assert any("account abc is ignored" in note for note in found.notes)


def test_gpus_auto_needs_the_local_site(home: Path) -> None:
    assert "for the local site" in error_of(home, "gpus: auto\n")


def test_local_machine_has_too_few_gpus(home: Path) -> None:
    machine = Machine(gpus=("1",), cpus=8, memory=2**34, busy={"0": "process 4242"})
    message = error_of(home, "gpus: 2\n", "local", machine)
    assert "2 GPUs wanted, 1 free on this machine; GPU 0 is used by process 4242" in message
    assert "no directives" in error_of(home, "gpus: 0\ndirectives: [--x]\n", "local", machine)


def test_groups_are_not_supported_yet(home: Path) -> None:
    assert "`groups` is not supported yet" in error_of(home, {"groups": {"a": {"gpus": 1}}})


def test_no_such_site(home: Path) -> None:
    with pytest.raises(InputError, match=r"there is no site `nosuch`; known: .*local"):
        make_spec(home, "gpus: 1\n", "nosuch")
    (home / "svd.yaml").write_text("site: nosuch\n")
    with pytest.raises(InputError, match=r"svd\.yaml:1:7: there is no site"):
        load_spec(home / "svd.yaml")


@pytest.mark.parametrize(
    "setting", ["gpus", "=8", "gpus=8=9", "workers.memory=16", "a b=1", "gpus=[1"]
)
def test_settings(home: Path, setting: str) -> None:
    (home / "svd.yaml").write_text("gpus: 1\n")
    with pytest.raises(InputError, match="--set"):
        load_spec(home / "svd.yaml", site="local", settings=(setting,))


def test_an_unset_variable_in_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert line in found.workers.lines


@pytest.mark.parametrize("scheduler", ["lsf", "sge"])
def test_other_cluster_that_cannot_be_reached(home: Path, scheduler: str) -> None:
    text = SLURM.replace("scheduler: slurm", f"scheduler: {scheduler}\ncluster: other")
    (home / "s.yaml").write_text(text)
    message = error_of(home, "gpus: 1\n")
    assert f"cannot have `cluster`: {scheduler} does not support it" in message
