"""The site's ``directory``: where the folders of clusters are."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import InputError

_VARIABLE = re.compile(r"\$(?:(?P<name>\w+)|\{(?P<braced>\w+)(?::-(?P<default>[^}]*))?\})")


def expand_directory(text: str) -> str:
    """Return the site's ``directory`` with ~ and environment variables expanded on this host.

    Raises InputError if a variable without a default is unset or empty.
    """

    def value(found: re.Match[str]) -> str:
        name, default = found["name"] or found["braced"], found["default"]
        if os.environ.get(name):
            return os.environ[name]
        if default is None:
            raise InputError(f"the site's `directory` is {text}, but ${name} is not set here")
        return default

    return str(Path(_VARIABLE.sub(value, text)).expanduser())
