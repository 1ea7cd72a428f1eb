"""Pack modules into one file for the cluster's folder. Runs at submit; not in `injob.pyz`."""

from __future__ import annotations

import io
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path

from .names import PACKAGE

_MAIN = f"""\
import sys

from {PACKAGE}.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
_DATE = (1980, 1, 1, 0, 0, 0)
"""The oldest date of a zip file. A fixed one, so that equal sources make equal bytes."""
_UNIX = 3
"""For `ZipInfo.create_system`, which would differ between the systems of two clients."""


def build() -> bytes:
    """Return the archive `injob.pyz`: this package as `gpujobs_injob`, and a `__main__`."""
    sources = {"__main__.py": _MAIN}
    for path in Path(__file__).parent.glob("*.py"):
        if path.name != Path(__file__).name:
            sources[f"{PACKAGE}/{path.name}"] = path.read_text(encoding="utf-8")
    return pack(sources)


def pack(sources: Mapping[str, str]) -> bytes:
    """Return an archive of ``sources``, texts by path.

    Nothing is compressed: Python reads it without zlib, and people read it with any editor.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(sources):
            archive.writestr(_entry(name), sources[name])
    return buffer.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.create_system = _UNIX
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    return entry
