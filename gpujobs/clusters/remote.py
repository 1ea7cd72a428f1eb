"""Commands on a login node through ssh, with files of this computer; tunnels to clusters there."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import logging
import os
import re
import select
import shlex
import socket
import stat
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NoReturn, TypeVar
from urllib.parse import urlsplit

from ..batch import process, receive, ssh
from ..config.sitefiles import NoSuchSiteError, SiteFile, data_folder, load_site
from ..config.trust import text_without_acts
from ..config.userdefaults import VARIABLE
from ..errors import GpujobsError, InputError, UnavailableError
from ..injob.names import LOOPBACK
from ..injob.network import dask_config
from ..schedulers.answers import reading
from ..text import plural, printable, size_text
from ..version import __version__
from .clusterfolder import OF_STATE, files_below, private_folder, write_atomically

if TYPE_CHECKING:
    from .connect import Connection

logger = logging.getLogger("gpujobs")

LARGEST_UPLOAD = 100 << 20
"""Bytes."""
_PACKAGES = ("gpujobs", "click", "jinja2", "markupsafe", "platformdirs", "ruamel.yaml")
"""All of Python alone, so that they run on any machine."""
_DATE = (1980, 1, 1, 0, 0, 0)
_FAST = 1
"""Level of compression: it is done before each command, and what it makes is seldom sent."""
_LOST = 255
"""The exit code of ssh if there is no connection, or if it ends."""


# -- files -----------------------------------------------------------------------------------------
def pack(files: Mapping[str, Path | bytes]) -> bytes:
    """Return a zip of files by their names in it; they are private, and keep that they can run."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            item, mode = zipfile.ZipInfo(name, _DATE), 0o600
            if isinstance(content, Path):
                mode |= content.stat().st_mode & stat.S_IXUSR
                content = content.read_bytes() if content.is_file() else b""
            item.external_attr = (stat.S_IFREG | mode) << 16
            archive.writestr(item, content, zipfile.ZIP_DEFLATED, _FAST)
    return buffer.getvalue()


def package() -> bytes:
    """Return a zip of gpujobs with what its commands import."""
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


def check_size(files: Mapping[str, Path], option: str) -> None:
    """Log how much is sent. Raises InputError if it is too much; ``option`` is for the message."""
    sizes = [path.stat().st_size for path in files.values() if path.is_file()]
    total = sum(sizes)
    text = f"{plural(len(sizes), 'file')}, {size_text(total)}"
    if total > LARGEST_UPLOAD:
        hint = "copy them with scp or rsync, and set `workdir` to that folder"
        raise InputError(f"{option}: {text} are more than {size_text(LARGEST_UPLOAD)}", hint=hint)
    logger.info("uploads %s", text)


def _templates(folder: Path) -> Iterator[Path]:
    for path in folder.glob("templates/**/*.j2"):
        target = path.resolve()
        if target.suffix == ".j2" and target.is_file():
            yield path


# -- a command, and what is sent with it -----------------------------------------------------------
_FOLDER = "\0"
"""In the words of a request: the folder of its files on the login node."""


def _variables() -> dict[str, str]:
    """Return the variables of the user that count on the login node, too."""
    account = os.environ.get(VARIABLE)
    return {VARIABLE: account} if account else {}


@dataclass
class Request:
    """A command for the login node, with the files that it needs."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=_variables)
    files: dict[str, Path | bytes] = field(default_factory=dict)
    upload: bytes = b""
    place: str = "sent"
    """The folder in `~/.gpujobs` for the files."""

    def add_file(self, name: str, content: Path | bytes) -> str:
        """Send a file; return the word that is its path there."""
        self.files[name] = content
        return self.path(name)

    def path(self, name: str) -> str:
        """Return the word that is the path of a file, or of a folder of files, there."""
        return f"{_FOLDER}/{name}"

    def add_site(self, site: SiteFile) -> None:
        """Send a site of the user's, and use it by its name.

        That is its file, the files beside it that it extends, and its templates. A link is sent
        only if it leads to a template. Received files are sent without the keys that act: there
        they are found by their names.
        """
        folder = site.path.parent
        if folder != data_folder("site_configs"):
            for path in (*site.files, *_templates(folder)):
                if path.is_relative_to(folder):
                    content = text_without_acts(path) if path in site.acting else path
                    self.files[f"sites/{path.relative_to(folder)}"] = content
        self.env["GPUJOBS_SITE"] = site.name

    def message(self) -> bytes:
        """Return all that is sent."""
        data = pack(self.files) if self.files else b""
        name = f"{self.place}/{hashlib.sha256(data).hexdigest()[:16]}"
        head = {"name": name, "size": len(data), "upload": len(self.upload), "env": self.env}
        argv = [word.replace(_FOLDER, f"{receive.HOME}/{name}") for word in self.argv]
        return json.dumps({**head, "argv": argv}).encode() + b"\n" + data + self.upload


MOST_OUTPUT = 2**26
"""Bytes of the answer of a login node that is kept in memory, or of its messages."""
_MOST_LINE = 2**16
_MOST_MESSAGE = 2**16
"""Bytes at the end of the messages, which have the error."""
_LOOK, _LOOK_AT_END = 1.0, 0.01
"""Seconds between two looks at the size of the messages, also after the answer."""


# -- the conversation ------------------------------------------------------------------------------
class Session:
    """gpujobs on the login node, in a session of ssh."""

    def __init__(self, host: ssh.Host, messages: IO[bytes] | None) -> None:
        self.host = host
        self._known = host.connect()
        words = host.argv(command=ssh.remote_command(os.environ.get("GPUJOBS_REMOTE", "")))
        self.process, self._stdin, self.stdout = process.start(words, stderr=messages)
        self._package = b""

    def close(self) -> None:
        """End the session."""
        self.process.terminate()
        self.process.wait()
        self._stdin.close()
        self.stdout.close()

    def begin(self) -> None:
        """Start gpujobs there; send it first where it is missing. Raises UnavailableError."""
        while (kind := self._next()) != "ready":
            if kind == "python":
                self._package = package()
                name = f"{__version__}-{hashlib.sha256(self._package).hexdigest()}"
                start = (
                    f"prepare({name!r})\nfrom gpujobs.cli.main import main\nmain(['at-login'])\n"
                )
                data = Path(receive.__file__).read_bytes() + f"\n{start}".encode()
                self.send(b"%d\n" % len(data) + data)
            elif kind.startswith(receive.PROBLEM):
                raise UnavailableError(f"{self.host.name}: {printable(kind)}", hint=receive.CURE)
            elif kind != "package" or not self._package:
                raise UnavailableError(f"{self.host.name} asks for {kind[:80]!r}, not for gpujobs")
            else:
                logger.info("sends gpujobs %s to %s", __version__, self.host.name)
                size = json.dumps({"size": len(self._package)}).encode()
                self.send(size + b"\n" + self._package)

    def _next(self) -> str:
        while line := self.stdout.readline(_MOST_LINE):
            if line.startswith(receive.MARK):
                with reading([self.host.name]):
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
        code, name = self.process.wait(), self.host.name
        if code == _LOST:
            raise UnavailableError(self._with_reason(f"the connection to {name} ended"))
        message = f"gpujobs does not start on {name} (exit code {code})"
        hint = "GPUJOBS_REMOTE=python3 uses this version of gpujobs there"
        if code == ssh.NOTHING:
            message = f"{name} has neither gpujobs nor Python 3.11 or newer on PATH"
            hint = "load a module in the start-up file there, or GPUJOBS_REMOTE=/path/to/python3"
        raise UnavailableError(message, hint=hint)

    def _with_reason(self, message: str) -> str:
        """Return a message with that of the connection, if it has ended with one."""
        reason = self.host.words()[self._known :].strip()
        return ": ".join(filter(None, [message, reason]))

    def end(self) -> int:
        """Return the exit code of the command. Raises UnavailableError if it is not known."""
        code = self.process.wait()
        if code != _LOST and code >= 0:
            return code
        raise UnavailableError(
            self._with_reason(f"the connection to {self.host.name} ended before the command"),
            hint=f"gpujobs --host {self.host.name} status shows what is submitted",
        )


def login_node(name: str) -> ssh.Host:
    """Return the host ``name``; its private folder has connections and certificates. InputError."""
    from platformdirs import user_state_path

    folder = user_state_path("gpujobs") / "hosts"
    private_folder(folder, OF_STATE)
    sockets = folder
    if len(os.fsencode(folder)) > ssh.LONGEST_FOLDER:
        sockets = Path(tempfile.gettempdir(), f"gpujobs-{os.getuid()}")
        private_folder(sockets, "TMPDIR=FOLDER uses another folder")
    return ssh.Host(name, folder, sockets)


def run(host: ssh.Host, request: Request, output: BinaryIO) -> int:
    """Run a command on a login node; return its exit code.

    Its messages, and those of ssh, go to stderr. Raises UnavailableError.
    """
    with contextlib.closing(Session(host, None)) as session:
        session.begin()
        session.send(request.message())
        while data := os.read(session.stdout.fileno(), 1 << 16):
            output.write(data)
            output.flush()
        return session.end()


_ERRORS = {error.exit_code: error for error in GpujobsError.__subclasses__()}


def output_of(host: ssh.Host, request: Request) -> bytes:
    """Return the output of a command on a login node. Raises its error, or that of ssh.

    UnavailableError also if it writes more than `MOST_OUTPUT`.
    """
    with tempfile.TemporaryFile() as messages:

        def text() -> str:
            messages.seek(max(0, messages.seek(0, os.SEEK_END) - _MOST_MESSAGE))
            return messages.read(_MOST_MESSAGE).decode(errors="replace").strip()

        try:
            with contextlib.closing(Session(host, messages)) as session:
                session.begin()
                session.send(request.message())
                output = _answer(session, messages)
                code = session.end()
        except UnavailableError as error:
            raise UnavailableError(f"{error}\n{text()}") from None
        if code:
            raise _ERRORS.get(code, GpujobsError)(text().rpartition("error: ")[2])
    return output


def _answer(session: Session, messages: IO[bytes]) -> bytes:
    """Return all that a session writes until it ends. Raises UnavailableError if it is too much."""
    output, pipes = bytearray(), [session.stdout.fileno()]
    while pipes or session.process.poll() is None:
        if pipes:
            ready, _, _ = select.select(pipes, [], [], _LOOK)
            part = os.read(pipes[0], 2**16) if ready else b""
            output += part
            if ready and not part:
                pipes.clear()
        else:  # it may still write messages
            time.sleep(_LOOK_AT_END)
        if max(len(output), os.fstat(messages.fileno()).st_size) > MOST_OUTPUT:
            size = size_text(MOST_OUTPUT)
            raise UnavailableError(f"the answer of {session.host.name} has more than {size}")
    return bytes(output)


INTERVAL, LONGEST_INTERVAL = 3.0, 60.0
"""Seconds between two looks at the connection; if it is lost, the interval doubles."""
T = TypeVar("T")


def repeat(name: str, call: Callable[[], T], stop: threading.Event) -> T | None:
    """Return the result of a call that is repeated while ssh fails; None after ``stop``.

    A reason is logged once. ``name``: of the host or the cluster, for the message.
    """
    reason, interval = "", INTERVAL
    while not stop.is_set():
        try:
            return call()
        except UnavailableError as error:
            if str(error) != reason:
                reason = str(error)
                logger.warning("%s: %s (tries again, at least once a minute)", name, reason)
        stop.wait(interval)
        interval = min(2 * interval, LONGEST_INTERVAL)
    return None


class RemoteHandle:
    """A cluster on a login node, for a Python process on this computer; as `ClusterHandle`."""

    status = None
    """The cluster's folder and batch scheduler are on the login node."""

    def __init__(
        self,
        host: str,
        profile: bytes,
        batch_schedulers: tuple[str, ...],
        *,
        site: str | None,
        soonest: bool,
    ) -> None:
        """Submit ``profile``. Raises the errors of `gpujobs submit` there.

        ``batch_schedulers``: that of the host must be one of these; (): any.
        """
        self.host = login_node(host)
        request = Request(["submit"])
        request.argv += ["--soonest"] * soonest
        request.argv += [f"--of={name}" for name in batch_schedulers]
        if name := site or os.environ.get("GPUJOBS_SITE"):
            with contextlib.suppress(NoSuchSiteError):  # the login node may have it
                found = load_site(name)
                request.add_site(found)
                name = found.name
            request.argv += ["--site", name]
        request.argv.append(request.add_file("dask.yaml", profile))
        output = output_of(self.host, request)
        with reading([host]):
            self.id = output.decode().strip()
        if not _NAME.fullmatch(self.id):
            raise UnavailableError(f"{host} has sent {self.id[:80]!r}, which is not a cluster's id")

    def _call(self, *words: str) -> bytes:
        return output_of(self.host, Request(list(words)))

    def connection(self) -> Connection:
        """Return a tunnel to the dask scheduler, once that runs, and keep it; also if ssh fails."""
        from .connect import Connection, security_in

        call = partial(self._call, "connect", self.id, "--for-host", "--wait")
        text = repeat(self.id, call, threading.Event())
        found = read_endpoint(self.host, text or b"")
        tunnel, closing = Tunnel(self.host, found), threading.Event()
        keeper = threading.Thread(target=tunnel.keep, args=(closing,), daemon=True)
        keeper.start()

        def close() -> None:
            closing.set()
            keeper.join()

        return Connection(
            address=tunnel.address,
            security=security_in(tunnel.folder) if found["files"] else None,
            dashboard=tunnel.dashboard,
            folder=tunnel.folder,
            workers_per_job=found["groups"],
            close=close,
        )

    def scale(self, workers: int | None = None, **groups: int) -> None:
        """Change the number of workers, as `ClusterHandle.scale` does."""
        numbers = [f"{group}={number}" for group, number in groups.items()]
        self._call("scale", self.id, *([str(workers)] if workers is not None else numbers))

    def cancel(self) -> None:
        """End the cluster and cancel its jobs."""
        self._call("cancel", self.id)


# -- tunnels to the dask scheduler and to the dashboard of a cluster -------------------------------
_NAME = re.compile(r"\w[\w.@:-]*")
"""Of files here, and in a command that ssh gives to a shell: the login node sends such names."""
_PROTOCOLS = ("tcp", "tls")


def read_endpoint(host: ssh.Host, text: bytes) -> dict[str, Any]:
    """Return `connect.endpoint` as a login node has sent it. UnavailableError for other text."""
    with reading([host.name]):
        found: dict[str, Any] = json.loads(text)
        _check_names(host.name, found)
        texts = [found["address"], *found["files"].values()]
        if not all(isinstance(value, str) for value in texts):
            raise ValueError("a value is not a text")
        if not isinstance(found["dashboard"], int | None):
            raise ValueError("dashboard is not a port")
        if urlsplit(found["address"]).port is None:
            raise ValueError("the address has no port")
    return found


class Tunnel:
    """Tunnels to a cluster on a login node. `keep` opens them again if the connection is lost.

    ``found`` is `connect.endpoint` of the cluster, whose key and certificate are written into a
    private folder. Raises UnavailableError, also for names that are paths or have spaces.
    """

    def __init__(self, host: ssh.Host, found: Mapping[str, Any]) -> None:
        _check_names(host.name, found)
        address = urlsplit(found["address"])
        if address.scheme not in _PROTOCOLS:
            message = f"{found['id']} uses {address.scheme}, for which there is no tunnel"
            raise UnavailableError(message)
        self.folder: Path = host.keys / found["id"]
        """The private folder with the key and the certificate."""
        private_folder(self.folder, OF_STATE)
        for name, content in found["files"].items():
            write_atomically(self.folder / name, content)
        port, self._dashboard_port = free_ports()
        self.address = f"{address.scheme}://{LOOPBACK}:{port}"
        self.config = dask_config(self.folder, address.scheme)
        """Variables with which dask connects."""
        self.dashboard = ""
        """The address of the dashboard; "" if it has none."""
        self._host, self._found = host, found
        self._targets = {port: address.netloc}
        self._through_node: process.Talk | None = None
        if found["dashboard"]:
            self.dashboard = f"http://localhost:{self._dashboard_port}/status"
            if not found["node"]:
                self._targets[self._dashboard_port] = f"{address.hostname}:{found['dashboard']}"
        self._connect()

    def keep(self, stop: threading.Event) -> None:
        """Open the tunnels again whenever the connection is lost, until ``stop``; close them."""
        try:
            self._start_through_node()
            while not stop.wait(INTERVAL):
                if not self._host.is_open():
                    self._reopen(stop)
        finally:
            self._end_through_node()
            for port, address in self._targets.items():
                self._host.forward(port, address, cancel=True)

    def _reopen(self, stop: threading.Event) -> None:
        logger.warning("the connection to %s is lost, and is opened again", self._host.name)
        if repeat(self._host.name, self._connect, stop):
            self._end_through_node()
            self._start_through_node()
            logger.warning("the tunnel is open again")

    def _connect(self) -> bool:
        self._host.connect()
        forwards = (self._host.forward(port, to) for port, to in self._targets.items())
        if problem := next(filter(None, forwards), ""):
            raise UnavailableError(f"the tunnel cannot be opened: {problem}")
        return True

    def _start_through_node(self) -> None:
        """Open a tunnel to a dashboard that listens on the loopback interface of a node."""
        if not self.dashboard or not self._found["node"]:
            return
        login = f"{self._found['user']}@{self._found['node']}"
        target = f"{LOOPBACK}:{self._dashboard_port}:{LOOPBACK}:{self._found['dashboard']}"
        through = f"-oProxyCommand={shlex.join(self._host.argv('-W%h:%p'))}"
        words = ["ssh", "-N", "-oBatchMode=yes", through, f"-L{target}", "--", login]
        self._through_node = process.start(words)

    def _end_through_node(self) -> None:
        if self._through_node is not None:
            self._through_node.process.terminate()
            self._through_node.process.wait()


def _check_names(host: str, found: Mapping[str, Any]) -> None:
    for name in (found["id"], found["user"], found["node"] or LOOPBACK, *found["files"]):
        if not _NAME.fullmatch(name):
            raise UnavailableError(f"{host} has sent {name!r}, which is not a name")


def free_ports() -> list[int]:
    """Return two ports of the loopback interface at which nothing listens."""
    own = (LOOPBACK, 0)
    with socket.create_server(own) as first, socket.create_server(own) as second:
        return [item.getsockname()[1] for item in (first, second)]
