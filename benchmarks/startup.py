"""Print the start-up time of commands as ratios to `python -c "import distributed"`.

Run it with the python of an installed gpujobs. The commands are measured in turn in one run. In an
environment with numpy, distributed starts more slowly and the ratios are lower.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 15
AIMS = {"--version": 0.25, "render": 0.55}


def main() -> None:
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "p.yaml"
        profile.write_text("gpus: 8\nwalltime: 2h\naccount: p12345\nrun: [python, svd.py]\n")
        gpujobs = str(Path(sys.executable).parent / "gpujobs")
        site = ["--site", "example-slurm", str(profile)]
        commands = {
            "import distributed": [sys.executable, "-c", "import distributed"],
            "--version": [gpujobs, "--version"],
            "render": [gpujobs, "render", *site],
            "plan": [gpujobs, "plan", *site],
            "status": [gpujobs, "status"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(ROUNDS + 2):
            for name, command in commands.items():
                started = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True, env=environment)
                if number >= 2:  # the first rounds fill caches
                    seconds[name].append(time.perf_counter() - started)
    base = statistics.median(seconds.pop("import distributed"))
    print(f"{'command':<12} {'ratio to import distributed':>28}")
    for name, values in seconds.items():
        aim = f"   (aim: under {AIMS[name]})" if name in AIMS else ""
        print(f"{name:<12} {statistics.median(values) / base:>28.2f}{aim}")


if __name__ == "__main__":
    main()
