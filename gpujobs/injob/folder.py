"""The cluster's folder: its files, their shapes, and the one reader of all of them.

docs/in-a-job.md lists the files. Another process, a full disk or a user may have damaged any
of them: the reader opens regular files only, and checks size and types. The ledger uses it, too.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import GenericAlias
from typing import IO, Annotated, Any, Optional, TypedDict, get_args, get_origin, get_type_hints

from .log import log
from .names import ARCHIVE, OWNER, VERDICT

JsonObject = dict[str, Any]

EXIT_FAILED = 70
"""EX_SOFTWARE: gpujobs ended the cluster because of an error, not the user's command."""
EXIT_STOPPED = 143
"""128 + SIGTERM: the batch scheduler stopped the job."""
SCRIPT_ENDED = "script-ended"
"""File of the rank that ran the user's script in all MPI ranks: the script is over."""
TRANSPORT = "transport.json"
"""File with the `Choice` of dask's protocol; see `transport`."""
AFTER = "after"
"""File that names another cluster, after whose end this one starts."""
RATES = "rates"
"""File with measured rates by kind of node, as the user's state folder has them."""
MOST_BYTES = 2**24
"""Of a file that is read as a whole; a larger one is damaged."""
MOST_BYTES_OF_LINES = 2**26
_MOST_BYTES_OF_TEXT = 2**16
_MOST_DIGITS = 18
_INTEGERS = range(-(2**53), 2**53)
"""Integers that are exact in every program."""
_MOST_REAL = 1e11
"""Of seconds since the epoch (the year 5138), rates and percentages. None is negative."""
_NUMBER = re.compile("[0-9]+")
_TYPES = {
    str: "a text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list",
}
RESERVE = "reserve"
"""File that is removed to make room for `ended` if the disk, or the quota, is full."""
RESERVE_BYTES = 2**18  # a new name takes 128 KiB of a quota of btrfs


def head_folder(attempt: int) -> str:
    """Return the folder whose maker is the head of ``attempt``."""
    return f"head-{attempt}"


def owner_file(attempt: int) -> str:
    """Return the file that says which job the head is."""
    return f"{head_folder(attempt)}/owner"


def heartbeat_file(attempt: int) -> str:
    """Return the file that the head writes again and again."""
    return f"{head_folder(attempt)}/heartbeat"


class EndKind(str, Enum):
    """Why a cluster has ended."""

    DONE = "done"
    """`run` exited with 0."""
    FAILED = "failed"
    """An error, or `run` exited with another code."""
    CANCELLED = "cancelled"
    """By `gpujobs cancel`, or by the batch scheduler."""
    WALLTIME = "walltime"
    """The head's job reached its walltime before `run` exited."""
    IDLE = "idle"
    """The cluster had no work for too long."""
    CLOSED = "closed"
    """The Python process that owns the cluster closed it."""
    SHUTDOWN = "shutdown"
    """A client called ``client.shutdown()``."""


@dataclass(frozen=True)
class Ended:
    """The contents of the file `ended`."""

    kind: EndKind
    exit_code: int
    reason: str = ""
    job: int | None = None
    """Number of the job that ended the cluster; None if that was no job."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Ended:
        """Return an `Ended` from its JSON, in which keys may be missing or of a later version."""
        exit_code, reason = value.get("exit_code", EXIT_FAILED), str(value.get("reason") or "")
        try:
            kind = EndKind(value.get("kind"))
        except ValueError:
            kind = EndKind.FAILED if exit_code else EndKind.DONE
        return cls(kind, exit_code, reason, value.get("job"), value.get("time", 0.0))

    def json(self) -> str:
        """Return one line of JSON."""
        return json.dumps({**asdict(self), "kind": self.kind.value}) + "\n"


# -- the reader ------------------------------------------------------------------------------------
class DamagedError(ValueError):
    """A file cannot be read, or a value in it is wrong; the message says which, and why."""

    def of(self, path: Path) -> DamagedError:
        """Return the error with the name of the file."""
        message = str(self)
        return DamagedError(message if str(path) in message else f"{path} is damaged: {message}")


class UnreadableError(DamagedError):
    """The file system refuses a file, whose content may be right."""


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file to read it. Raises FileNotFoundError, or DamagedError.

    Neither a pipe without a writer nor a link to an endless device can stop the reader.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        if number in (errno.ENOENT, errno.ESTALE):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        if number == errno.ELOOP:
            raise DamagedError(f"{path} cannot be read: it is a symbolic link") from None
        raise UnreadableError(f"{path} cannot be read: {os.strerror(number or 0)}") from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise DamagedError(f"{path} cannot be read: it is not a regular file")


def read_file(path: Path, size: int = MOST_BYTES) -> str:
    """Return the text of a file of at most ``size``. Raises FileNotFoundError, or DamagedError."""
    with bounded(path, size) as file:
        return file.read().decode(errors="replace")


def read_lines(path: Path, shape: Any) -> Iterator[Any]:
    """Yield the JSON in the lines of a file, which have ``shape``; others are left out.

    Raises DamagedError if the file itself cannot be read. A missing file has no lines.
    """
    try:
        with bounded(path, MOST_BYTES_OF_LINES) as file:
            for line in file:
                with contextlib.suppress(DamagedError):  # half written, or damaged
                    yield parse_json(line.decode(errors="replace"), shape)
    except FileNotFoundError:
        return


@contextlib.contextmanager
def bounded(path: Path, size: int) -> Iterator[IO[bytes]]:
    """Open a regular file of at most ``size``. Raises FileNotFoundError, or DamagedError."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > size:
            raise DamagedError(f"{path} is damaged: it has more than {size >> 10} KiB")
        try:
            yield file
        except OSError as error:
            raise UnreadableError(f"{path} cannot be read: {error.strerror}") from None


def parse_json(text: str, shape: Any) -> Any:
    """Return the JSON in ``text`` as ``shape``; see `typed`. Raises DamagedError."""
    try:
        return typed(json.loads(text, parse_int=_integer), shape)
    except RecursionError:
        raise DamagedError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise DamagedError(f"it is not JSON: {error}") from None


def _integer(text: str) -> float:
    return int(text) if len(text) <= _MOST_DIGITS else math.inf


def typed(value: Any, shape: Any, place: str = "") -> Any:
    """Return ``value``, from JSON, as ``shape``. Raises DamagedError that names the place.

    ``shape`` is a type: a scalar, an enum, ``Annotated[int, range]``, ``Optional``, a list or tuple
    of one type, a mapping from names, a TypedDict or a dataclass. Missing keys are left out, as
    are those with null, but those that a dataclass lacks are an error.
    """
    if shape in _TYPES:
        return _checked(value, _is_scalar(value, shape), _TYPES[shape], place)
    if shape is Any:
        return value
    if isinstance(shape, type) and issubclass(shape, Enum):
        return shape(_checked(value, value in [one.value for one in shape], "known", place))
    origin, arguments = get_origin(shape), get_args(shape)
    if type(None) in arguments:
        return None if value is None else typed(value, arguments[0], place)
    if origin is Annotated:
        return _checked(
            typed(value, arguments[0], place), value in arguments[1], "in bounds", place
        )
    if origin in (list, tuple):
        _checked(value, isinstance(value, list), _TYPES[list], place)
        return origin(typed(item, arguments[0], f"{place}[]") for item in value)
    return _object(_checked(value, isinstance(value, dict), "an object", place), shape, place)


def _shape(*, required: bool = False, **keys: Any) -> Any:
    """Return the type of an object with ``keys``, which are all `required`, or may be missing."""
    return TypedDict("_Shape", keys, total=required)  # type: ignore[operator]


def _object(value: Mapping[str, Any], shape: Any, place: str) -> Any:
    prefix = f"{place}." if place else ""
    if get_origin(shape):
        kind = get_args(shape)[1]
        return {name: typed(item, kind, f"{prefix}{name}") for name, item in value.items()}
    hints, required, nullable = _keys(shape)
    for name in required:
        _checked(value, name in value, "there", f"{prefix}{name}")
    found = {
        name: typed(value[name], hint, f"{prefix}{name}")
        for name, hint in hints.items()
        if name in value
        if value[name] is not None or name in required or name in nullable
    }
    if not is_dataclass(shape):
        return found
    for name in value.keys() - hints.keys():
        _checked(value, False, "known", f"{prefix}{name}")
    return shape(**found)  # type: ignore[operator]


@cache
def _keys(shape: Any) -> tuple[dict[str, Any], frozenset[str], frozenset[str]]:
    """Return the shapes of all keys, which keys an object must have, and which may be null."""
    hints = get_type_hints(shape, include_extras=True)
    nullable = frozenset(name for name, hint in hints.items() if type(None) in get_args(hint))
    if not is_dataclass(shape):
        return hints, frozenset(shape.__required_keys__), nullable
    without = (one for one in fields(shape) if one.default is one.default_factory is MISSING)
    return hints, frozenset(one.name for one in without), nullable


def _is_scalar(value: object, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float) and 0 <= value <= _MOST_REAL  # type: ignore[operator]
    if type(value) is not kind:
        return False
    if kind is int:
        return value in _INTEGERS
    return kind is not str or "\0" not in value  # type: ignore[operator]


def _checked(value: Any, fits: bool, wanted: str, place: str) -> Any:
    if not fits:
        raise DamagedError(f"{f'`{place}`' if place else 'it'} is not {wanted}")
    return value


# -- the shapes of the files -----------------------------------------------------------------------
class Gpu(TypedDict, total=False):
    """The first GPU of a worker. ``uuid`` is None if it has none."""

    node: str
    uuid: Optional[str]
    model: Optional[str]
    memory: Optional[int]
    """Bytes."""
    fast: list[str]
    """Fast connections of the GPU and its node: InfiniBand, NVLink."""
    error: str
    """Why NVML did not report more than this."""
    others: list[Gpu]
    """The other GPUs of a worker that has several."""
    sharing: int
    """How many workers may have this GPU, if these are several."""
    mps: bool
    """Whether they share it through CUDA's MPS."""


def all_gpus(gpu: Gpu | None) -> list[Gpu]:
    """Return the GPUs of a worker that have a UUID."""
    if not gpu:
        return []
    return [one for one in (gpu, *gpu.get("others", [])) if one.get("uuid")]


class Binding(TypedDict, total=False):
    """CPUs, cores and NUMA nodes of a worker, those near its GPUs, and why it is not there only."""

    cpus: str
    cores: int
    nodes: str
    gpu_nodes: str
    reason: str


class _Start(TypedDict):
    job: int
    """Number."""
    id: str
    """Of the batch scheduler, as in the claim."""
    name: str
    """Of this start, as in the events of the job."""
    node: str
    started: float


class Run(_Start, total=False):
    """The job that has a worker, since its last start."""

    setup: str
    """Which lines of its `setup` failed."""


class RegisteredWorker(TypedDict, total=False):
    """A worker that is connected to the dask scheduler."""

    address: str
    threads: int
    gpu: Optional[Gpu]
    binding: Optional[Binding]
    memory: int
    """Limit of its memory in bytes; 0: none. Missing in files of an older gpujobs."""
    run: Optional[Run]
    """None if that is not known."""


class _Restarts(TypedDict):
    restarts: int
    limit: int
    """Bytes."""


class OverMemory(_Restarts, total=False):
    """A worker that was restarted, or is paused, because of its memory."""

    paused: int
    """Bytes that it used when it was paused; missing while it runs."""


_MEASURED = _shape(within=float, between=float, problem=str)
_MEASURED_BY_NAME = GenericAlias(dict, (str, _MEASURED))
_CHOICE = _shape(
    scheme=str,
    reason=str,
    measured=_MEASURED_BY_NAME,
    environ=Optional[dict[str, str]],
    remark=str,
    kind=str,
)
_VERDICT = _shape(
    required=True,
    time=float,
    gone=dict[str, str],
    possible=list[str],
    head=bool,
    unlisted=dict[str, float],
    undecided=list[int],
    asked=bool,
    usable=bool,
)
_OWNER = _shape(job=int, node=str)
SHAPES: dict[str, Any] = {
    "ended": _shape(kind=str, exit_code=int, reason=str, job=int, time=float),
    TRANSPORT: _CHOICE,
    VERDICT: _VERDICT,
    "head-*/owner": _OWNER,
    "head/owner": _OWNER,  # of a cluster of an earlier gpujobs
    OWNER: _shape(required=True, host=str, pid=int, started=int, kernel=str),
    "rank-error": _shape(required=True, exit_code=int, reason=str),
    AFTER: _shape(required=True, cluster=str, folder=str, any_end=bool),
    RATES: GenericAlias(dict, (str, _shape(required=True, time=float, measured=_MEASURED_BY_NAME))),
    "jobs/*.node": dict[str, str],
}
"""Of the files with one JSON object, by name; `*` stands for a number."""


class Folder:
    """The cluster's folder: atomic writes, and reads that never fail."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    @property
    def cluster_id(self) -> str:
        """The cluster's id."""
        return self.path.name

    @property
    def logs(self) -> Path:
        """The folder of the logs."""
        return self.path / "logs"

    @property
    def archive(self) -> Path:
        """The file with this package."""
        return self.path / ARCHIVE

    def write(self, name: str, value: object) -> None:
        """Replace the file ``name`` atomically by ``value`` as JSON."""
        temporary = self.path / f"{name}.{os.urandom(6).hex()}"
        temporary.write_text(json.dumps(value) + "\n", encoding="utf-8")
        temporary.replace(self.path / name)

    def append(self, name: str, lines: Iterable[str]) -> None:
        """Append lines to the file ``name``, which one process writes. Raises OSError.

        It is opened for that, because NFS shows others only what is written in a closed file. It
        begins with a line feed: half a line before it, of a full disk, spoils only itself.
        """
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write("".join(("\n", *(f"{line}\n" for line in lines))))

    def create(self, name: str, text: str) -> bool:
        """Create the file ``name``; return False if it exists already, or cannot be written."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            descriptor = os.open(self.path / name, flags, 0o600)
        except OSError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        return True

    def load(self, name: str, shape: Any = None) -> JsonObject:
        """Return the JSON object in the file ``name``, {} if it is missing or empty.

        It has the ``shape``, or else that of `SHAPES`. Raises DamagedError.
        """
        path = self.path / name
        try:
            text = read_file(path)
            shape = shape or SHAPES.get(_NUMBER.sub("*", name), dict[str, Any])
            found: JsonObject = parse_json(text, shape) if text.strip() else {}
        except FileNotFoundError:
            return {}
        except DamagedError as error:
            raise error.of(path) from None
        return found

    def read(self, name: str) -> JsonObject:
        """Return the JSON object in the file ``name``; {} if it is missing or damaged."""
        try:
            return self.load(name)
        except DamagedError:
            return {}

    def load_text(self, name: str) -> str:
        """Return the text in the file ``name``, "" if it is missing. Raises DamagedError."""
        try:
            return read_file(self.path / name, _MOST_BYTES_OF_TEXT).strip()
        except FileNotFoundError:
            return ""

    def read_text(self, name: str) -> str:
        """Return the text in the file ``name``, stripped; "" if it is missing or damaged."""
        try:
            return self.load_text(name)
        except DamagedError:
            return ""

    def names(self) -> set[str]:
        """Return the names of all files: NFS caches for a minute that a single one was missing."""
        try:
            return set(os.listdir(self.path))  # noqa: PTH208 - names, not Paths
        except OSError:
            return set()

    def end(self, ended: Ended) -> bool:
        """Write `ended`; return False if another process has written it before, or it cannot."""
        try:
            return self.try_to_end(ended)
        except OSError as error:
            log(f"cannot write {self.path / 'ended'}: {error}")
            return False

    def try_to_end(self, ended: Ended) -> bool:
        """Do `end`, but raise OSError if the file cannot be written."""
        try:
            return self._write_ended(ended)
        except OSError:  # the disk may be full
            (self.path / RESERVE).unlink(missing_ok=True)
            return self._write_ended(ended)

    def _write_ended(self, ended: Ended) -> bool:
        temporary = self.path / f"ended.{os.urandom(6).hex()}"
        try:
            temporary.write_text(ended.json(), encoding="utf-8")
            os.link(temporary, self.path / "ended")
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        return True


def modified_at(path: Path) -> float:
    """Return when a file was written, by the clock of the file server.

    Only times by that clock are comparable: the clocks of two nodes may differ by minutes. The file
    is opened, since NFS caches the attributes of a file for a minute. Raises OSError.
    """
    try:
        with open_file(path) as file:
            return os.fstat(file.fileno()).st_mtime
    except DamagedError as error:
        raise OSError(str(error)) from None
