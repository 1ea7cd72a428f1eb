"""Why a program failed: one line, from its output. Pure: no file is read here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import takewhile

_ERROR = re.compile(
    r"error|exception|fatal|fail|cannot|could not|unable|invalid|no such|not found|denied|abort"
    r"|no module named|out of memory",
    re.IGNORECASE,
)
_NOISE = re.compile(
    r"\bINFO\b|resource_tracker|warnings\.warn|UCX +WARN|^\S+ gpujobs: |: line \d+: +\d+ \w+"
)
"""Lines that are no reason: of loggers, of Python's warnings, of bash about a killed process."""
_CONSEQUENCE = re.compile(
    r"srun: (error: \S+: tasks? |Terminating |Job step aborted)"
    r"|slurmstepd\S*: .*CANCELLED|Aborted\b"
)
"""What Slurm and a shell write after a program has failed."""
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d[ T]|\S+ - \S+ - [A-Z]+ - ")
"""The beginning of a line of a logger."""
_PATH = re.compile(r"(?<![\w:])[~.]{0,2}/[^\s:,)\"']+")
"""A path, whose folders may be named after errors."""

_TRACEBACK = "Traceback (most recent call last):"
_HEADER = re.compile(rf"(.*?)(\+ Exception Group )?{re.escape(_TRACEBACK)}\s*")
"""Of a traceback; launchers of ranks may write their number before each line."""
_FRAME = re.compile(r"\s.*|[\^~]+")
"""A line below the header: file, source code, and carets."""
_PLACE = re.compile(r'\bFile ".+", line \d+')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.<>]*(:( .*)?)?")
"""The line of an exception, whatever its words: ``queue.Empty``, ``__main__.Boom: lost``."""
_CHAINED = re.compile(
    r"The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:"
)
_IGNORED = "Exception ignored "
"""Of Python, above the traceback of an exception that ends nothing."""
_IN_GROUP = re.compile(r"\s*[|+] ?")
_PART_OF_GROUP = re.compile(r"[-+]*-{4,} \S+ -{4,}")
_SHORT = 8
"""Characters of a message that may be in another one by chance."""

_WRAPPER = "Error during deserialization"
"""Of dask: says nothing about the exception that caused it."""
_DESERIALIZE = "deserializ"
_IMPORT_PATH = "workers import from `workdir`, the folder of the program, and PYTHONPATH"
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named \S+")
_NO_MPI = re.compile(r"No module named '?(mpi4py|dask_mpi)\b")
_KEYWORDS = re.compile(r"ValueError: Unexpected keyword arguments: ")
"""Of dask's `Client(n_workers=2)`, which has an address in a job."""
_NO_GPU = re.compile(r"NVMLError_(LibraryNotFound|DriverNotLoaded|NotFound)|libnvidia-ml\.so")
"""NVML found no driver, or no device."""


class _Rank(IntEnum):
    LINE = 0
    CONSEQUENCE = 1
    ERROR = 2


def reason_of(text: str) -> str:
    """Return the line of an output that says best why its program failed; "" if none does.

    That is the last error: the exception of a traceback, whatever its words, or a line with a word
    such as "cannot". Without one, it is the last line with a letter or digit. Neither is ever a
    place in a file, or the source code of a traceback.
    """
    _, line = _best(text)
    line = in_plain_words(line)
    if _DESERIALIZE in text:  # a task or its arguments
        line = _NO_MODULE.sub(f"\\g<0> ({_IMPORT_PATH})", line, count=1)
    return line


def error_of(text: str) -> str:
    """Return `reason_of` if it is an error, else ""."""
    rank, _ = _best(text)
    return reason_of(text) if rank > _Rank.LINE else ""


def in_plain_words(line: str) -> str:
    """Return the reason in ``line``, explained if it is an error of NVML, MPI or `Client(…)`."""
    if _NO_MPI.search(line):
        return f"{line}: pip install 'gpujobs[mpi]' into the jobs' Python"
    if _KEYWORDS.search(line):
        return (
            f"{line}: in a job, Client() connects to the job's cluster, whose size the profile says"
        )
    if not _NO_GPU.search(line):
        return line
    return f"the node has no NVIDIA driver, or the job has no GPU ({line})"


# -- the errors in an output -----------------------------------------------------------------------
def _best(text: str) -> tuple[_Rank, str]:
    """Return the last one of the gravest findings."""
    best = (_Rank.LINE, "")
    for found in _findings(text.splitlines()):
        if found[0] >= best[0]:
            best = found
    return best


def _findings(lines: Sequence[str]) -> Iterator[tuple[_Rank, str]]:
    """Yield exceptions and other lines in their order; exceptions of one chain as one."""
    chain: list[str] = []
    chained = False
    at = 0
    while at < len(lines):
        line = lines[at]
        if _HEADER.fullmatch(line) or _is_place(line):
            ignored = at > 0 and lines[at - 1].startswith(_IGNORED)
            length, exception = _exception(lines[at:])
            at += length
            if exception and not ignored:
                chain = [*chain, exception] if chained else [exception]
                yield _Rank.ERROR, _chain_text(chain)
            chained = False
            continue
        at += 1
        if _CHAINED.fullmatch(line):
            chained = True
        elif not _is_noise(line):
            chained = False
            yield _rank(line), line.strip()


def _is_place(line: str) -> bool:
    """Return whether a traceback begins here: that of a syntax error has no header."""
    return line.startswith(" ") and bool(_PLACE.match(line.lstrip()))


def _is_noise(line: str) -> bool:
    nothing = not any(map(str.isalnum, line))
    return nothing or bool(_NOISE.search(line) or _PLACE.search(line) or line.startswith(_IGNORED))


def _rank(line: str) -> _Rank:
    if _CONSEQUENCE.match(line):
        return _Rank.CONSEQUENCE
    return _Rank.ERROR if _ERROR.search(_PATH.sub("", line)) else _Rank.LINE


def _chain_text(chain: Sequence[str]) -> str:
    """Return the first and the last exception of a chain, unless one repeats the other."""
    first, last = chain[0], chain[-1]
    if _WRAPPER in last:
        return first
    message = first.partition(": ")[2] or first
    if first == last or (len(message) > _SHORT and message in last):
        return last
    return f"{first}; then {last}"


# -- one traceback ---------------------------------------------------------------------------------
def _exception(lines: Sequence[str]) -> tuple[int, str]:
    """Return how many lines a traceback has, and its exception as one line; "" if it is cut off."""
    header = _HEADER.fullmatch(lines[0])
    if header is None:
        return _traceback(lines)
    if header[2]:
        own = takewhile(_IN_GROUP.match, lines)
        return _group([_IN_GROUP.sub("", line, count=1) for line in own])
    prefix = header[1]
    if not prefix or not "".join(lines[1:2]).startswith(prefix):
        return _traceback(lines)
    own = takewhile(lambda line: line.startswith(prefix), lines)
    return _traceback([line.removeprefix(prefix) for line in own])


def _traceback(lines: Sequence[str]) -> tuple[int, str]:
    """Do `_exception` for lines without a prefix or a frame."""
    at = 1
    while at < len(lines) and (_FRAME.fullmatch(lines[at]) or _NOISE.search(lines[at])):
        at += 1
    if at == len(lines) or not _EXCEPTION.fullmatch(lines[at]):
        return at, ""
    message = [lines[at]]
    at += 1
    while at < len(lines) and _continues(lines[at]):
        message.append(lines[at])
        at += 1
    return at, " ".join(line.strip() for line in message)


def _continues(line: str) -> bool:
    """Return whether a line belongs to the message of the exception above it."""
    if not any(map(str.isalnum, line)) or line.startswith(_IGNORED):
        return False
    others = (_HEADER.fullmatch, _NOISE.search, _CONSEQUENCE.match, _LOGGED.match)
    return not any(other(line) for other in others)


def _group(lines: Sequence[str]) -> tuple[int, str]:
    """Return how many lines a group of exceptions has, and all of them as one line."""
    parts: list[list[str]] = [[]]
    for line in lines:
        if _PART_OF_GROUP.fullmatch(line):
            parts.append([])
        else:
            parts[-1].append(line)
    _, own = _traceback(parts[0])
    found = [_best("\n".join(part))[1] for part in parts[1:]]
    return len(lines), ": ".join(filter(None, (own, "; ".join(filter(None, found)))))


# -- messages of a launcher ------------------------------------------------------------------------
_BOX = re.compile(r"^-{20,}$", re.MULTILINE)
"""Open MPI puts its messages between lines of dashes."""


def launcher_reason_of(text: str) -> str:
    """Return the first paragraph of the first message of an MPI launcher, as one line.

    The last line of such a message is a general advice. A message of the first moment, about the
    user root, has a line of dashes only at its end.
    """
    boxes = [box.strip() for box in _BOX.split(text)]
    if boxes[1:] == [""]:
        boxes.insert(0, "")
    if len(boxes) < 3:
        return reason_of(text)
    paragraph = boxes[1].partition("\n\n")[0]
    return " ".join(paragraph.split())
