"""What files may cause that the user has not chosen: see "Files of others" in docs/security.md."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpujobs.clusters.ledger import Ledger
from gpujobs.clusters.remote import Request
from gpujobs.clusters.submit import files_of_folder
from gpujobs.config.sitefiles import load_site
from gpujobs.config.spec import load_spec, settings_document
from gpujobs.config.trust import ACTS
from gpujobs.errors import InputError, NoSuchClusterError

from ..support.cli import text_of

COMMAND = str(Path(sys.executable).parent / "gpujobs")
PROFILE = {"gpus": 1, "walltime": "10m", "run": ["true"], "site": "./machine.yaml"}
NAMES = ("sbatch", "squeue", "sacct", "scancel", "sinfo", "scontrol")
Run = Callable[..., subprocess.CompletedProcess[str]]


def program(path: Path, marks: Path) -> str:
    """Write a program that leaves its name in ``marks``; Slurm's answers that it is not configured."""
    answer = "echo 7" if path.name == "sbatch" else ""
    if path.name in NAMES[1:]:
        answer = "echo fatal: Could not establish a configuration source >&2; exit 1"
    path.write_text(f"#!/bin/sh\n: > {marks}/{path.name}\n{answer}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


@pytest.fixture
def received(tmp_path: Path, marks: Path) -> Path:
    """A folder of somebody else: a profile, and a site file whose programs leave marks."""
    folder = tmp_path / "received"
    folder.mkdir()
    site = {
        "description": "x",
        "scheduler": "slurm",
        "directory": str(tmp_path / "clusters"),
        "hosts": ["attacker.example.org"],
        "quota_command": [program(folder / "quota", marks)],
        "commands": {name: program(folder / name, marks) for name in NAMES},
        "queues": {"gpu": {"gpus_per_node": 4, "cpus_per_node": 8, "memory_per_node": "64GiB"}},
    }
    (folder / "machine.yaml").write_text(text_of(site))
    (folder / "profile.yaml").write_text(text_of(PROFILE))
    (folder / "numpy.py").write_text(f"open({str(marks / 'module')!r}, 'w')\n")
    return folder


@pytest.fixture
def run(tmp_path: Path, marks: Path) -> Run:
    """Run gpujobs in the received folder; a call of ssh leaves a mark."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program(programs / "ssh", marks)

    def call(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        own = {"HOME": str(tmp_path), "PATH": f"{programs}:/usr/bin:/bin", "LANG": "C.UTF-8"}
        folder = tmp_path / "received"
        return subprocess.run(
            [COMMAND, *words], env={**own, **env}, cwd=folder, capture_output=True, text=True, check=False
        )  # fmt: skip

    return call


def left(marks: Path) -> set[str]:
    """Return which programs have run, and forget them."""
    found = list(marks.iterdir())
    for path in found:
        path.unlink()
    return {path.name for path in found}


# -- a site file that only a profile names ---------------------------------------------------------
def test_a_received_folder_runs_nothing(received: Path, run: Run, marks: Path) -> None:
    for words in (
        ["plan", "profile.yaml"],
        ["plan", "profile.yaml", "--soonest"],
        ["plan", "profile.yaml", "--estimate"],
        ["render", "profile.yaml"],
        ["render", "profile.yaml", "-o", "folder"],
        ["submit", "profile.yaml"],
        ["status"],
    ):
        done = run(*words)
        assert left(marks) == set(), words
        assert "Traceback" not in done.stderr
    planned = run("plan", "profile.yaml")
    assert planned.returncode == 0
    assert "the site file is machine.yaml, which only the profile" in planned.stdout
    assert "not used: `commands`, `hosts`, `quota_command`" in planned.stdout


def test_submit_names_the_file_and_the_cure(received: Path, run: Run, marks: Path) -> None:
    done = run("submit", "profile.yaml")
    assert done.returncode == 2
    assert "machine.yaml has `commands`, `hosts`, `quota_command`" in done.stderr
    assert "--site machine.yaml" in done.stderr
    assert not (received.parent / "clusters").exists()


def test_python_refuses_a_received_site_too(
    received: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(received)
    from gpujobs import GPUJobQueueCluster, submit

    with pytest.raises(InputError, match="only the profile names it"):
        submit("profile.yaml")
    with pytest.raises(InputError, match="only the profile names it"):
        GPUJobQueueCluster.from_profile("profile.yaml")


def test_the_user_may_name_it(received: Path, run: Run, marks: Path) -> None:
    assert run("plan", "profile.yaml", "--site", "./machine.yaml", GPUJOBS_HOST="").returncode == 0
    assert left(marks) == {"quota"}
    assert (
        run("plan", "profile.yaml", "--set", "site=./machine.yaml", GPUJOBS_HOST="").returncode == 0
    )
    assert left(marks) == {"quota"}
    run("submit", "profile.yaml", "--site", "./machine.yaml", GPUJOBS_HOST="")
    assert "sbatch" in left(marks)


def test_a_site_with_nothing_that_acts_is_submitted_and_named(received: Path, run: Run) -> None:
    site = json.loads((received / "machine.yaml").read_text())
    for key in set(ACTS) - {"machines"}:  # which only a site of this machine has
        del site[key]
    (received / "machine.yaml").write_text(text_of(site))
    done = run("submit", "profile.yaml")  # there is no sbatch on PATH
    assert done.returncode != 0 and "sbatch" in done.stderr
    assert "the site file is machine.yaml, which only the profile" in done.stderr


def test_a_file_that_a_received_one_extends_runs_nothing(
    received: Path, run: Run, marks: Path
) -> None:
    (received / "base.yaml").write_text((received / "machine.yaml").read_text())
    (received / "machine.yaml").write_text("extends: ./base.yaml\n")
    assert run("plan", "profile.yaml").returncode == 0
    assert left(marks) == set()


def test_commands_of_the_users_own_site_stay(received: Path, run: Run, marks: Path) -> None:
    """The received file only extends a site that the user has on the search path."""
    own = received.parent / "sites"
    own.mkdir(mode=0o755)
    site = json.loads((received / "machine.yaml").read_text())
    del site["hosts"]
    (own / "mine.yaml").write_text(text_of(site))
    (received / "machine.yaml").write_text("extends: mine\n")
    assert run("plan", "profile.yaml", GPUJOBS_SITE_PATH=str(own)).returncode == 0
    assert left(marks) == {"quota"}


def test_a_job_folder_does_not_launder_it(received: Path, run: Run, marks: Path) -> None:
    assert run("render", "profile.yaml", "-o", "folder").returncode == 0
    for words in (["submit", "folder"], ["status", "folder"], ["cancel", "folder"]):
        run(*words)
        assert left(marks) == set(), words


def test_commands_of_a_received_job_folder_are_not_run(
    received: Path, run: Run, marks: Path
) -> None:
    """Its record may have been written by hand. Commands of a site that the user has are used."""
    own = received.parent / "sites"
    own.mkdir(mode=0o755)
    site = json.loads((received / "machine.yaml").read_text())
    del site["hosts"], site["quota_command"]
    (own / "mine.yaml").write_text(text_of(site))
    made = run(
        "render", "profile.yaml", "--site", "mine", "-o", "folder", GPUJOBS_SITE_PATH=str(own)
    )
    assert made.returncode == 0, made.stderr
    run("submit", "folder", GPUJOBS_SITE_PATH=str(own))
    assert "squeue" in left(marks)
    other = run("status", "folder")
    assert left(marks) == set()
    assert "its `commands` are not those of a site mine" in other.stderr
    (record,) = (received / "folder").glob("*/record.json")
    value = json.loads(record.read_text())
    (received / "mine.yaml").write_text((own / "mine.yaml").read_text())
    record.write_text(json.dumps({**value, "site": "mine.yaml"}))  # a path in the working directory
    run("status", "folder")
    assert left(marks) == set()


# -- every key of a site has a place -----------------------------------------------------------------
IN_JOBS_OR_NOTHING = {
    "account", "cluster", "cluster_names", "contact", "containers", "cpu_request", "defaults", "description",
    "directives", "directory", "environment", "environment_variables", "environments", "environments_only", "extends",
    "hostnames", "layouts", "maintainers", "max_array_size", "max_idle_timeout", "max_queued_jobs", "mpi",
    "multi_node_request", "network", "node_launcher", "notes", "options", "poll", "queue_defaults", "queues",
    "request", "run_launcher", "scheduler", "scratch", "setup", "shell", "source", "submit_arguments",
    "visible_devices", "workers_launcher",
}  # fmt: skip
"""Keys of a site that gpujobs reads, or writes into scripts and their command line; it runs none of them itself."""


def test_every_key_of_a_site_has_a_place() -> None:
    """A new key that runs a command belongs to `ACTS`."""
    from gpujobs.config.model import key_names
    from gpujobs.config.site import Site

    names = {name.partition(".")[0] for name in key_names(Site)}
    assert names - set(ACTS) == IN_JOBS_OR_NOTHING


# -- files that travel to a login node -----------------------------------------------------------------
def test_only_the_files_of_a_site_travel(received: Path) -> None:
    secret = received.parent / "id_rsa"
    secret.write_text("SECRET")
    (received / "notes.yaml").symlink_to(secret)
    (received / ".#machine.yaml").symlink_to("nowhere")  # of an editor
    (received / "other.yaml").write_text("x: 1\n")
    (received / "base.yaml").write_text((received / "machine.yaml").read_text())
    (received / "machine.yaml").write_text("extends: ./base.yaml\n")
    templates = received / "templates"
    templates.mkdir()
    (templates / "slurm.sh.j2").write_text("{% extends 'gpujobs/slurm.sh.j2' %}\n")
    (templates / "key.j2").symlink_to(secret)
    request = Request(["plan"])
    request.add_site(load_site(str(received / "machine.yaml")))
    assert set(request.files) == {
        "sites/machine.yaml",
        "sites/base.yaml",
        "sites/templates/slurm.sh.j2",
    }
    assert b"SECRET" not in request.message()


def test_a_login_node_does_not_get_the_keys_that_act(received: Path) -> None:
    """There, the file is found by its name. The folder's name and a scalar try to write a key again."""
    folder = received.parent / "x\nquota_command: [sh]\n#"
    received.rename(folder)
    whole = (folder / "machine.yaml").read_text()
    lines = '"description": x, "setup": true;\n\n true'
    (folder / "base.yaml").write_text(whole.replace('"description": "x"', lines))
    (folder / "machine.yaml").write_text("extends: ./base.yaml\nhosts: [attacker]\n")
    request = Request(["plan"])
    request.add_site(load_site("./machine.yaml", folder, by_profile=True))
    names = {"sites/machine.yaml", "sites/base.yaml"}
    assert set(request.files) == names
    there = received.parent / "there"
    there.mkdir()
    for name in names:
        content = request.files[name]
        assert isinstance(content, bytes)
        (there / Path(name).name).write_bytes(content)
    site = load_site(str(there / "machine.yaml")).site
    assert site.setup.split() == ["true;", "true"] and set(site.queues) == {"gpu"}
    assert not site.commands and not site.hosts and not site.quota_command


def test_a_submission_on_a_login_node_is_refused_here(
    received: Path, run: Run, marks: Path
) -> None:
    done = run("--host", "login", "submit", "profile.yaml")
    assert done.returncode == 2 and "--site machine.yaml" in done.stderr
    assert left(marks) == set()
    run("--host", "login", "submit", "profile.yaml", "--site", "./machine.yaml")
    assert left(marks) == {"ssh"}


def test_only_a_job_folder_is_uploaded(received: Path, run: Run, marks: Path) -> None:
    (received / ".ssh").mkdir()
    (received / ".ssh" / "id_rsa").write_text("SECRET")
    done = run("--host", "login", "submit", ".")
    assert done.returncode == 4 and "is not a job folder" in done.stderr
    assert left(marks) == set()


def test_a_job_folder_sends_its_own_files(received: Path, run: Run) -> None:
    assert run("render", "profile.yaml", "-o", "folder").returncode == 0
    folder = received / "folder"
    (folder / "id_rsa").write_text("SECRET")
    (folder / "link").symlink_to("/etc/passwd")
    names = set(files_of_folder(folder))
    assert {"plan.json", "README.md", "profile.sh"} <= names
    assert not {"id_rsa", "link"} & names
    (record,) = folder.glob("*/record.json")
    value = json.loads(record.read_text())
    value["planned"][0]["script"] = "../../id_rsa"
    record.write_text(json.dumps(value))
    with pytest.raises(InputError, match="is not a file of the job folder"):
        files_of_folder(folder)
    with pytest.raises(NoSuchClusterError):
        files_of_folder(received)


# -- files of the user ----------------------------------------------------------------------------------
def test_files_of_a_job_folder_are_private_whatever_the_umask_is(received: Path, run: Run) -> None:
    before = os.umask(0)
    try:
        assert run("render", "profile.yaml", "-o", "folder").returncode == 0
    finally:
        os.umask(before)
    open_to_others = [
        path for path in (received / "folder").rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077
    ]  # fmt: skip
    assert open_to_others == []


def test_a_bare_start_of_a_folder_that_others_can_write_is_refused(
    received: Path, run: Run
) -> None:
    assert run("render", "profile.yaml", "-o", "folder").returncode == 0
    folder = received / "folder"
    folder.chmod(0o777)
    env = {**os.environ, "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", folder / "profile.sh"], cwd=folder, env=env, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 78
    assert f"others can write {folder}" in (folder / "refused.log").read_text()


def test_rules_that_a_users_file_overrides_are_named(tmp_path: Path) -> None:
    sites = tmp_path / "sites"
    sites.mkdir(mode=0o755)
    queues = "queues: {gpu: {gpus_per_node: 4}}\nnetwork: {encryption: required}\n"
    (sites / "strict.yaml").write_text(f"description: x\nscheduler: slurm\n{queues}")
    (sites / "mine.yaml").write_text("extends: ./strict.yaml\nnetwork: {encryption: optional}\n")
    found = load_site(str(sites / "mine.yaml"))
    assert re.fullmatch(
        rf"{sites}/mine.yaml:2:\d+ overrides `encryption: required` of {sites}/strict.yaml",
        found.loosened,
    )
    assert load_site(str(sites / "strict.yaml")).loosened == ""


def test_a_setting_and_a_keyword_are_the_users_words(received: Path) -> None:
    set_ = settings_document((f"site={received}/machine.yaml",))
    assert not load_spec(received / "profile.yaml", settings=set_).site.received
    assert load_spec(received / "profile.yaml").site.received


def test_the_ledger_knows_no_folder_of_others(received: Path) -> None:
    with pytest.raises(NoSuchClusterError):
        Ledger(received / "state").get(f"{received}/")


# -- files of others that are no files, or far too much ------------------------------------------------
HUGE = 2**31


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def deep(folder: Path, number: int) -> None:
    """Let the site file extend one that extends one …, and so on."""
    for one in range(number):
        (folder / f"e{one}.yaml").write_text(f"extends: ./e{one + 1}.yaml\n")
    (folder / f"e{number}.yaml").write_text((folder / "machine.yaml").read_text())
    (folder / "machine.yaml").write_text("extends: ./e0.yaml\n")


def alike(folder: Path, number: int) -> None:
    """Let a queue be like one that is like one …, and so on."""
    queues: dict[str, object] = {f"q{one}": {"like": f"q{one + 1}"} for one in range(number)}
    site = json.loads((folder / "machine.yaml").read_text())
    queues[f"q{number}"] = site["queues"]["gpu"]
    (folder / "machine.yaml").write_text(text_of({**site, "queues": queues}))


def template(folder: Path, text: bytes | None) -> None:
    """Write the site's template; None: 2 GiB of nothing."""
    path = folder / "templates" / "slurm.sh.j2"
    path.parent.mkdir()
    if text is None:
        sparse(path)
    else:
        path.write_bytes(text)


def key(name: str, value: str) -> Callable[[Path], None]:
    """Return what adds a key to the site file."""

    def change(folder: Path) -> None:
        site = json.loads((folder / "machine.yaml").read_text())
        (folder / "machine.yaml").write_text(text_of({**site, name: value}))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: sparse(folder / "profile.yaml"), "profile.yaml: larger than 256 KiB"),
        (lambda folder: sparse(folder / "machine.yaml"), "machine.yaml: larger than 256 KiB"),
        (lambda folder: deep(folder, 1500), "`extends` leads through more than 20 files"),
        (lambda folder: alike(folder, 4000), "`like` leads through more than 20 queues"),
        (lambda folder: template(folder, None), "slurm.sh.j2: larger than 256 KiB; not a template"),
        (lambda folder: template(folder, b"\xff"), "slurm.sh.j2: not UTF-8 text"),
        (lambda folder: template(folder, b"{% include 'slurm.sh.j2' %}"), "it includes itself"),
        (lambda folder: template(folder, b"{{ %s1%s }}" % (b"(" * 5000, b")" * 5000)), "too deeply nested"),
        (lambda folder: template(folder, b"{{ ''.__class__.__mro__ }}"), "is unsafe"),
        (key("extends", "~nosuchuser/x.yaml"), "there is no site file ~nosuchuser/x.yaml"),
        (key("extends", "x" * 300 + ".yaml"), "File name too long"),
        (key("extends", "./pipe.yaml"), "pipe.yaml is not a regular file"),
        (key("directory", "~nosuchuser/x"), "there is no such user here"),
        (key("description", "\x1b]0;x\x07"), "has a control character"),
    ],
)  # fmt: skip
def test_a_received_file_that_is_none_is_an_error_of_one_place(
    received: Path, change: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpujobs.cli.main import main

    os.mkfifo(received / "pipe.yaml")
    change(received)
    monkeypatch.chdir(received)
    tracemalloc.start()
    done = CliRunner().invoke(main, ["render", "profile.yaml"])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.output
    assert message in done.output and "\x1b" not in done.output
    assert tracemalloc.get_traced_memory()[1] < 2**27
    tracemalloc.stop()


def test_a_name_in_a_received_record_is_one_line(received: Path, run: Run) -> None:
    assert run("render", "profile.yaml", "-o", "folder").returncode == 0
    (record,) = (received / "folder").glob("*/record.json")
    value = json.loads(record.read_text())
    record.write_text(json.dumps({**value, "site": "here\nerror: submit it with --site"}))
    done = run("status", "folder")
    assert done.returncode and "a name has several lines" in done.stderr
    assert "\nerror: submit it" not in done.stdout + done.stderr
