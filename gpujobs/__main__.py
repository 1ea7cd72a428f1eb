"""The command ``gpujobs``, also as ``python -m gpujobs``."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command. Ctrl-C while its modules are imported ends it without a traceback."""
    given = signal.getsignal(signal.SIGINT)
    if given is signal.default_int_handler:  # else it is ignored, as in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli.main import main

    signal.signal(signal.SIGINT, given)
    main()


if __name__ == "__main__":
    main()
