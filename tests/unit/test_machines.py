"""Machines over ssh: what a site may say, and the command lines; tests/real has the real thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpujobs.clusters.freequeues import free_queues
from gpujobs.clusters.machines import on_machines, read_machines
from gpujobs.config.sitefiles import load_site
from gpujobs.config.spec import load_spec
from gpujobs.errors import InputError, UnavailableError
from gpujobs.injob.folder import EXIT_STOPPED
from gpujobs.injob.network import gpus_of_machines, job_nodes
from gpujobs.planning.plan import make_plan
from gpujobs.planning.render import render

from ..support.cli import text_of
from ..support.each import each
from ..support.processes import patience, until

SITE = {"description": "x", "scheduler": "local", "queues": {"local": {}}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with an `ssh` whose machines have two GPUs, of which those of ws2 are 1 and 3."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ssh"
    answers = {
        name: json.dumps(
            {"gpus": gpus, "cpus": 8, "memory": 64 * 2**30, "busy": {}, "gpu_memory": 2**34}
        )
        for name, gpus in {"ws1": ["0", "1"], "ws2": ["1", "3"]}.items()
    }
    cases = "\n".join(
        f"*' {name} '*) echo banner; echo '{text}';;" for name, text in answers.items()
    )
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$*" in {cases} esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@each("machines", [["-oProxyCommand=x"], ["ws1 -p 2"], ["a@ws1"], ["ws1;ls"], ["ws1\n"], [""], ["ws1", "ws1"], "ws1;x", ["$HOME"], ["{node}"]])  # fmt: skip
def test_a_name_that_is_not_that_of_one_machine_is_refused(
    machines: object, tmp_path: Path
) -> None:
    (tmp_path / "s.yaml").write_text(text_of({**SITE, "machines": machines}))
    with pytest.raises(InputError, match="machine"):
        load_site(str(tmp_path / "s.yaml"))


@each("more", [{"scheduler": "slurm"}, {"node_launcher": "ssh {node}"}])
def test_machines_beside_another_launcher_are_refused(
    more: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "s.yaml").write_text(text_of({**SITE, "machines": ["ws1"], **more}))
    with pytest.raises(InputError, match="machines"):
        load_site(str(tmp_path / "s.yaml"))


@each("answer", [{"gpus": 5}, {"gpus": "01"}, {"gpus": [["0"]]}, {"gpus": ["0", "0"]}, {"gpus": ["0,1"]}, {"gpus": ["$(id)"]}, {"gpus": ["\x1b[2J"]}, {"cpus": "8"}, {"cpus": -4}, {"memory": float("nan")}, {"memory": 0}, {"gpu_memory": -1}, {"busy": [1]}, {"busy": {"0": 1}}, {"more": 1}, None])  # fmt: skip
def test_a_wrong_answer_of_a_machine_is_refused_with_its_name(
    answer: dict[str, object] | None, home: Path
) -> None:
    good = {"gpus": ["0", "1"], "cpus": 8, "memory": 2**36, "busy": {}, "gpu_memory": 2**34}
    text = "[" * 10**5 if answer is None else json.dumps({**good, **answer})
    (home / "answer").write_text(f"banner\n{text}\n")
    (home / "bin" / "ssh").write_text(f"#!/bin/sh\ncat {home}/answer\n")
    with pytest.raises(UnavailableError, match="machine ws1 cannot be used: in its answer, "):
        read_machines(["ws1"], "python")


def test_a_machine_that_does_not_end_its_answer_is_refused(home: Path) -> None:
    (home / "bin" / "ssh").write_text("#!/bin/sh\nexec yes\n")
    with pytest.raises(UnavailableError, match="cannot be used: ssh wrote more than 1 MiB"):
        read_machines(["ws1"], "python")


def test_each_machine_gets_its_own_free_gpus_and_all_its_cpus(home: Path) -> None:
    (home / "s.yaml").write_text(text_of({**SITE, "machines": ["ws1", "ws2"]}))
    (home / "p.yaml").write_text("gpus: 4\nrun: [a]\n")
    spec, machine = on_machines(load_spec(home / "p.yaml", site=str(home / "s.yaml")))
    plan = make_plan(spec, python="python", machine=machine)
    assert plan.devices == ("ws1:0", "ws1:1", "ws2:1", "ws2:3")
    group = plan.groups[0]
    assert (group.shape.jobs, group.shape.nodes, group.shape.cpus) == (1, 2, 16)
    assert not plan.transport.listen_options(plan.site)  # not the loopback interface only
    (script,) = render(plan, "p-0000")
    assert "export GPUJOBS_MACHINES='ws1:0 ws1:1 ws2:1 ws2:3'" in script.text
    assert "CUDA_VISIBLE_DEVICES" not in script.text
    assert plan.layout.head_text(group.shape, False) == "on this machine; 2 machines started by ssh"
    calls = (home / "calls").read_text().splitlines()
    assert [call.partition(" -- ")[2].split()[0] for call in sorted(calls)] == ["ws1", "ws2"]


def test_one_machine_is_reached_by_ssh_too(home: Path) -> None:
    (home / "s.yaml").write_text(text_of({**SITE, "machines": ["ws2"]}))
    (home / "p.yaml").write_text("gpus: 1\nrun: [a]\n")
    spec, machine = on_machines(load_spec(home / "p.yaml", site=str(home / "s.yaml")))
    plan = make_plan(spec, python="python", machine=machine)
    assert plan.devices == ("ws2:1",)
    assert "--workers ssh -T" in render(plan, "p-0000")[0].text


@each(
    ("profile", "message"),
    [
        ("gpus: 3", "3 GPUs on 2 machines"),
        ("gpus: 0", "0 GPUs on 2 machines"),
        ("gpus: 6", "3 GPUs of each machine wanted; ws1 has 2 free GPUs"),
        ("layout: mpi", "machines are started by ssh, not by MPI"),
        ("workers: {gpus_per_worker: 4}", "ws1 has 2 free GPUs; a worker needs 4"),
    ],
)
def test_what_machines_cannot_have_is_refused(profile: str, message: str, home: Path) -> None:
    (home / "s.yaml").write_text(text_of({**SITE, "machines": ["ws1", "ws2"]}))
    (home / "p.yaml").write_text(f"{profile}\nrun: [a]\n")
    with pytest.raises(InputError, match=message):
        on_machines(load_spec(home / "p.yaml", site=str(home / "s.yaml")))


def test_containers_and_queues_of_machines_are_refused(home: Path) -> None:
    (home / "s.yaml").write_text(text_of({**SITE, "machines": ["ws1", "ws2"]}))
    container = "environment: {container: {runtime: podman, image: /x}}"
    (home / "p.yaml").write_text(f"run: [a]\n{container}\n")
    spec, machine = on_machines(load_spec(home / "p.yaml", site=str(home / "s.yaml")))
    with pytest.raises(InputError, match=r"ssh cannot start containers on several nodes$"):
        make_plan(spec, python="python", machine=machine)
    with pytest.raises(InputError, match="machines of this site have no queues"):
        free_queues(spec.site)


def test_the_nodes_of_a_job_on_machines_are_those_of_its_gpus() -> None:
    text = "ws1:0 ws2:MIG-7 ws1:1"
    assert gpus_of_machines(text) == {"ws1": ["0", "1"], "ws2": ["MIG-7"]}
    assert job_nodes({"GPUJOBS_MACHINES": text}) == ["ws1", "ws2"]


def test_a_node_exits_when_the_connection_of_ssh_has_ended(tmp_path: Path) -> None:
    """Nobody signals it, and it waits for a dask scheduler."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "logs").mkdir()
    own = {
        "GPUJOBS_FOLDER": str(tmp_path),
        "GPUJOBS_JOB": "0",
        "GPUJOBS_MACHINE": "ws1",
        "GPUJOBS_MACHINES": "ws1:2",
    }
    words = [
        sys.executable,
        "-m",
        "gpujobs.injob",
        "node",
        "--nodes=1",
        "--start-timeout=900",
        "--",
        "true",
    ]
    node = subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, **own})
    until((tmp_path / "jobs" / "0.node").exists, 20)
    time.sleep(0.5)
    assert node.poll() is None
    assert node.stdin
    node.stdin.close()
    assert node.wait(patience(40)) == EXIT_STOPPED
