"""bash and shellcheck on rendered scripts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def accept(scripts: Sequence[Path]) -> None:
    """Fail if bash cannot parse one of the scripts, or if shellcheck has a finding in one of them."""
    assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    # SC1091: a `source` of the user's setup names a file that does not exist here.
    command = [shellcheck, "--exclude=SC1091", *scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
