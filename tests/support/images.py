"""An image for Charliecloud: a root folder of its own, with the Python of this host and mounted packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from .cli import NVML, ROOT
from .mpi import PREFIX
from .processes import run

FAKES = ROOT / "tests" / "fakes" / "containers" / "runtimes.py"
MARK = "/etc/image-of-the-tests"
"""File that only the image has."""
PACKAGES = "/opt/packages"
_EMPTY = ("etc/hosts", "etc/resolv.conf", "etc/passwd", "etc/group", MARK.lstrip("/"))
_FOLDERS = ("usr", "proc", "sys", "dev", "tmp", "etc", "ch", "opt/packages", "opt/nvml")


def missing() -> str:
    """Return why no container can be started here, or ``""``."""
    if not shutil.which("ch-run"):
        return "Charliecloud is not installed"
    done = subprocess.run(
        ["unshare", "--user", "--mount", "true"], capture_output=True, check=False
    )
    return "this kernel gives no user namespaces" if done.returncode else ""


def podman_missing(folder: Path, user: str | None) -> str:
    """Return why ``user`` can start no container with Podman here, or ``""``."""
    if not shutil.which("podman"):
        return "Podman is not installed"
    image = Image.__new__(Image)
    image.folder = folder / "probe"
    for name in ("usr", "proc", "sys", "dev", "tmp", "etc", "run"):
        (image.folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (image.folder / name).symlink_to(f"usr/{name}")
    subprocess.run(["chown", "-R", user or "root", str(folder)], check=True)
    words = "podman --cgroup-manager=cgroupfs run --rm --network=host --pid=host --volume=/usr:/usr"
    script = f"{image.podman_setup()}\n{words} --rootfs {image.folder} /bin/true"
    own = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    done = run(["bash", "-c", script], env=own, user=user, cwd=folder)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


class Image:
    """A folder for ch-run. Its Python is only on the PATH that the image sets."""

    def __init__(self, folder: Path, python: str, user: str | None) -> None:
        """``python``: an interpreter of this host that ``user`` can run."""
        self.folder = folder
        for name in _FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name in _EMPTY:
            (folder / name).touch()
        for name in ("bin", "sbin", "lib", "lib64"):
            if (link := Path("/") / name).is_symlink():
                (folder / name).symlink_to(link.readlink())
        prefix = self._make_python(python, user)
        own = {"/usr", prefix, str(PREFIX / "lib"), str(PREFIX / "mpich")}
        for path in own:
            self.add_mount_point(Path(path))
        self._own = sorted(own)

    def site(self, *, packages: bool = True) -> dict[str, Any]:
        """Return `containers` of a site file for Charliecloud; without ``packages`` there is no dask."""
        binds = [*self._binds(packages), f"{NVML}:/opt/nvml"]
        return {"runtime": "charliecloud", "images": {"mine": str(self.folder)}, "binds": binds}

    def podman_site(self, user: str) -> dict[str, Any]:
        """Return the same for Podman, of which ``user`` starts the image as its owner.

        A folder has no variables of an image: they are arguments.
        """
        if user:
            run(
                ["chown", "-R", user, str(self.folder)],
                env={"PATH": os.environ["PATH"]},
                user=None,
                cwd=Path("/"),
            )
        lines = (self.folder / "ch" / "environment").read_text().splitlines()
        return {**self.site(), "runtime": "podman", "args": [f"--env={line}" for line in lines]}

    def podman_setup(self) -> str:
        """Return the bash text with which Podman works on a machine without a session of the user.

        Here it may not raise limits, and cgroups are of both versions, which crun does not support.
        """
        folder = self.folder.with_suffix(".podman")
        folder.mkdir()
        folder.chmod(0o777)
        limits = '["nofile=1024:1024", "nproc=4096:4096"]'
        text = f'[engine]\nruntime = "runc"\n[containers]\ndefault_ulimits = {limits}\n'
        (folder / "containers.conf").write_text(text)
        return f"export CONTAINERS_CONF={folder}/containers.conf XDG_RUNTIME_DIR={folder}/$UID; mkdir -p -m 700 $XDG_RUNTIME_DIR"

    def fake_site(self, runtime: str, *, packages: bool = True) -> dict[str, Any]:
        """Return `containers` of a site file for a fake of ``runtime``, which makes GPUs visible by itself."""
        file = self.folder.with_suffix(".sif")
        file.write_text(f"{self.folder}\n")
        calls = self.calls_file
        calls.touch()
        calls.chmod(0o666)
        return {"runtime": runtime, "images": {"mine": str(file)}, "binds": self._binds(packages)}

    def fake_setup(self, python: str) -> str:
        """Return the bash text that puts the fakes on PATH."""
        folder = self.folder.with_suffix(".bin")
        folder.mkdir()
        for name in ("apptainer", "singularity", "srun"):
            path = folder / name
            path.write_text(f'#!/bin/sh\nexec {python} -SE {FAKES} {name} "$@"\n')
            path.chmod(0o755)
        return f"export REAL_SRUN={shutil.which('srun')} PATH={folder}:$PATH"

    @property
    def calls_file(self) -> Path:
        """The calls of the fakes, a line of JSON each."""
        return self.folder.with_suffix(".sif.calls")

    def calls(self) -> list[dict[str, Any]]:
        """Return the calls of the fakes."""
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]

    def _binds(self, packages: bool = True) -> list[str]:
        purelib = sysconfig.get_paths()["purelib"]
        return [*self._own, *([f"{purelib}:{PACKAGES}"] if packages else [])]

    def add_mount_point(self, path: Path) -> None:
        """Make the folder at which the runtime mounts ``path`` of the host: it makes none."""
        (self.folder / str(path).lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _make_python(self, python: str, user: str | None) -> str:
        """Make an environment of ``python``; return the folder in which it is installed."""
        code = "import sys, os; print(os.path.realpath(sys.executable), sys.version_info[1], sys.base_prefix)"
        found = run([python, "-c", code], env={}, user=user, cwd=Path("/"))
        base, minor, prefix = found.stdout.split()
        environment = self.folder / "opt" / "python"
        packages = environment / "lib" / f"python3.{minor}" / "site-packages"
        packages.mkdir(parents=True)
        (packages / "mounted.pth").write_text(f"{PACKAGES}\n")
        (environment / "bin").mkdir()
        (environment / "bin" / "python3").symlink_to(base)
        (environment / "pyvenv.cfg").write_text(f"home = {Path(base).parent}\n")
        variables = {
            "PATH": "/opt/python/bin:/usr/bin:/bin",
            "PYTHONPATH": "/opt/nvml",
            "DASK_CUDA_TEST_SINGLE_GPU": "1",
            "LD_LIBRARY_PATH": f"{PREFIX}/lib:{PREFIX}/mpich/lib",
            "OF_IMAGE": "image",
            "WANTED": "0",
        }
        lines = [f"{name}={value}\n" for name, value in variables.items()]
        (self.folder / "ch" / "environment").write_text("".join(lines))
        return prefix
