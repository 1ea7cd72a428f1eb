"""``python -m gpujobs``."""

from .cli import main

main()
