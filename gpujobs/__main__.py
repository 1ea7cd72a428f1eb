"""The command ``gpujobs``, also as ``python -m gpujobs``."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command. Ctrl-C while its modules are imported ends it without a traceback."""
    # It may also be ignored: in the background of a script.
    replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if replaced:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli.main import main as run

    if replaced:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
