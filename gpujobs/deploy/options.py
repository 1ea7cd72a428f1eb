"""Options of a cluster object that are not part of the profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from .jobqueue import Configuration

CONFIGURABLE = ("log_directory", "scheduler_options")
"""Options that the user's dask configuration may have."""


def check_mapping(place: str, value: object) -> None:
    """Raise InputError if a value, named ``place`` in the message, is not a mapping."""
    if not isinstance(value, Mapping):
        message = f"{place}: {value!r} is not a mapping"
        raise InputError(message, hint="scheduler_options={'dashboard_address': ':8787'}")


@dataclass(frozen=True)
class ClusterOptions:
    """See `GPUJobQueueCluster` for the meaning of each."""

    scheduler: str = "local"
    scheduler_options: dict[str, Any] = field(default_factory=dict)
    scheduler_options_place: str = "scheduler_options"
    """Names them in messages."""
    log_directory: Path | None = None
    asynchronous: bool = False
    loop: Any = None
    silence_logs: Any = "error"
    quiet: bool = False

    @classmethod
    def of(
        cls, values: Mapping[str, Any], configuration: Configuration | None = None
    ) -> ClusterOptions:
        """Return the options with these values; None stands for the default. Raises InputError.

        ``configuration`` is the user's dask configuration, which replaces the defaults.
        """
        configured = configuration or Configuration()
        given = {name: value for name, value in configured.values.items() if name in CONFIGURABLE}
        if "scheduler_options" in given and values.get("scheduler_options") is None:
            given["scheduler_options_place"] = configured.place("scheduler_options")
        given.update({name: value for name, value in values.items() if value is not None})
        if logs := given.get("log_directory"):
            if not isinstance(logs, str | Path):
                raise InputError(f"log_directory: {logs!r} is not the path of a folder")
            given["log_directory"] = Path(logs).expanduser()
        options = cls(**given)
        if options.scheduler not in ("local", "job"):
            raise InputError(f"scheduler: {options.scheduler!r} is neither 'local' nor 'job'")
        place = options.scheduler_options_place
        check_mapping(place, options.scheduler_options)
        if options.scheduler_options and not options.local_scheduler:
            names = ", ".join(options.scheduler_options)
            message = f"{place}: not used with scheduler='job': {names}"
            hint = "scheduler='local'; for the dashboard: network={'dashboard': 'on'} or 'off'"
            raise InputError(message, hint=hint)
        return options

    @property
    def local_scheduler(self) -> bool:
        """Whether the dask scheduler runs in this process."""
        return self.scheduler == "local"
