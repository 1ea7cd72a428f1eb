"""Measure how long commands take to start, as ratios to `python -c "import distributed"`.

``python benchmarks/startup.py [--plain] [--rounds N]``, with the python of an installed gpujobs.
All commands run in turn, and their medians are compared. ``--plain`` also measures a plain install:
it builds the wheel and installs it into a new virtual environment without extras. There numpy is
missing, which makes `import distributed` slower elsewhere. Exit code 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = "import distributed"
AIMS = {"--version": 0.25, "render": 0.55}
WARM_UP_ROUNDS = 2
PROFILE = "gpus: 8\nwalltime: 2h\naccount: p12345\nrun: [python, svd.py]\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how long commands take to start.")
    parser.add_argument("--plain", action="store_true", help="also measure a plain installation")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each command")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pythons = {"this environment": Path(sys.executable)}
        if options.plain:
            pythons["plain install"] = plain_environment(folder)
        profile = folder / "p.yaml"
        profile.write_text(PROFILE)
        medians = {
            name: measure(commands(python, profile), options.rounds)
            for name, python in pythons.items()
        }
    return report(medians)


def plain_environment(folder: Path) -> Path:
    """Install the wheel of this checkout into a new environment, and return its python."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
    environment = folder / "plain"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    (wheel,) = folder.glob("gpujobs-*.whl")
    subprocess.run([python, *pip[1:], "install", wheel], check=True)
    return python


def commands(python: Path, profile: Path) -> dict[str, list[str]]:
    gpujobs = str(python.parent / "gpujobs")
    job = ["--site", "example-slurm", str(profile)]
    return {
        BASE: [str(python), "-c", BASE],
        "--version": [gpujobs, "--version"],
        "render": [gpujobs, "render", *job],
        "plan": [gpujobs, "plan", *job],
        "status": [gpujobs, "status"],
    }


def measure(commands: dict[str, list[str]], rounds: int) -> dict[str, float]:
    """Return the median duration of each command in seconds."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(WARM_UP_ROUNDS + rounds):
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, env=environment)
            if number >= WARM_UP_ROUNDS:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(medians: dict[str, dict[str, float]]) -> int:
    """Print the ratios, and return the exit code."""
    missed = False
    print(f"{'ratio to ' + BASE:<40}{''.join(f'{name:>20}' for name in medians)}")
    for name in next(iter(medians.values())):
        if name == BASE:
            continue
        ratios = [seconds[name] / seconds[BASE] for seconds in medians.values()]
        aim = AIMS.get(name, float("inf"))
        missed = missed or max(ratios) > aim
        note = f"   (aim: {aim})" if name in AIMS else ""
        print(f"{name:<40}{''.join(f'{ratio:>20.2f}' for ratio in ratios)}{note}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
