"""The protocols of a plan, and why ucxx is not one of them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gpujobs.cli.plan_text import plan_json, plan_text
from gpujobs.clusters.connect import silence_ucx
from gpujobs.injob.names import UCX_WARNINGS
from gpujobs.planning.plan import Machine
from gpujobs.planning.protocols import SLOW_MEMORY
from gpujobs.planning.render import render

from ..support.cli import ROOT
from ..support.each import each
from .support import SLURM, error_of, made_plan

MANAGED = "workers: {rmm_managed_memory: true}\n"


@pytest.fixture
def fast(home: Path) -> Path:
    """A site that lists ucxx."""
    (home / "s.yaml").write_text(SLURM + "network: {protocols: [ucxx, tcp]}\n")
    return home


def test_ucxx_is_not_chosen_for_managed_memory(fast: Path) -> None:
    made = made_plan(fast, f"gpus: 4\n{MANAGED}")
    assert made.transport.protocols == ("tls",)
    (note,) = [note for note in made.notes if "ucxx" in note]
    assert note.startswith("ucxx is not used: with `rmm_managed_memory` it is slower than tcp")
    assert "8 to 16 s" in note and "0.07 s" in note


@pytest.mark.parametrize("slow", ["rmm_managed_memory: true", "rmm_async: true"])
def test_what_was_not_measured_is_named(fast: Path, slow: str) -> None:
    def reason(options: str) -> str:
        made = made_plan(fast, f"gpus: 4\nworkers: {{{slow}{options}}}\n")
        (note,) = [note for note in made.notes if note.startswith("ucxx is not used: ")]
        return note

    assert "not measured" not in reason("")
    end = "; not measured together with "
    end += "`rmm_pool_size`, " if "async" in slow else ""
    end += "`rmm_track_allocations`"
    assert reason(", rmm_pool_size: 0.5, rmm_track_allocations: true") == f"{reason('')}{end}"
    measured = "rmm_release_threshold" if "async" in slow else "rmm_pool_size"
    assert reason(f", {measured}: 0.5") == reason("")


def test_the_reasons_have_the_measured_numbers() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    numbers = [
        number
        for text in SLOW_MEMORY.values()
        for number in re.findall(r"(?<!than )\b(\d[\d.]*(?: to [\d.]+)?) (?:s|GB/s)\b", text)
    ]
    assert {"8 to 16", "0.44"} < set(numbers)
    assert [number for number in numbers if not re.search(rf"(?<![\d.]){number}\b", page)] == []


@pytest.mark.parametrize("workers", ["", "workers: {rmm_managed_memory: false}\n"])
def test_ucxx_is_chosen_otherwise(fast: Path, workers: str) -> None:
    made = made_plan(fast, f"gpus: 4\n{workers}")
    assert made.transport.protocols == ("ucxx", "tls")
    assert not any("managed" in note for note in made.notes)


def test_explicit_ucxx_is_taken_with_a_warning(fast: Path) -> None:
    made = made_plan(fast, f"gpus: 4\nnetwork: {{protocol: ucxx}}\n{MANAGED}")
    assert made.transport.protocols == ("ucxx",)
    assert any("warning: " in note and "8 to 16 s" in note for note in made.notes)


def test_a_site_with_only_ucxx_gets_tls_for_managed_memory(fast: Path) -> None:
    (fast / "s.yaml").write_text(SLURM + "network: {protocols: [ucxx]}\n")
    assert made_plan(fast, f"gpus: 4\n{MANAGED}").transport.protocols == ("tls",)


def test_where_ucxx_is_not_possible_no_note_mentions_it(home: Path) -> None:
    made = made_plan(home, f"gpus: 4\n{MANAGED}")
    assert not any("ucxx" in note for note in made.notes)


# -- this machine --------------------------------------------------------------------------------------------------------
DGX = Machine(gpus=("0", "1", "2", "3"), cpus=8, memory=32 * 2**30, busy={}, nvlink=4)
UCXX = "network: {protocol: ucxx}\n"


def test_ucxx_on_this_machine_needs_no_site_file(home: Path) -> None:
    made = made_plan(home, f"gpus: 4\n{UCXX}", "local", DGX)
    assert made.transport.protocols == ("ucxx",)
    assert made.transport.interface == "lo"
    assert any(note.startswith("not encrypted") for note in made.notes)
    (script,) = render(made, "x-0000")
    assert 'UCX_NET_DEVICES="${UCX_NET_DEVICES:-lo}"' in script.text
    assert script.text.count("--interface=lo") == 3  # supervisor, dask scheduler, workers
    assert "--host" not in script.text


def test_a_local_site_that_lists_protocols_decides(home: Path) -> None:
    text = "description: x\nscheduler: local\nqueues: {local: {}}\nnetwork: {protocols: [tcp]}\n"
    (home / "own.yaml").write_text(text)
    assert "the site does not list it" in error_of(home, f"gpus: 2\n{UCXX}", "own.yaml", DGX)


def test_ucxx_elsewhere_needs_the_site(home: Path) -> None:
    assert "the site does not list it" in error_of(home, f"gpus: 2\n{UCXX}")


def test_ones_own_interface_is_not_confined(home: Path) -> None:
    profile = "gpus: 4\nnetwork: {protocol: ucxx, interface: eth0}\n"
    made = made_plan(home, profile, "local", DGX)
    assert (made.transport.interface, made.transport.loopback) == ("eth0", "")


@pytest.mark.parametrize(
    ("profile", "linked"),
    [
        ("gpus: 4\n", 4),
        ("gpus: 2\n", 2),
        ("gpus: 1\n", 0),
        ("gpus: 0\n", 0),
        (f"gpus: 4\n{UCXX}", 0),
        ("gpus: 4\nnetwork: {protocol: tcp}\n", 0),
        (f"gpus: 4\n{MANAGED}", 0),
    ],
)
def test_auto_is_encrypted_and_says_what_it_leaves_unused(
    home: Path, profile: str, linked: int
) -> None:
    made = made_plan(home, profile, "local", DGX)
    notes = [note for note in made.notes if "NVLink" in note]
    expected = (
        f"NVLink between {linked} GPUs is left unused: dask uses tls; "
        "`protocol: ucxx` uses it, not encrypted"
    )
    assert notes == ([expected] if linked else [])
    assert made.transport.encrypted or UCXX in profile


@pytest.mark.parametrize(("encryption", "noted"), [("false", True), ("true", False)])
def test_ws_listens_on_all_interfaces(home: Path, encryption: str, noted: bool) -> None:
    """Dask gives Tornado the port only; with TLS, a certificate is required there."""
    profile = f"gpus: 1\nnetwork: {{protocol: ws, encryption: {encryption}}}\n"
    text = "ws accepts connections on all interfaces"
    assert (text in " ".join(made_plan(home, profile).notes)) is noted
    here = made_plan(home, profile.replace("gpus: 1", "gpus: 0"), "local")
    assert text not in " ".join(here.notes) and here.transport.loopback == "lo"


def test_clients_of_ucxx_have_no_warning_of_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UCX_WARNINGS, raising=False)
    silence_ucx("tls")
    assert UCX_WARNINGS not in os.environ
    silence_ucx("tls", "ucxx")
    assert os.environ[UCX_WARNINGS] == "n"
    monkeypatch.setenv(UCX_WARNINGS, "y")
    silence_ucx("ucxx")
    assert os.environ[UCX_WARNINGS] == "y"


@pytest.mark.parametrize(
    ("profile", "single"),
    [
        ("gpus: 4\ngpus_per_job: 4\n", False),  # `gpujobs scale` may add jobs
        ("gpus: 4\ngpus_per_job: 1\n", False),
        ("gpus: 4\ngpus_per_job: 4\nrequeue: 2\nrun: [svd]\n", True),
        ("gpus: 4\ngpus_per_job: 2\nrequeue: 2\nrun: [svd]\n", False),
        ("gpus: 4\nlayout: mpi\n", True),
        ("gpus: 4\nlayout: mpi\nnetwork: {protocol: tcp}\n", False),  # it does not matter
    ],
)
def test_only_a_cluster_that_never_has_another_job_is_started_as_a_single_one(
    fast: Path, profile: str, single: bool
) -> None:
    scripts = render(made_plan(fast, profile), "x-0000")
    assert {"--single-job" in script.text for script in scripts} == {single}


@each(
    ("profile", "site", "noted"),
    [
        ("gpus: 4\ngpus_per_job: 2\n", "s.yaml", True),
        ("gpus: 2\ngpus_per_job: 1\nnetwork: {protocol: ucxx}\n", "s.yaml", True),
        ("groups: {a: {gpus: 4, gpus_per_job: 4}, b: {gpus: 1}}\n", "s.yaml", True),
        ("gpus: 2\ngpus_per_job: 2\n", "s.yaml", False),  # one job
        ("gpus: 8\ngpus_per_job: 4\n", "s.yaml", False),  # whole nodes
        ("gpus: 4\ngpus_per_job: 2\nnetwork: {protocol: tcp}\n", "s.yaml", False),
        (f"gpus: 4\ngpus_per_job: 2\n{MANAGED}", "s.yaml", False),
        ("gpus: 4\nlayout: mpi\n", "s.yaml", False),
        (f"gpus: 4\ngpus_per_job: 2\n{UCXX}", "local", False),  # nothing is isolated
    ],
)
def test_a_plan_cannot_know_the_isolation(fast: Path, profile: str, site: str, noted: bool) -> None:
    made = made_plan(fast, profile, site, DGX)
    text, found = plan_text(made, "x-0000"), plan_json(made, "x-0000")["notes"]
    assert text.count("note: over ucxx, the rate between two jobs on a node depends on") == noted
    assert isinstance(found, list)
    assert sum("isolates the GPUs" in note for note in found) == noted


# -- network of a queue ------------------------------------------------------------------------------------------------------
NODE = "gpus_per_node: 4, cpus_per_node: 64, memory_per_node: 480GiB"
QUEUES = f"""\
description: test
scheduler: slurm
network: {{interface: ib0, protocols: [ucxx, tcp], ports: 8000-8100}}
queues:
  a: {{{NODE}}}
  b: {{{NODE}, network: {{interface: hsn0, ports: 9000-9100}}}}
  c: {{{NODE}, network: {{protocols: [tcp], encryption: required}}}}
  d: {{{NODE}, network: {{protocols: [ws]}}}}
defaults: {{walltime: 1h}}
"""


@pytest.fixture
def queues(home: Path) -> Path:
    """A site whose queues have networks of their own."""
    (home / "s.yaml").write_text(QUEUES)
    return home


def test_a_queue_overrides_single_keys_of_the_network(queues: Path) -> None:
    made = made_plan(queues, "gpus: 4\nqueue: b\n")
    assert made.transport.protocols == ("ucxx", "tls") and made.transport.interface == "hsn0"
    (script,) = render(made, "x-0000")
    assert script.text.count("--interface=hsn0") == 3 and "ib0" not in script.text
    assert "export GPUJOBS_PORTS=9000-9100" in script.text and "8000" not in script.text
    assert "interface: hsn0\n" in plan_text(made, "x-0000")


def test_each_group_has_the_interface_of_its_queue(queues: Path) -> None:
    made = made_plan(queues, "groups: {x: {gpus: 4, queue: a}, y: {gpus: 4, queue: b}}\n")
    first, second = (script.text for script in render(made, "x-0000"))
    assert first.count("--interface=ib0") == 3 and "hsn0" not in first
    assert second.count("--interface=hsn0") == 3 and "ib0" not in second
    assert "interface: ib0, hsn0\n" in plan_text(made, "x-0000")
    assert made.transport.interface == "ib0"  # of a dask scheduler outside of the jobs


def test_the_interface_of_the_profile_has_priority(queues: Path) -> None:
    made = made_plan(queues, "gpus: 4\nqueue: b\nnetwork: {interface: eth0}\n")
    assert render(made, "x-0000")[0].text.count("--interface=eth0") == 3


def test_a_cluster_has_the_protocols_that_all_its_queues_allow(queues: Path) -> None:
    groups = "groups: {{x: {{gpus: 4, queue: a}}, y: {{gpus: 4, queue: {0}}}}}\n"
    made = made_plan(queues, groups.format("c"))
    assert made.transport.protocols == ("tls",) and made.transport.encryption_required
    message = error_of(queues, groups.format("d"))
    assert "the queues of the cluster allow no common protocol (a: ucxx, tcp; d: ws)" in message


def test_a_queue_requires_encryption(queues: Path) -> None:
    unencrypted = "gpus: 4\nnetwork: {encryption: false}\n"
    assert made_plan(queues, f"{unencrypted}queue: a\n").transport.protocols == ("ucxx", "tcp")
    message = error_of(queues, f"{unencrypted}queue: c\n")
    assert "site s requires encryption between its nodes" in message and "s.yaml:7:" in message
    message = error_of(queues, "gpus: 4\nqueue: c\nnetwork: {protocol: ucxx}\n")
    assert "ucxx is not encrypted: site s requires encryption" in message


def test_the_keys_of_a_queue_must_agree_with_those_of_the_site(home: Path) -> None:
    (home / "s.yaml").write_text(QUEUES.replace("protocols: [tcp], ", ""))
    message = error_of(home, "gpus: 4\n")
    assert "`queues.c.network` has `encryption: required`, but ucxx has no encryption" in message


def test_too_few_ports_of_a_queue_are_refused(home: Path) -> None:
    (home / "s.yaml").write_text(QUEUES.replace("9000-9100", "9000-9003"))
    message = error_of(home, "gpus: 4\nqueue: b\n")
    assert "s.yaml:6:" in message and "`network.ports` has 4" in message
