"""The side of a login node in a conversation with gpujobs on another computer, through ssh.

Only the standard library: the other side sends this file to a login node without gpujobs. Messages
are lines of JSON on stdin and stdout; start-up files of the login shell may print others before.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

MARK = b"\x1egpujobs "
"""The start of a message to the other side."""
HOME = ".gpujobs"
"""In the home of a login node: gpujobs, `sent` with the files of each command, and `uploads`."""
MARKER = ".made-by-gpujobs"
"""In each folder that gpujobs has made, with the folder's name: only such a folder is removed."""
PROBLEM = "cannot write in "
"""The start of a message, in the place of its kind, that nothing can be received."""
CURE = "commands with --host need a writable ~/.gpujobs there: look at its quota and permissions"


def message(kind: str) -> bytes:
    """Return a message to the other side, on a line of its own."""
    return b"\n" + MARK + json.dumps({"kind": kind}).encode() + b"\n"


def tell(kind: str) -> None:
    """Send a message to the other side."""
    sys.stdout.buffer.write(message(kind))
    sys.stdout.buffer.flush()


def receive() -> dict[str, Any]:
    """Return the next message of the other side. EOFError if the connection has ended."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the connection ended")
    received: dict[str, Any] = json.loads(line)
    return received


def receive_bytes(size: int) -> bytes:
    """Return the next ``size`` bytes. EOFError if the connection has ended before."""
    data = sys.stdin.buffer.read(size)
    if len(data) < size:
        raise EOFError("the connection ended")
    return data


def mark(folder: Path, name: str = "") -> None:
    """Mark a new folder as made by gpujobs; ``name``: that it will have, if not its own."""
    marker = folder / MARKER
    marker.touch(mode=0o600)
    marker.write_text(f"{name or folder.name}\n", encoding="utf-8")


def unpack(data: bytes, folder: Path) -> None:
    """Unpack a zip into a private ``folder`` in one step; if it exists, nothing changes."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    new = temporary / "new"
    try:
        mark(temporary)  # a kill leaves it
        new.mkdir(mode=0o700)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for item in archive.infolist():
                path = Path(archive.extract(item, new))
                path.chmod(item.external_attr >> 16)
        mark(new, folder.name)
        if not folder.is_dir():
            new.rename(folder)
    finally:
        remove(temporary)


def remove(folder: Path) -> None:
    """Remove a marked folder. The marker comes last: what an interruption leaves can still go."""
    for path in folder.iterdir():
        if path.name == MARKER:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    shutil.rmtree(folder)


def problem_of(error: OSError, folder: Path) -> str:
    """Return why nothing can be written for ``folder``."""
    return f"{PROBLEM}{folder.parent}: {error.strerror}"


def prepare(name: str) -> None:
    """Make gpujobs of the folder ``name`` importable; the other side sends it the first time."""
    os.umask(0o077)
    folder = Path.home() / HOME / name
    if not folder.is_dir():
        tell("package")
        data = receive_bytes(receive()["size"])
        if not name.endswith(hashlib.sha256(data).hexdigest()):
            raise EOFError("the package is damaged")
        try:
            unpack(data, folder)
        except OSError as error:  # a full disk, or a home that is read-only
            tell(problem_of(error, folder))
            sys.exit(1)
    sys.path.insert(0, str(folder))
