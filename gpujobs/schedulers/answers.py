"""Read the answers of commands: what cannot be read is an error of gpujobs, not of Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePath

from ..errors import GpujobsError, UnavailableError


@contextmanager
def reading(commands: Iterable[str]) -> Iterator[None]:
    """Raise UnavailableError for whatever a parser of the answers of ``commands`` raises.

    Commands may be added to a list while they are run.
    """
    try:
        yield
    except GpujobsError:
        raise
    except Exception as error:  # an answer may be cut anywhere, so any exception is possible
        names = " or ".join(dict.fromkeys(PurePath(command).name for command in commands))
        cause = f"{type(error).__name__}: {error}"
        message = f"the answer of {names} cannot be read: {cause[:200]}"
        raise UnavailableError(message, hint="try again later") from error
