"""`gpujobs --host`: commands that run on a login node, with files of this computer; both sides."""

from __future__ import annotations

import io
import os
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import GpujobsError, InputError
from .live import echo, progress

if TYPE_CHECKING:
    from ..batch.ssh import Host
    from ..clusters.remote import Request
    from ..config.sitefiles import SiteFile
    from ..config.spec import ClusterSpec


# -- the host of a command -------------------------------------------------------------------------
def host_of(ctx: click.Context, params: Mapping[str, Any]) -> str:
    """Return the host of a command: of ``--host``, else of its site, if that is not here; or ""."""
    if (given := ctx.params.get("host")) or "GPUJOBS_HOST" in os.environ:
        return given or ""
    site = named_site(params)
    if site is None or not site.site.hosts:  # a received file has none (see `trust`)
        return ""
    from ..batch import process
    from ..schedulers import get_scheduler

    scheduler = get_scheduler(site.site.scheduler)
    command = scheduler(None).submit_command()[0]
    here = process.is_available(site.site.commands.get(command, command))
    return "" if here and not scheduler.on_this_machine else site.site.hosts[0]


def named_site(params: Mapping[str, Any]) -> SiteFile | None:
    """Return the site that a command names, if this computer has its file, else None."""
    profile: Path | None = params.get("profile")
    given: str | None = params.get("site")
    in_profile = profile is not None and _mentions_site(profile)
    if not given and not in_profile and not os.environ.get("GPUJOBS_SITE"):
        return None
    from ..config import document, sitefiles, spec

    own = document.read(profile) if profile and in_profile else document.Document({})
    if not given and not own.value.get("site") and not os.environ.get("GPUJOBS_SITE"):
        return None
    try:
        return spec.choose_site(own, given, profile and profile.parent)
    except sitefiles.NoSuchSiteError:
        return None


def _mentions_site(profile: Path) -> bool:
    from ..config import document

    try:
        return profile.is_file() and b"site" in document.read_bytes(profile)
    except (OSError, InputError):
        return False  # the command itself reports it


# -- a command for the login node ------------------------------------------------------------------
def make_request(command: click.Command, words: list[str], params: Mapping[str, Any]) -> Request:
    """Return the request for a command with these words; ``params``: as click has read them."""
    from ..clusters import remote

    request = remote.Request([])
    if site := os.environ.get("GPUJOBS_SITE"):
        request.env["GPUJOBS_SITE"] = site
    profile: Path | None = params.get("profile")
    if profile is not None and profile.exists():
        words = _with_value(command, words, "profile", _add_profile(request, profile))
    if "site" in params and (found := named_site(params)):
        if command.name == "submit":
            found.check_named()
        request.add_site(found)
        if params["site"] is not None:
            words = _with_value(command, words, "site", found.name)
        elif "profile" in params:
            words = ["--site", found.name, *words]
    request.argv = [str(command.name), *words]
    if paths := params.get("uploads"):
        request.upload = read_uploads(paths)
    return request


def _add_profile(request: Request, profile: Path) -> str:
    """Send a profile, or a job folder; return the word for its path on the login node."""
    from ..clusters import remote, submit
    from ..config import document

    if profile.is_file():
        return request.add_file(profile.name, document.read_bytes(profile))
    request.place, files = "folders", submit.files_of_folder(profile)
    remote.check_size(files, str(profile))
    name = profile.resolve().name
    for inner, path in files.items():
        request.add_file(f"{name}/{inner}", path)
    return request.path(name)


def _with_value(command: click.Command, words: list[str], name: str, value: str) -> list[str]:
    """Return ``words`` with another value of the parameter ``name``.

    Other words may be equal to its present value: the right one changes this parameter alone.
    """
    given = _parameters(command, words)
    old = given[name]
    for place, word in enumerate(words):
        if word not in (old, f"--{name}={old}"):
            continue
        changed = [*words[:place], word.removesuffix(old) + value, *words[place + 1 :]]
        if _parameters(command, changed) == {**given, name: value}:
            return changed
    return words


def _parameters(command: click.Command, words: list[str]) -> dict[str, Any]:
    """Return the text of the parameters in ``words``."""
    return command.make_parser(click.Context(command)).parse_args(list(words))[0]


def read_uploads(paths: tuple[Path, ...]) -> bytes:
    """Return the files, and the content of the folders, that ``--upload`` names. InputError."""
    from ..clusters import remote

    files: dict[str, Path] = {}
    for name, path in (found for given in paths for found in _uploads_of(given)):
        if name in files and not path.is_dir():
            raise InputError(f"--upload: there is {name} twice")
        files[name] = path
    remote.check_size(files, "--upload")
    return remote.pack(files)


def _uploads_of(path: Path) -> Iterable[tuple[str, Path]]:
    from ..clusters.clusterfolder import files_below

    if not path.exists():
        raise InputError(f"--upload: there is no {path}")
    return files_below(path) if path.is_dir() else [(path.name, path)]


# -- run it there ----------------------------------------------------------------------------------
def run_command(
    ctx: click.Context, command: click.Command, words: list[str], **params: Any
) -> None:
    """Run a command on its host, or here; ``words`` and ``params``: of the command line."""
    name = host_of(ctx, params)
    if not name:
        ctx.invoke(command, **params)
        return
    from ..clusters import remote

    host = remote.login_node(name)
    request = make_request(command, words, params)
    if command.name == "connect":
        _connect(host, request, stay=not params["as_environment"])
        return
    output: Path | None = params.get("output")
    if output is not None and str(output) != "-" and not params["ticket"]:
        page = remote.Request(["report", params["cluster_id"], "--output=-"])
        output.write_bytes(_output(host, page))
        if not params["as_json"]:
            return
        request.argv = ["report", params["cluster_id"], "--json"]
    sys.exit(remote.run(host, request, sys.stdout.buffer))


def _output(host: Host, request: Request) -> bytes:
    """Return the output of a command on a login node; exit with its code if it fails."""
    from ..clusters import remote

    buffer = io.BytesIO()
    if code := remote.run(host, request, buffer):
        sys.exit(code)
    return buffer.getvalue()


def _connect(host: Host, request: Request, *, stay: bool) -> None:
    """Open tunnels to a cluster, and print the variables with which ``Client()`` uses them.

    ``stay``: keep the tunnels open until Ctrl-C.
    """
    from ..clusters import remote

    request.argv.append("--for-host")
    found = remote.read_endpoint(host, _output(host, request))
    tunnel = remote.Tunnel(host, found)
    variables = {"DASK_SCHEDULER_ADDRESS": tunnel.address, **tunnel.config}
    for name, value in variables.items():
        echo(f"export {name}={shlex.quote(value)}")
    if tunnel.dashboard:
        echo(f"# dashboard: {tunnel.dashboard}")
    if stay:
        progress.write("the tunnel is open until Ctrl-C; the cluster does not end with it")
        tunnel.keep(threading.Event())


# -- `gpujobs at-login`: the command on the login node ---------------------------------------------
_uploads: list[bytes] = []
"""The zip of `submit --upload`, until its place is known."""


def serve(main: click.Group) -> None:
    """Run the command that the other side sends; it is interrupted if the connection ends."""
    from ..batch import receive

    os.umask(0o077)
    receive.tell("ready")
    try:
        request = receive.receive()
        folder = Path.home() / receive.HOME / str(request["name"])
        if size := request["size"]:
            _unpack(receive.receive_bytes(size), folder)
        if size := request["upload"]:
            _uploads.append(receive.receive_bytes(size))
    except EOFError as error:
        raise click.ClickException(f"nothing was done: {error}") from None
    os.chdir(Path.home())
    os.environ.update(request["env"])
    os.environ["GPUJOBS_HOST"] = ""  # this is the host
    os.environ["GPUJOBS_SITE_PATH"] = search_path(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_interrupt_at_end, daemon=True).start()
    sys.argv = ["gpujobs", *request["argv"]]
    main(sys.argv[1:])


def search_path(folder: Path) -> str:
    """Return the search path of sites of a command, whose files are in ``folder``.

    A job folder brings no sites, whatever its name is and those of its scripts are.
    """
    own = str(folder / "sites") if folder.parent.name == "sent" else ""
    return os.pathsep.join(filter(None, [own, os.environ.get("GPUJOBS_SITE_PATH", "")]))


def _unpack(data: bytes, folder: Path) -> None:
    from ..batch import receive

    try:
        receive.unpack(data, folder)
    except OSError as error:
        raise GpujobsError(receive.problem_of(error, folder), hint=receive.CURE) from None


def _interrupt_at_end() -> None:
    """Wait for the end of the connection, which ends this command as Ctrl-C does."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def place_upload(spec: ClusterSpec) -> Path:
    """Write the uploaded files into a new folder beside those of the clusters; return its path.

    Raises InputError if nothing was uploaded.
    """
    from ..clusters.clusterfolder import private_folder
    from ..planning.bash import expand_directory

    if not _uploads:
        raise InputError("--upload needs --host")
    uploads = Path(expand_directory(spec.site.site.directory)) / "uploads"
    private_folder(uploads)
    folder = uploads / f"{spec.name}-{secrets.token_hex(4)}"
    _unpack(_uploads.pop(), folder)
    return folder
