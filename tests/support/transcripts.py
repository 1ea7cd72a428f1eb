"""Output of real batch schedulers: ``tests/data/transcripts/NAME/FILE``, a section per command."""

from __future__ import annotations

import re
from pathlib import Path

from gpujobs.schedulers import CommandResult

FOLDER = Path(__file__).parents[1] / "data" / "transcripts"


SQUEUE_HEADER = "ARRAY_JOB_ID|ARRAY_TASK_ID|STATE|NODELIST|START_TIME|REASON|NAME\n"
"""The header of `squeue` for the query of jobs; that of the search has the first and the last column."""
SQUEUE_FOUND_HEADER = "ARRAY_JOB_ID|NAME\n"


def recorded(name: str, file: str, title: str) -> CommandResult:
    """Return the output of a section, and the last exit code (None if the command did not end)."""
    sections = re.split(r"^### ", (FOLDER / name / file).read_text(), flags=re.M)
    text = next(section for section in sections if section.split("\n", 1)[0] == title)
    command = re.search(r"^\$ (.*)$", text, re.M)
    code = re.search(r"^--- exit (\w+)$", text, re.M)
    parts = dict(re.findall(r"^--- (stdout|stderr)\n(.*?)(?=^--- )", text, re.M | re.S))
    assert command and code
    ended = int(code[1]) if code[1].isdigit() and code[1] != "124" else None
    return CommandResult(
        tuple(command[1].split()), ended, parts.get("stdout", ""), parts.get("stderr", "")
    )
