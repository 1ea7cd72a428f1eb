"""Each cell of the table "Files of others" in docs/security.md: what a file may cause."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpujobs.cli.laptop import make_request
from gpujobs.cli.main import main
from gpujobs.clusters import remote
from gpujobs.errors import UnavailableError

from ..support.cli import ROOT, text_of

COLUMNS = ("Is read", "Runs a command", "Opens a connection", "Is sent", "Is written")
PROGRAM = """
import os, sys
from pathlib import Path
folder, log = Path(sys.argv.pop(1)), open(sys.argv.pop(1), "a")
def note(event, words):
    if event == "open" and isinstance(words[0], (str, os.PathLike)):
        path = Path(os.path.abspath(words[0]))
        if path.is_relative_to(folder):
            print(path.relative_to(folder), file=log, flush=True)
from gpujobs.cli.main import main
sys.addaudithook(note)
main()
"""
"""The command, which notes the files in a folder that it opens."""
SLURM = ("sbatch", "squeue", "sacct", "scancel", "sinfo", "scontrol")
BASE = {
    "description": "x",
    "scheduler": "slurm",
    "queues": {"gpu": {"gpus_per_node": 4, "cpus_per_node": 8, "memory_per_node": "64GiB"}},
}
MACHINES = {
    "description": "x", "scheduler": "local", "machines": ["attacker"], "queues": {"local": {}},
}  # fmt: skip
PROFILE = {"gpus": 1, "walltime": "10m", "run": ["true"]}


@dataclass
class Seen:
    """What happened because of the files in a folder."""

    read: set[str] = field(default_factory=set)
    """Files, of the folder."""
    ran: set[str] = field(default_factory=set)
    """Programs that were started."""
    sent: set[str] = field(default_factory=set)
    """Files, by the names that a login node gets."""
    written: set[str] = field(default_factory=set)
    """Files of the folder that are new, changed or gone."""
    refused: set[str] = field(default_factory=set)
    """Commands that failed."""


class Folder:
    """A folder with a site file, its base, its template, and files beside them; a user in it."""

    def __init__(self, home: Path) -> None:
        self.home, self.path, self.marks = home, home / "folder", home / "marks"
        for folder in (self.path / "templates", self.marks, home / "bin"):
            folder.mkdir(parents=True)
        (home / "id_rsa").write_text("SECRET")
        self.program(home / "bin" / "ssh")
        site = {
            "extends": "./base.yaml",
            "directory": str(home / "clusters"),
            "hosts": ["login.example.org"],
            "quota_command": [self.program(self.path / "quota")],
            "commands": {name: self.program(self.path / name) for name in SLURM},
        }
        self.write("base.yaml", text_of(BASE))
        self.write("machine.yaml", text_of(site))
        self.write("templates/slurm.sh.j2", "{% extends 'gpujobs/slurm.sh.j2' %}\n")
        self.write("other.yaml", text_of({**BASE, "quota_command": [self.program(home / "other")]}))
        self.write("numpy.py", f"open({str(self.marks / 'numpy')!r}, 'w')\n")
        (self.path / "notes.yaml").symlink_to(home / "id_rsa")
        (self.path / "templates" / "key.j2").symlink_to(home / "id_rsa")
        (self.path / ".#machine.yaml").symlink_to("nowhere")

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def program(self, path: Path) -> str:
        """Write a program that leaves a mark; sbatch's accepts a job."""
        answer = {"sbatch": "echo 7", "squeue": "echo 'not configured' >&2; exit 1"}
        path.write_text(f"#!/bin/sh\n: > {self.marks}/{path.name}\n{answer.get(path.name, '')}\n")
        path.chmod(0o755)
        return str(path)

    def state(self) -> dict[str, tuple[int, int]]:
        """Return time and size of each file."""
        found = {path: path.lstat() for path in self.path.rglob("*")}
        return {
            str(path.relative_to(self.path)): (status.st_mtime_ns, status.st_size)
            for path, status in found.items()
            if not path.is_dir()
        }

    def see(self, *commands: str, **env: str) -> Seen:
        """Run commands in the folder; return what they did."""
        before, opened, seen = self.state(), self.home / "opened", Seen()
        opened.write_text("")
        own = {"HOME": str(self.home), "PATH": f"{self.home}/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        own["PYTHONPATH"] = str(ROOT)
        for command in commands:
            words = [sys.executable, "-P", "-c", PROGRAM, str(self.path), str(opened)]
            done = subprocess.run(
                [*words, *command.split()], env={**own, **env}, cwd=self.path, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            assert "Traceback" not in done.stderr, done.stderr
            if done.returncode:
                seen.refused.add(command)
        seen.read = set(opened.read_text().splitlines())
        seen.ran = {path.name for path in self.marks.iterdir()}
        for path in self.marks.iterdir():
            path.unlink()
        after = self.state()
        changed = before.keys() | after.keys()
        seen.written = {name for name in changed if before.get(name) != after.get(name)}
        return seen

    def sent(self, command: str) -> set[str]:
        """Return the files that ``gpujobs --host login COMMAND`` sends."""
        name, *words = command.split()
        params = main.commands[name].make_context(name, list(words)).params
        request = make_request(main.commands[name], words, params)
        assert b"SECRET" not in request.message()
        return set(request.files)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    folder = Folder(tmp_path)
    monkeypatch.chdir(folder.path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("GPUJOBS_HOST", "GPUJOBS_SITE", "GPUJOBS_SITE_PATH"):
        monkeypatch.delenv(name, raising=False)
    return folder


SITE = {"machine.yaml", "base.yaml", "templates/slurm.sh.j2"}
OF_SITE = {f"sites/{name}" for name in SITE}


def check_site_that_acts(folder: Folder, option: str, **env: str) -> None:
    """A site that the user has chosen runs its commands, connects to its hosts, and is sent."""
    here = {**env, "GPUJOBS_HOST": ""}
    planned = folder.see(f"plan profile.yaml {option}", **here)
    assert planned == Seen(read={*SITE, "profile.yaml"} - {"templates/slurm.sh.j2"}, ran={"quota"})
    submitted = folder.see(f"submit profile.yaml {option}", **here)
    assert SITE <= submitted.read <= {*SITE, "profile.yaml"}
    assert submitted.ran >= {"sbatch", "quota"} and "ssh" not in submitted.ran
    assert submitted.written == set()
    (folder.path / "sbatch").unlink()  # this host is not its login node
    connected = folder.see(f"plan profile.yaml {option}", **env)
    assert connected.ran == {"ssh"} and connected.written == set()
    assert folder.sent(f"plan profile.yaml {option}") == {*OF_SITE, "profile.yaml"}


def check_search_path(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write("profile.yaml", text_of({**PROFILE, "site": "machine"}))
    monkeypatch.setenv("GPUJOBS_SITE_PATH", str(folder.path))
    check_site_that_acts(folder, "", GPUJOBS_SITE_PATH=str(folder.path))
    (folder.path / "base.yaml").chmod(0o666)
    refused = folder.see("plan profile.yaml", GPUJOBS_SITE_PATH=str(folder.path))
    assert refused.refused and refused.ran == set()


def check_named_by_the_user(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write("profile.yaml", text_of(PROFILE))
    check_site_that_acts(folder, "--site ./machine.yaml")
    for words, env in (
        ("--set site=./machine.yaml", {}),
        ("", {"GPUJOBS_SITE": "./machine.yaml"}),
    ):
        assert folder.see(f"plan profile.yaml {words}", GPUJOBS_HOST="", **env).ran == {"quota"}

    folder.write("two.yaml", text_of(MACHINES))
    assert folder.see("plan profile.yaml --site ./two.yaml", GPUJOBS_HOST="").ran == {"ssh"}


def check_named_by_a_profile(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write("profile.yaml", text_of({**PROFILE, "site": "./machine.yaml"}))
    commands = ("plan profile.yaml", "plan profile.yaml --soonest", "render profile.yaml")
    seen = folder.see(*commands, "submit profile.yaml", "status")
    files = {*SITE, "profile.yaml"}
    refused = {"submit profile.yaml", "plan profile.yaml --soonest"}  # there is no sinfo
    assert seen == Seen(read=files, refused=refused)
    assert folder.sent("plan profile.yaml") == {*OF_SITE, "profile.yaml"}
    folder.write("two.yaml", text_of(MACHINES))
    folder.write("profile.yaml", text_of({"gpus": 0, "run": ["true"], "site": "./two.yaml"}))
    seen = folder.see("plan profile.yaml", "render profile.yaml", "submit profile.yaml")
    files = {"two.yaml", "profile.yaml"}
    assert seen == Seen(read=files, refused={"submit profile.yaml"})


def check_beside(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is neither the site, its base nor its template: no command opens, runs or sends it."""
    folder.write("profile.yaml", text_of(PROFILE))
    seen = folder.see("render profile.yaml --site ./machine.yaml", GPUJOBS_HOST="")
    assert seen == Seen(read={*SITE, "profile.yaml"}, ran=seen.ran - {"other", "numpy", "ssh"})
    assert folder.sent("render profile.yaml --site ./machine.yaml") == {*OF_SITE, "profile.yaml"}


def check_environments(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a site that a received profile names with them: no program of it runs, and no rule is left out."""
    mark = f": > {folder.marks}/ran"
    evil = {
        "setup": mark,
        "python": folder.program(folder.path / "python"),
        "description": f"$({mark})",
    }
    image = {"container": {"runtime": "charliecloud", "image": f"/$({mark})"}}
    site = {**BASE, "environments": {"evil": evil, "image": image}, "environments_only": True}
    folder.write("machine.yaml", text_of(site))
    folder.write(
        "profile.yaml", text_of({**PROFILE, "site": "./machine.yaml", "environment": "evil"})
    )
    commands = ("plan profile.yaml", "render profile.yaml", "sites environments ./machine.yaml")
    commands += ("sites check ./machine.yaml", "plan profile.yaml --set environment=image")
    assert folder.see(*commands) == Seen(read=SITE - {"base.yaml"} | {"profile.yaml"})
    for own in (
        {"python": str(folder.path / "numpy.py")},
        {"setup": mark},
        {"container": {"image": "docker://x/y"}},
    ):
        text = {**PROFILE, "site": "./machine.yaml", "environment": {"name": "evil", **own}}
        folder.write("profile.yaml", text_of(text))
        refused = folder.see("plan profile.yaml", "submit profile.yaml")
        assert (
            refused.refused == {"plan profile.yaml", "submit profile.yaml"} and refused.ran == set()
        )


def check_defaults(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the user: its keys count. Of anyone else, or beside a profile: it is refused, or not read."""
    own = folder.home / ".config" / "gpujobs" / "defaults.yaml"
    own.parent.mkdir(parents=True)
    keys = {
        "account": "p1",
        "environment": {
            "setup": f": > {folder.marks}/ran",
            "python": folder.program(folder.path / "python"),
        },
    }
    own.write_text(text_of(keys))
    own.chmod(0o600)
    folder.write("base.yaml", text_of(BASE))
    folder.write("profile.yaml", text_of({**PROFILE, "site": "./base.yaml"}))
    folder.write("defaults.yaml", "account: of-the-sender\n")
    commands = ("plan profile.yaml", "render profile.yaml")
    assert folder.see(*commands) == Seen(read=SITE - {"machine.yaml"} | {"profile.yaml"})
    assert folder.sent("plan profile.yaml") == OF_SITE - {"sites/machine.yaml"} | {"profile.yaml"}
    for change in (lambda: own.chmod(0o622), lambda: own.parent.chmod(0o777)):
        change()
        assert folder.see(*commands).refused == set(commands)
        own.chmod(0o600)
    own.parent.chmod(0o700)
    own.unlink()
    own.symlink_to(folder.path / "defaults.yaml")
    (folder.path / "defaults.yaml").chmod(0o666)
    assert folder.see("plan profile.yaml").refused == {"plan profile.yaml"}
    own.unlink()
    own.write_text("run: [true]\n")
    assert folder.see("plan profile.yaml").refused == {"plan profile.yaml"}


def check_profile(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.path / "machine.yaml").unlink()
    setup = f"touch {folder.marks}/setup; x=$(touch {folder.marks}/setup)"
    folder.write(
        "profile.yaml", text_of({**PROFILE, "account": "p12345", "environment": {"setup": setup}})
    )
    seen = folder.see(
        "plan profile.yaml --site example-slurm", "render profile.yaml --site example-slurm"
    )
    assert seen == Seen(read={"profile.yaml"})
    assert folder.sent("plan profile.yaml") == {"profile.yaml"}


def check_job_folder(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write("profile.yaml", text_of(PROFILE))
    made = folder.see("render profile.yaml --site ./machine.yaml -o jobs", GPUJOBS_HOST="")
    assert all(name.startswith("jobs/") for name in made.written)
    folder.write("jobs/id_rsa", "SECRET")
    (folder.path / "jobs" / "link").symlink_to(folder.home / "id_rsa")
    sent = folder.sent("submit jobs")
    assert {"jobs/plan.json", "jobs/README.md", "jobs/profile.sh"} <= sent
    assert not {"jobs/id_rsa", "jobs/link"} & sent
    for command in ("status jobs", "submit jobs", "cancel jobs", "report jobs"):
        seen = folder.see(command)
        assert seen.ran == set(), command  # no site of the user has these `commands`
        assert all(name.startswith("jobs/") for name in seen.read | seen.written)
    (spec,) = (folder.path / "jobs").rglob("spec.json")
    value = json.loads(spec.read_text())
    value["site"]["document"] = MACHINES
    spec.write_text(json.dumps(value))
    assert folder.see("status jobs", "scale jobs 2", "report jobs", "cancel jobs").ran == set()


def check_answers(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a login node: a tunnel to the addresses that it names, and the key in a private folder."""
    ssh = f'#!/bin/sh\necho "$@" >> {folder.home}/calls\n'
    (folder.home / "bin" / "ssh").write_text(ssh)
    monkeypatch.setenv("PATH", f"{folder.home}/bin:/usr/bin:/bin")
    hostile = f"$(: > {folder.marks}/ran)"
    whole = {"id": "svd-7f3a", "user": "ann", "node": "", "address": "tls://10.0.0.1:8786"}
    whole |= {"dashboard": 8787, "files": {"key.pem": "KEY"}}
    host = remote.login_node("login")
    for key in ("id", "user", "node", "files"):
        value = {**whole, key: {hostile: ""} if key == "files" else hostile}
        with pytest.raises(UnavailableError, match="which is not a name"):
            remote.read_endpoint(host, json.dumps(value).encode())
    tunnel = remote.Tunnel(host, remote.read_endpoint(host, json.dumps(whole).encode()))
    targets = {"10.0.0.1:8786", "10.0.0.1:8787"}
    calls = (folder.home / "calls").read_text()
    assert all(target in calls for target in targets)
    key = tunnel.folder / "key.pem"
    assert key.read_text() == "KEY" and key.stat().st_mode & 0o777 == 0o600
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in (key.parent, key.parent.parent))
    (folder.home / "bin" / "squeue").write_text(f"#!/bin/sh\necho '{hostile}'\n")
    (folder.home / "bin" / "squeue").chmod(0o755)
    seen = folder.see("status", "queues --site example-slurm")
    assert seen.ran == set() and seen.written == set()


ROWS: dict[str, tuple[tuple[str, str, str, str, str], Callable[..., None]]] = {
    "site file of the [search path](sites.md#search-path)": (
        (
            "yes, if others could not have written it", "`commands`, `quota_command`", "`hosts` and `machines`, by ssh",
            "to the login node of a command, with the files that it extends and its templates", "never",
        ),
        check_search_path,
    ),
    "site file that you name: `--site`, `--set site=`, `GPUJOBS_SITE`, `site=` in Python": (
        ("yes", "the same", "the same", "the same", "never"), check_named_by_the_user,
    ),
    "site file that only a profile names": (
        (
            "yes; `plan` and `submit` name it",
            "never: `commands` and `quota_command` are not used, and `submit` refuses the file until you name it",
            "never: `hosts` and `machines` are not used", "with `--host`, the same files, without these keys", "never",
        ),
        check_named_by_a_profile,
    ),
    "file beside a profile or a site file": (
        (
            "only templates of the site, and files that it extends", "never", "never",
            "only these, and no link that leads to another kind of file", "never",
        ),
        check_beside,
    ),
    "`environments` of a site file": (
        (
            "with the site file",
            "never; `setup` runs in jobs, and `bash -n` checks it without executing it", "never",
            "with the site file", "never",
        ),
        check_environments,
    ),
    "`defaults.yaml` in your configuration folder": (
        (
            "yes, if only you or root could have written it", "never; it has three keys of a profile", "never",
            "never", "never",
        ),
        check_defaults,
    ),
    "profile": (
        ("yes", "never; `bash -n` checks `setup` without executing it", "never", "with `--host`", "never"),
        check_profile,
    ),
    "job folder": (
        (
            "by `submit`, `status` and the other commands that you give it to",
            "`commands` of its record only if your site of that name has the same", "never",
            "`submit --host`: its scripts, plan and cluster, no other file", "below it, by `submit` and by its jobs",
        ),
        check_job_folder,
    ),
    "answers of a login node or a batch scheduler": (
        (
            "yes", "never", "tunnels to the dask scheduler and the dashboard that a login node names", "never",
            "the key of a cluster, in a private folder",
        ),
        check_answers,
    ),
}  # fmt: skip
"""The cells of each row in the document, and the check of all of them."""


def cells() -> Iterator[list[str]]:
    text = (ROOT / "docs" / "security.md").read_text()
    table = text.partition("## Files of others")[2].partition("\n## ")[0]
    for line in table.splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("| ").split(" | ")]


def test_the_table_is_that_of_the_documentation() -> None:
    header, *rows = cells()
    assert tuple(header) == ("File", *COLUMNS)
    assert rows == [[row, *words] for row, (words, _) in ROWS.items()]


@pytest.mark.parametrize("row", ROWS)
def test_a_file_of_this_row_causes_only_that(
    row: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ROWS[row][1](folder, monkeypatch)
