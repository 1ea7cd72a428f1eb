"""Virtual environments and distributions of gpujobs, made once for all processes of a test run."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .cli import ROOT


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a new folder in which ``make`` was called by the first process that needs it."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()  # fails if it failed before
            make(folder)
            done.touch()
    return folder


def install(venv: Path, *packages: str) -> None:
    """Make a virtual environment with these packages.

    It has no pip of its own, and no bytecode of modules that nobody imports: these take most of the time.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "-q"]
    subprocess.run([*pip, "--no-compile", *packages], check=True)


def distributions(factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the sdist, and the wheel that is built from it."""

    def build(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        python = folder / "venv" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", "build"], check=True)
        subprocess.run([python, "-m", "build", "--outdir", folder / "dist", ROOT], check=True)

    dist = once(factory, "distributions", build) / "dist"
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}
