"""Where the original initialises UCX in its process: once, before it listens or connects."""

import sys


def init_once():
    if "try-ucxx" not in sys.argv:  # whose last line of output is why it failed
        print("stand-in for ucxx: UCX is initialised", flush=True)
