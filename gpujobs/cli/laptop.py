"""`gpujobs --host`: commands that run on a login node, with files of this computer."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import stat
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import click

from ..batch import process, receive, ssh
from ..errors import InputError, UnavailableError
from ..schedulers import get_scheduler, scheduler_names
from ..text import plural, size_text
from ..version import __version__
from . import tunnel
from .live import progress

if TYPE_CHECKING:
    from ..config.sitefiles import SiteFile

LARGEST_UPLOAD = 100 << 20
"""Bytes."""
_PACKAGES = ("gpujobs", "click", "jinja2", "markupsafe", "platformdirs", "ruamel.yaml")
"""All of Python alone, so that they run on any machine."""
_DATE = (1980, 1, 1, 0, 0, 0)
_LOST = 255
"""The exit code of ssh if there is no connection, or if it ends."""


# -- files -----------------------------------------------------------------------------------------
def pack(files: Mapping[str, Path | bytes]) -> bytes:
    """Return a zip of files by their names in it; they are private, and keep that they can run."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            runs = isinstance(content, Path) and content.stat().st_mode & stat.S_IXUSR
            item = zipfile.ZipInfo(name, _DATE)
            item.compress_type = zipfile.ZIP_DEFLATED
            item.external_attr = (stat.S_IFREG | (0o700 if runs else 0o600)) << 16
            archive.writestr(item, content if isinstance(content, bytes) else content.read_bytes())
    return buffer.getvalue()


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each regular file of a folder; links are left out."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(folder).as_posix(), path


def package() -> bytes:
    """Return a zip of gpujobs with what its commands import."""
    from ..config.sitefiles import data_folder

    folders = {f"gpujobs/{name}": data_folder(name) for name in ("templates", "site_configs")}
    for name in _PACKAGES:
        found = importlib.import_module(name).__file__
        folders[name.replace(".", "/")] = Path(str(found)).parent
    files = {
        f"{name}/{inner}": path
        for name, folder in folders.items()
        for inner, path in files_below(folder)
        if path.suffix in (".py", ".j2", ".yaml")
    }
    return pack(files)


def read_uploads(paths: tuple[Path, ...]) -> bytes:
    """Return the files, and the content of the folders, that ``--upload`` names. InputError."""
    files: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise InputError(f"--upload: there is no {path}")
        files.update(files_below(path) if path.is_dir() else {path.name: path})
    total = sum(path.stat().st_size for path in files.values())
    text = f"{plural(len(files), 'file')}, {size_text(total)}"
    if total > LARGEST_UPLOAD:
        hint = "copy them with scp or rsync, and set `workdir` to that folder"
        raise InputError(f"--upload: {text} are more than {size_text(LARGEST_UPLOAD)}", hint=hint)
    progress.write(f"uploads {text}")
    return pack(files)


# -- the host of a command -------------------------------------------------------------------------
def host_of(ctx: click.Context, params: Mapping[str, Any]) -> str:
    """Return the host of a command: of ``--host``, else of its site, if that is not here; or ""."""
    if (given := ctx.params.get("host")) or "GPUJOBS_HOST" in os.environ:
        return given or ""
    if any(process.is_available(command) for command in _submit_commands()):
        return ""
    site = _site(params)
    return site.site.hosts[0] if site and site.site.hosts else ""


def _submit_commands() -> Iterator[str]:
    for name in scheduler_names():
        scheduler = get_scheduler(name)
        if not scheduler.on_this_machine:
            yield scheduler(None).submit_command()[0]


def _site(params: Mapping[str, Any]) -> SiteFile | None:
    """Return the site that a command names, if this computer has its file, else None."""
    profile: Path | None = params.get("profile")
    given: str | None = params.get("site")
    has_profile = profile is not None and profile.is_file()
    if not given and not has_profile and not os.environ.get("GPUJOBS_SITE"):
        return None
    from ..config import document, sitefiles, spec

    own = document.read(profile) if profile and has_profile else document.Document({})
    if not given and not own.value.get("site") and not os.environ.get("GPUJOBS_SITE"):
        return None
    try:
        return spec.choose_site(own, given, profile and profile.parent)
    except sitefiles.NoSuchSiteError:
        return None


# -- a command, and what is sent with it -----------------------------------------------------------
@dataclass
class Request:
    """A command for the login node, with the files that it needs."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path | bytes] = field(default_factory=dict)
    upload: bytes = b""

    def message(self) -> bytes:
        """Return all that is sent."""
        data = pack(self.files) if self.files else b""
        name = hashlib.sha256(data).hexdigest()[:16]
        head = {"name": name, "size": len(data), "upload": len(self.upload), "env": self.env}
        argv = [word.replace(_FOLDER, f".gpujobs/sent/{name}") for word in self.argv]
        return json.dumps({**head, "argv": argv}).encode() + b"\n" + data + self.upload


_FOLDER = "\0"
"""In the words of a request: the folder of its files on the login node."""


def make_request(name: str, words: list[str], params: Mapping[str, Any]) -> Request:
    """Return the request for a command with these words; ``params``: as click has read them."""
    request = Request([name, *words])
    if site := os.environ.get("GPUJOBS_SITE"):
        request.env["GPUJOBS_SITE"] = site
    profile = params.get("profile")
    if profile is not None and profile.is_dir():
        hint = f"copy it with scp -r, then run `gpujobs submit {profile.name}` on the host"
        raise InputError(f"{profile} is a job folder on this computer", hint=hint)
    if profile is not None and profile.is_file():
        request.files[profile.name] = profile
        place = f"{_FOLDER}/{profile.name}"
        request.argv = [place if Path(word) == profile else word for word in request.argv]
    if "site" in params and (found := _site(params)):
        _add_site(request, found, params)
    if paths := params.get("uploads"):
        request.upload = read_uploads(paths)
    return request


def _add_site(request: Request, site: SiteFile, params: Mapping[str, Any]) -> None:
    """Send the file of a site of the user's, with its neighbours, and use it there by its name."""
    from ..config.sitefiles import data_folder

    folder, given = site.path.parent, params["site"]
    if folder == data_folder("site_configs"):
        return
    for path in (*folder.glob("*.yaml"), *folder.glob("templates/*.j2")):
        request.files[f"sites/{path.relative_to(folder)}"] = path
    request.env["GPUJOBS_SITE"] = site.name
    words = {str(given): site.name, f"--site={given}": f"--site={site.name}"}
    request.argv = [words.get(word, word) for word in request.argv]
    if given is None and "profile" in params:
        request.argv[1:1] = ["--site", site.name]


# -- the conversation ------------------------------------------------------------------------------
class Session:
    """gpujobs on the login node, in a session of ssh. Ends with the block."""

    def __init__(self, host: ssh.Host) -> None:
        self.host = host
        command = ssh.remote_command(os.environ.get("GPUJOBS_REMOTE", ""))
        self.process, self._stdin, self._stdout = process.start(host.argv(command=command))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()

    def begin(self) -> None:
        """Start gpujobs there; send it first where it is missing. Raises UnavailableError."""
        while (kind := self._next()) != "ready":
            if kind == "python":
                self._package = package()
                name = f"{__version__}-{hashlib.sha256(self._package).hexdigest()}"
                end = "from gpujobs.cli.main import main\nmain(['at-login'])\n"
                program = f"{Path(receive.__file__).read_text(encoding='utf-8')}\n"
                data = f"{program}\nprepare({name!r})\n{end}".encode()
                self.send(b"%d\n" % len(data) + data)
            elif kind == "package":
                progress.write(f"sends gpujobs {__version__} to {self.host.name}")
                size = json.dumps({"size": len(self._package)}).encode()
                self.send(size + b"\n" + self._package)
            else:
                hint = "GPUJOBS_REMOTE=/path/to/python3 names one on the host"
                message = f"{self.host.name} has neither gpujobs nor Python 3.11 or newer on PATH"
                raise UnavailableError(message, hint=hint)

    def _next(self) -> str:
        for line in self._stdout:
            if line.startswith(receive.MARK):
                return str(json.loads(line.removeprefix(receive.MARK))["kind"])
        self._fail()

    def send(self, data: bytes) -> None:
        """Send bytes. Raises UnavailableError."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._stdin.write(rest) :]
        except BrokenPipeError:
            self._fail()

    def _fail(self) -> NoReturn:
        if (code := self.process.wait()) == _LOST:
            raise UnavailableError(f"ssh {self.host.name} failed; its message is above")
        hint = "GPUJOBS_REMOTE=python3 uses this version of gpujobs there"
        raise UnavailableError(
            f"gpujobs does not start on {self.host.name} (exit code {code})", hint=hint
        )

    def output(self) -> Iterator[bytes]:
        """Yield the output of the command, until it ends."""
        while data := os.read(self._stdout.fileno(), 1 << 16):
            yield data

    def end(self) -> int:
        """Return the exit code of the command. Raises UnavailableError if it is not known."""
        code = self.process.wait()
        if code != _LOST and code >= 0:
            return code
        raise UnavailableError(
            f"the connection to {self.host.name} ended before the command",
            hint=f"gpujobs --host {self.host.name} status shows what is submitted",
        )


def state_folder() -> Path:
    """Return the private folder for connections and certificates."""
    from platformdirs import user_state_path

    from ..clusters.folder import private_folder

    folder = user_state_path("gpujobs") / "hosts"
    private_folder(folder)
    return folder


def run_there(host: ssh.Host, request: Request, output: BinaryIO) -> int:
    """Run a command on a login node; return its exit code."""
    with Session(host) as session:
        session.begin()
        session.send(request.message())
        for data in session.output():
            output.write(data)
            output.flush()
        return session.end()


def run_command(
    ctx: click.Context, command: click.Command, words: list[str], **params: Any
) -> None:
    """Run a command on its host, or here; ``words`` and ``params``: of the command line."""
    name = host_of(ctx, params)
    if not name:
        ctx.invoke(command, **params)
        return
    host = ssh.Host(name, state_folder())
    request = make_request(str(command.name), words, params)
    if command.name != "connect":
        sys.exit(run_there(host, request, sys.stdout.buffer))
    buffer = io.BytesIO()
    request.argv.append("--for-host")
    if code := run_there(host, request, buffer):
        sys.exit(code)
    found, stay = json.loads(buffer.getvalue()), not params["as_environment"]
    tunnel.connect(host, found, host.folder / found["id"], stay=stay)
