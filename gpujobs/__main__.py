"""``python -m gpujobs``."""

from .cli.main import main

main()
