"""Count the calls and the stays of a command of gpujobs at run time.

``python tools/stays.py plan PROFILE --site example-slurm``. A stay is an unbroken run of calls to
functions of one module of the package: many stays mean that a value passes through many hands.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[1] / "gpujobs") + "/"


@dataclass
class Count:
    """Calls of functions of the package, and the stays that they form."""

    calls: int = 0
    stays: int = 0
    modules: set[str] = field(default_factory=set)
    _last: str = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Count one event of ``sys.setprofile``."""
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE) or frame.f_code.co_name == "<module>":
            return
        self.calls += 1
        self.stays += file != self._last
        self._last = file
        self.modules.add(file)


def count(arguments: list[str]) -> Count:
    """Run a command in this process, with all its modules imported before, and count."""
    from gpujobs.cli.main import main

    result = Count()
    for counter in (None, result):  # the first run imports the modules
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            sys.argv = ["gpujobs", *arguments]
            threading.setprofile(counter)
            sys.setprofile(counter)
            try:
                main()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
        clear_caches()
    return result


def clear_caches() -> None:
    """Empty the caches of functions: the second run starts like a new process."""
    modules = [module for name, module in sys.modules.items() if name.startswith("gpujobs.")]
    for function in (value for module in modules for value in vars(module).values()):
        if hasattr(function, "cache_clear"):
            function.cache_clear()


if __name__ == "__main__":
    total = count(sys.argv[1:])
    print(f"{total.calls} calls in {total.stays} stays, {len(total.modules)} modules")
