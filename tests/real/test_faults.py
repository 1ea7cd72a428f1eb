"""What goes wrong around us on this machine: full disks, killed commands, folders that somebody removes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import local_cli, slow_variant
from ..support.cli import Cli
from ..support.processes import patience, processes_with, run, until

CPU = {"gpus": 0, "workers": {"memory": "512MiB"}}
SITE = {"description": "x", "scheduler": "local", "queues": {"local": {}}}


@pytest.fixture
def local(home: Path, request: pytest.FixtureRequest) -> Iterator[Cli]:
    yield local_cli(home, request)
    until(lambda: not processes_with(f"GPUJOBS_FOLDER={home}"), 20, "nothing left running")


@pytest.mark.parametrize("kilobytes", [8, 304, *map(slow_variant, (296, 300, 308, 320))])
@pytest.mark.stub
def test_a_full_disk_is_reported_without_a_traceback(local: Cli, kilobytes: int) -> None:
    """Of each size, since each lets another write fail."""
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    profile = local.write("p.yaml", {**CPU, "run": ["sleep", "600"]})
    (local.home / ".gpujobs").mkdir(mode=0o700)
    mount = f"mount -t tmpfs -o size={kilobytes}k,mode=0700 full {local.home}/.gpujobs"
    script = f'{mount} && "{local.command}" submit {profile} --wait; echo "code $?"; ls {local.home}/.gpujobs'
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script], env=local.env, cwd=local.work, capture_output=True, text=True, timeout=patience(120), check=False
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert f"warning: {local.home}/.gpujobs has only " in done.stderr
    records = list((local.home / ".local").rglob("*.json"))
    if "code 5" in done.stdout:  # it was submitted, and its jobs could write nothing
        assert len(records) == 1 and "all its jobs are over" in done.stderr
    else:
        assert done.stdout == "code 1\n" and records == []  # no id, nothing in the folder
        assert "No space left on device" in done.stderr and str(local.home) in done.stderr


READ = """
import sys, gpujobs
report = gpujobs.ClusterHandle(sys.argv[1]).status()
print(report.state, report.exit_code)
"""
FULL = """
{mount}
id=$({command} submit {profile})
cp "$HOME"/.local/state/gpujobs/clusters/$id.json {work}/record
for _ in $(seq 200); do {command} status $id --json > {work}/status; grep -q '"DONE"\\|"FAILED"' {work}/status && break; sleep 0.5; done
cp {work}/record "$HOME"/.local/state/gpujobs/clusters/$id.json  # it does not know yet that its jobs have ended
cat /dev/zero > "$HOME/more"
for read_only in {read_only}; do
    [ $read_only = 0 ] || mount -o remount,ro "$HOME"
    for words in status "status --all" "status $id" "logs $id" "report $id"; do
        {command} $words; echo "code $?"
    done
    {python} -c '{read}' $id
done
"""


@pytest.fixture(params=["disk", "quota"])
def full(request: pytest.FixtureRequest, local: Cli) -> Iterator[str]:
    """Return the command that mounts 2 MiB at "$HOME"; a quota of btrfs is there already."""
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    disk, image = local.home / "full", local.work / "image"
    disk.mkdir()
    if request.param == "disk":
        yield 'mount -t tmpfs -o size=2m,mode=0700 full "$HOME" || exit 9'
        return
    image.touch()
    os.truncate(image, 2**28)
    if os.getuid() or not shutil.which("mkfs.btrfs"):
        pytest.skip("a quota needs root and btrfs-progs")
    if subprocess.run(
        f"mkfs.btrfs -q {image} && mount -o loop {image} {disk}", shell=True, check=False
    ).returncode:
        pytest.skip("btrfs cannot be mounted here")
    try:
        for words in ("quota enable", "subvolume create", "qgroup limit 2M"):
            folder = disk if "enable" in words else disk / "home"
            subprocess.run(["btrfs", *words.split(), folder], check=True)
        yield 'HOME="$HOME/home"'
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.slow
@pytest.mark.stub
def test_a_full_and_a_read_only_disk_can_be_read(local: Cli, full: str) -> None:
    """`run` fills the disk, or the quota, and ends well."""
    run_ = "echo result; until cp /dev/zero $HOME/zeros 2> /dev/null; do sleep 1; echo > $HOME/y && continue; exit 0; done"
    profile = local.write("p.yaml", {**CPU, "run": ["bash", "-c", run_]})
    times = 1 if full.startswith("HOME=") else 2  # its mount is not of this namespace
    script = FULL.format(
        mount=full, read_only="0 1"[: 2 * times - 1], command=local.command, python=local.python, profile=profile,
        work=local.work, read=READ,
    )  # fmt: skip
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script], env={**local.env, "HOME": str(local.home / "full")}, cwd=local.work,
        capture_output=True, text=True, timeout=patience(180), check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "cannot write in " in done.stderr
    assert ("Disk quota exceeded" in done.stderr) == (times == 1)
    assert re.findall(r"^code (.*)", done.stdout, re.M) == ["0"] * 5 * times
    assert done.stdout.count("DONE 0\n") == times
    assert done.stdout.count("result\n") >= times


@pytest.mark.parametrize("stdout", [">&-", *map(slow_variant, ("> /dev/full", "> >(exec true)"))])
@pytest.mark.stub
def test_the_id_is_not_lost_with_stdout(local: Cli, stdout: str) -> None:
    profile = local.write("p.yaml", {**CPU, "run": ["sleep", "600"]})
    wait = "sleep 1; " if "true" in stdout else ""
    words = ["bash", "-c", f'{{ {wait}"{local.command}" submit {profile}; }} {stdout}']
    done = run(words, env=local.env, user=None, timeout=patience(120), cwd=local.work, stdin="")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    problem, *_, last = done.stderr.splitlines()
    cluster = problem.split()[0]
    assert "is submitted, but its id could not be printed: " in problem
    assert last == f"error: {problem}"
    assert local("cancel", cluster).returncode == 0


@pytest.mark.stub
def test_a_submission_that_was_killed_before_it_answers_leaves_nothing(local: Cli) -> None:
    real, wrapper = sys.executable, local.work / "python"
    wrapper.write_text(
        f'#!/bin/bash\n[ "$3" = submit ] || exec {real} "$@"\n{real} "$@" > {local.work}/ids\nkill -9 $$\n'
    )
    wrapper.chmod(0o755)
    profile = local.write(
        "p.yaml", {"gpus": 0, "workers": {"memory": "512MiB", "count": 3}, "run": ["sleep", "600"]}
    )
    code = (
        "import sys; from gpujobs.schedulers import local; local._COMMAND[0] = sys.argv.pop(1)\n"
        "from gpujobs.cli.main import main; main()"
    )
    done = local.python_run(code, str(wrapper), "submit", str(profile))
    assert done.returncode == 1 and done.stdout == "", done.stderr
    assert (local.work / "ids").read_text().count("@") == 3  # the jobs had been started
    assert "exited with code -9" in done.stderr
    assert list((local.home / ".gpujobs").iterdir()) == [] and local("status", "--all").stdout == ""


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.stub
def test_a_worker_that_does_not_register_ends_the_cluster(local: Cli) -> None:
    wrapper = local.work / "python"
    wrapper.write_text(
        f'#!/bin/bash\ncase $2 in workers) exec sleep 600;; esac\nexec {sys.executable} "$@"\n'
    )
    wrapper.chmod(0o755)
    limit = math.ceil(patience(5))  # also of the dask scheduler
    profile = {**CPU, "start_timeout": f"{limit}s", "environment": {"python": str(wrapper)}}
    done = local("submit", str(local.write("p.yaml", profile)), "--wait")
    cluster = done.stdout.strip()
    assert done.returncode == 5
    assert f"{cluster}-0 did not register with the dask scheduler within {limit} s" in done.stderr


@pytest.mark.stub
def test_a_cluster_whose_folder_was_removed_can_be_cancelled(local: Cli) -> None:
    cluster = local.submit({**CPU, "run": ["sleep", "600"]})
    until(lambda: local.status(cluster)["state"] == "RUNNING", 40)
    following = local.start("logs", cluster, "-f")
    shutil.rmtree(local.home / ".gpujobs" / cluster)
    seen = local("status", cluster)
    assert seen.returncode == 0 and "Traceback" not in seen.stderr
    assert (
        local.status(cluster)["jobs"][0]["state"] == "RUNNING"
    )  # by what the batch scheduler says
    assert local("connect", cluster).returncode == 1
    assert local("cancel", cluster).returncode == 0
    until(lambda: not processes_with(f"GPUJOBS_JOB_NAME={cluster}\0"), 20)
    assert local.status(cluster)["state"] in ("FAILED", "CANCELLED")
    following.communicate(timeout=patience(90))
    assert following.returncode == 0


@pytest.mark.stub
def test_submissions_of_one_profile_at_once_are_separate_clusters(local: Cli) -> None:
    profile = str(local.write("p.yaml", {**CPU, "run": ["true"]}))
    started = [local.start("submit", profile) for _ in range(4)]
    ids = []
    for process in started:
        out, err = process.communicate(timeout=patience(120))
        assert process.returncode == 0, err
        ids.append(out.strip())
    assert len(set(ids)) == 4
    until(lambda: all(local.status(cluster)["state"] == "DONE" for cluster in ids), 120, every=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_a_read_only_home_submits_nothing(home: Path) -> None:
    user = Cli(home, {"GPUJOBS_SITE": "local"}, "nobody")
    profile = str(user.write("p.yaml", {**CPU, "run": ["true"]}))
    home.chmod(0o555)
    done = user("submit", profile)
    assert done.returncode == 2 and done.stdout == ""
    assert re.search(r"\.gpujobs cannot be used: Permission denied", done.stderr)
    home.chmod(0o755)
    (home / ".gpujobs").mkdir(mode=0o700)
    shutil.chown(home / ".gpujobs", "nobody")
    home.chmod(0o555)  # now the ledger is what cannot be written
    done = user("submit", profile)
    assert done.returncode in (1, 2) and done.stdout == "" and "Traceback" not in done.stderr
    assert list((home / ".gpujobs").iterdir()) == []
    home.chmod(0o755)


def test_a_cluster_folder_of_another_user_is_refused(local: Cli) -> None:
    theirs = local.home / "theirs"
    theirs.mkdir(mode=0o700)
    if os.geteuid() == 0:
        shutil.chown(theirs, "nobody")
    (local.home / ".gpujobs").symlink_to(theirs)
    done = local("submit", str(local.write("p.yaml", CPU)))
    assert done.returncode == 2 and "is a symbolic link" in done.stderr
    assert list(theirs.iterdir()) == []
    if os.geteuid() == 0:
        direct = str(local.write("s.yaml", {**SITE, "directory": str(theirs)}))
        done = local("submit", str(local.write("p.yaml", CPU)), "--site", direct)
        assert done.returncode == 2 and "belongs to another user" in done.stderr
        assert list(theirs.iterdir()) == []


@pytest.mark.slow
@pytest.mark.stub
def test_submit_prints_its_cluster_as_json(local: Cli) -> None:
    done = local("submit", str(local.write("p.yaml", {**CPU, "run": ["true"]})), "--json", "--wait")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["version"] == 1 and value["worker_names"] == [f"{value['cluster']}-0"]
    assert Path(value["folder"]).name == value["cluster"]
    assert [(item["first"], item["count"]) for item in value["submissions"]] == [(0, 1)]
    assert local.status(value["cluster"])["state"] == "DONE"


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_a_ledger_that_cannot_be_read_is_an_error(home: Path) -> None:
    """Not "no clusters": jobs would go on, and nobody would know."""
    user = Cli(home, {"GPUJOBS_SITE": "local"}, "nobody")
    setup = {"setup": "sleep 600", "python": user.python}  # dask is not started
    cluster = user.submit({**CPU, "environment": setup})
    ledger = home / ".local" / "state" / "gpujobs" / "clusters"
    record = ledger / f"{cluster}.json"
    for path, mode in ((ledger, 0o700), (record, 0o600)):
        path.chmod(0)
        for arguments in (
            ["status"],
            ["status", cluster],
            ["cancel", "--all"],
            ["cancel", cluster],
        ):
            done = user(*arguments)
            assert "cannot be read: Permission denied" in done.stderr, (path, arguments, done)
            assert "Traceback" not in done.stderr and "remove the file" not in done.stderr
            assert str(path) in done.stderr
        path.chmod(mode)
    assert user("cancel", cluster).returncode == 0
    until(lambda: user.status(cluster)["state"] == "CANCELLED", 30)


def test_a_removed_working_directory_is_reported(local: Cli) -> None:
    profile = local.write("p.yaml", {**CPU, "run": ["true"]})
    moved = profile.rename(local.home / "p.yaml")
    script = f'cd "{local.work}" && rmdir "{local.work}" && exec "{local.command}" "$@"'

    def inside(*arguments: str) -> subprocess.CompletedProcess[str]:
        local.work.mkdir(exist_ok=True)
        return run(["bash", "-c", script, "bash", *arguments], env=local.env, cwd=local.home)

    for command in ("plan", "submit", "render"):
        done = inside(command, str(moved))
        assert done.returncode == 2 and done.stdout == ""
        assert "the working directory was removed\n  hint: cd to a folder" in done.stderr
    assert inside("plan", str(moved), "--set", f"workdir={local.home}").returncode == 0
    assert inside("sites", "list").returncode == 0
    assert inside("status").returncode == 0
    local.work.mkdir()
