"""The results of checks: how they are printed, and the record of `gpujobs sites verify`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

from ..injob.folder import DamagedError, parse_json, read_file
from ..text import clean, wrapped


class CheckState(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One check: its subject, how it ended, the facts it found, and a remedy if one is known."""

    name: str
    state: CheckState
    result: str
    remedy: str = ""


def passed(name: str, result: str) -> Check:
    """Return a check that is ok."""
    return Check(name, CheckState.OK, result)


def warning(name: str, result: str, remedy: str = "") -> Check:
    """Return a check that found a limitation; the site can be used."""
    return Check(name, CheckState.WARNING, result, remedy)


def failed(name: str, result: str, remedy: str = "") -> Check:
    """Return a check that found an error; clusters will not work."""
    return Check(name, CheckState.FAILED, result, remedy)


def any_failed(checks: Sequence[Check]) -> bool:
    """Return whether a check has failed."""
    return any(check.state is CheckState.FAILED for check in checks)


def checks_text(checks: Sequence[Check], columns: int | None = None) -> str:
    """Return a line for each check, and another one for its remedy; ``columns``: see `wrapped`."""
    width = max(len(check.name) for check in checks)
    indent = len("warning") + width + 4
    lines = []
    for check in checks:
        text = f"{check.state:<7}  {check.name:<{width}}  {check.result}"
        lines.append(wrapped(text, columns, indent))
        if check.remedy:
            lines.append(wrapped(f"{'':<{indent}}-> {check.remedy}", columns, indent + 3))
    return "\n".join(lines)


def checks_json(checks: Sequence[Check]) -> dict[str, object]:
    """Return the checks as JSON."""
    return {"version": 2, "checks": [asdict(check) for check in checks]}


# -- the record, ``evidence/NAME.json``: no names of people or hosts -------------------------------
NOT_VERIFIED = "# not verified"
"""A comment in a site file: the source does not give the values of this line."""
CONFIRMED, CORRECTED, OPEN = "confirmed", "corrected", "open"
"""What became of a line that is marked: the site has these values, others, or nothing is known."""


@dataclass(frozen=True)
class MarkedLine:
    """A line of a site file that is marked as not verified; ``found``: why it has its state."""

    key: str
    digest: str
    """Of its text without the comment: evidence about another text is no evidence."""
    state: str = OPEN
    found: str = ""


@dataclass(frozen=True)
class Evidence:
    """What `sites verify` found; texts are redacted."""

    site: str
    date: str
    gpujobs: str
    scheduler: str
    """Name and version of the batch scheduler."""
    software: Mapping[str, str]
    """Versions in the job, also of the driver and of UCX."""
    gpus: list[str]
    """The models."""
    interface: str
    """`network.interface` of the file."""
    rates: Mapping[str, str]
    """Protocol and GB/s by place: "in a job", "between nodes"."""
    seconds: Mapping[str, float]
    """By trial."""
    checks: list[Check]
    findings: list[str]
    """Of `sites check --live`, with the line of the file."""
    marked: list[MarkedLine]
    version: int = 1

    @property
    def failed(self) -> list[str]:
        """What failed: the file, or checks by their names."""
        names = ["site file"] * bool(self.findings)
        names += (check.name for check in self.checks if check.state == CheckState.FAILED)
        return list(dict.fromkeys(names))

    @property
    def summary(self) -> str:
        """One line: ``2026-11-24, gpujobs 0.2.0; failed: cancel``."""
        text = f"{self.date}, gpujobs {self.gpujobs}; failed: {', '.join(self.failed)}"
        return clean(text.removesuffix("; failed: "))

    def json(self) -> str:
        """Return the content of its file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def text(self) -> str:
        """Return the checks, the findings and what became of the marked lines."""
        marked = (f"{line.state:<9}  {line.key}  {line.found}" for line in self.marked)
        return "\n".join([checks_text(self.checks), *self.findings, *marked])

    def issue(self) -> str:
        """Return the text of a contribution, in Markdown."""
        return (
            f"# Evidence of the site {self.site}: {self.summary}\n\n```text\n{self.text()}\n```\n\n"
            f"site_configs/evidence/{self.site}.json:\n\n```json\n{self.json()}```"
        )


def evidence_path(site_path: Path) -> Path:
    """Return the path of the record of a site file."""
    return site_path.parent / "evidence" / f"{site_path.stem}.json"


def read_evidence(path: Path) -> Evidence | None:
    """Return the record in a file; None if there is none, or if it is damaged."""
    try:
        found: Evidence = parse_json(read_file(path.resolve()), Evidence)
    except (OSError, DamagedError):
        return None
    return found


def marked_lines(text: str) -> Iterator[tuple[int, MarkedLine]]:
    """Yield each line of a site file that is marked as not verified, with its number."""
    for number, line in enumerate(text.splitlines(), 1):
        value, mark, _ = line.partition(NOT_VERIFIED)
        if mark:
            digest = sha256(value.strip().encode()).hexdigest()[:16]
            yield number, MarkedLine(value.strip(" -").partition(":")[0], digest)


def not_verified(path: Path, evidence: Evidence | None) -> int:
    """Return how many lines of a site file are marked, and not confirmed by its evidence."""
    known = set()
    if evidence:
        known = {line.digest for line in evidence.marked if line.state == CONFIRMED}
    lines = marked_lines(path.read_text(encoding="utf-8"))
    return sum(line.digest not in known for _, line in lines)


_ADDRESS = re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b(:\d+)?")
_GROUP = r"[\da-f]{1,4}"
_GROUPS = rf"({_GROUP}(:{_GROUP}){{0,6}})?"
_IPV6 = re.compile(
    rf"(?<![\w:])\[?(({_GROUP}:){{7}}{_GROUP}|{_GROUPS}::{_GROUPS})(%\w+)?\]?(:\d+)?", re.I
)
_PART = r"[^\s:,;'\"()/]"
_PATH = re.compile(
    rf"(?<![\w/<~])~[A-Za-z_][\w.-]*(/(/|{_PART})*)?"  # of another user
    rf"|((?<![\w/<~:])~?/+|(?<=:)/|(?<=://)/+){_PART}(/|{_PART})*"
)


def _host_pattern(name: str) -> str:
    """Return the pattern of a host, also with an interface (``gpu01-ib0``), or of a domain."""
    below = r"(?:[\w-]+\.)*" if "." in name else ""
    return rf"{below}{re.escape(name)}(?:-\w+)*(?:\.[a-z][\w-]*)*"


def redactor(names: Mapping[str, Iterable[str]]) -> Callable[[str], str]:
    """Return a function that replaces ``names`` (by what they are), paths and addresses."""
    groups = []
    for kind, listed in sorted(names.items(), key=lambda item: item[0] != "host"):
        longest_first = sorted(filter(None, listed), key=len, reverse=True)
        patterns = [
            _host_pattern(name) if kind == "host" else re.escape(name) for name in longest_first
        ]
        groups.append(f"(?P<{kind}>{'|'.join(patterns) or '(?!)'})")
    known = re.compile(rf"(?<![\w.-])(?:{'|'.join(groups) or '(?!)'})(?![\w-])", re.I)

    def redact(text: str) -> str:
        text = known.sub(lambda found: f"<{found.lastgroup}>", text)
        for pattern in (_ADDRESS, _IPV6):
            text = pattern.sub("<address>", text)
        return _PATH.sub("<path>", text)

    return redact
