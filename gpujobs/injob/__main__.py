"""``python -m gpujobs.injob``: the same commands as ``python injob.pyz``."""

import sys

from .commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
