"""`gpujobs at-login`: a command of `gpujobs --host`, on the login node."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..batch import receive
from ..errors import InputError

if TYPE_CHECKING:
    from ..config.spec import ClusterSpec

_uploads: list[bytes] = []
"""The zip of `submit --upload`, until its place is known."""


def serve(main: click.Group) -> None:
    """Run the command that the other side sends; it is interrupted if the connection ends."""
    os.umask(0o077)
    receive.tell("ready")
    try:
        request = receive.receive()
        folder = Path.home() / ".gpujobs" / str(request["name"])
        if size := request["size"]:
            receive.unpack(receive.receive_bytes(size), folder)
        if size := request["upload"]:
            _uploads.append(receive.receive_bytes(size))
    except EOFError as error:
        raise click.ClickException(f"nothing was done: {error}") from None
    os.chdir(Path.home())
    os.environ.update(request["env"])
    os.environ["GPUJOBS_HOST"] = ""  # this is the host
    paths = [str(folder / "sites"), os.environ.get("GPUJOBS_SITE_PATH", "")]
    os.environ["GPUJOBS_SITE_PATH"] = os.pathsep.join(filter(None, paths))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_interrupt_at_end, daemon=True).start()
    sys.argv = ["gpujobs", *request["argv"]]
    main(sys.argv[1:])


def _interrupt_at_end() -> None:
    """Wait for the end of the connection, which ends this command as Ctrl-C does."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def place_upload(spec: ClusterSpec) -> Path:
    """Write the uploaded files into a new folder beside those of the clusters; return its path.

    Raises InputError if nothing was uploaded.
    """
    from ..clusters.folder import private_folder
    from ..planning.bash import expand_directory

    if not _uploads:
        raise InputError("--upload needs --host")
    uploads = Path(expand_directory(spec.site.site.directory)) / "uploads"
    private_folder(uploads)
    folder = uploads / f"{spec.name}-{secrets.token_hex(4)}"
    receive.unpack(_uploads.pop(), folder)
    return folder
