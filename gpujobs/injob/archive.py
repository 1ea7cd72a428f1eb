"""Pack modules into one file for the cluster's folder. Runs at submit; not in `injob.pyz`."""

from __future__ import annotations

import importlib.util
import io
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path

from .names import PACKAGE

_MAIN = f"""\
import sys

from {PACKAGE}.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
_DATE = (1980, 1, 1, 0, 0, 0)
"""The oldest date of a zip file. A fixed one, so that equal sources make equal bytes."""
_UNCHECKED = b"\1" + bytes(11)
"""Flags and hash of a bytecode file that Python does not compare with a source."""
_VOCABULARY = f"{PACKAGE}/vocabulary"
"""File with the options that the programs of the archive have, for other releases."""
_UNIX = 3
"""For `ZipInfo.create_system`, which would differ between the systems of two clients."""


def build() -> bytes:
    """Return the archive `injob.pyz`: this package as `gpujobs_injob`, and a `__main__`.

    Beside each source is the bytecode that Python has cached, for jobs of the same Python.
    """
    files = {"__main__.py": _MAIN.encode(), _VOCABULARY: _vocabulary()}
    for path in Path(__file__).parent.glob("*.py"):
        if path.name != Path(__file__).name:
            name = f"{PACKAGE}/{path.name}"
            files[name] = path.read_bytes()
            if code := _bytecode(path):
                files[f"{name}c"] = code
    return pack(files)


def takes_our_options(path: Path) -> bool:
    """Return whether the archive at ``path`` has the options with which scripts of today start it.

    Not if another release of gpujobs has made it, with other options, or if it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(_VOCABULARY) == _vocabulary()
    except (OSError, KeyError, zipfile.BadZipFile):
        return False


def _vocabulary() -> bytes:
    from .options import vocabulary  # not in `judge.pyz`, which has this module

    return vocabulary().encode()


def _bytecode(path: Path) -> bytes:
    """Return the bytecode of this source with a header for any date; b"" if it is not cached."""
    cached = Path(importlib.util.cache_from_source(str(path)))
    if not cached.exists():
        return b""
    code, source, magic = cached.read_bytes(), path.stat(), importlib.util.MAGIC_NUMBER
    of_source = int(source.st_mtime).to_bytes(4, "little") + source.st_size.to_bytes(4, "little")
    return magic + _UNCHECKED + code[16:] if code[:16] == magic + bytes(4) + of_source else b""


def pack(files: Mapping[str, str | bytes]) -> bytes:
    """Return an archive of ``files``, by path.

    Nothing is compressed: Python reads it without zlib, and people read it with any editor.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.create_system = _UNIX
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, files[name])
    return buffer.getvalue()
