"""Options of a cluster object that are not part of the profile."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError


@dataclass(frozen=True)
class ClusterOptions:
    """See `GPUJobQueueCluster` for the meaning of each."""

    scheduler: str = "local"
    scheduler_options: dict[str, Any] = field(default_factory=dict)
    log_directory: Path | None = None
    asynchronous: bool = False
    loop: Any = None
    silence_logs: Any = "error"
    quiet: bool = False

    @classmethod
    def of(cls, values: dict[str, Any]) -> ClusterOptions:
        """Return the options with these values; None stands for the default. Raises InputError."""
        given = {name: value for name, value in values.items() if value is not None}
        if logs := given.get("log_directory"):
            given["log_directory"] = Path(logs).expanduser()
        options = cls(**given)
        if options.scheduler not in ("local", "job"):
            raise InputError(f"scheduler: {options.scheduler!r} is neither 'local' nor 'job'")
        return options

    @property
    def local_scheduler(self) -> bool:
        """Whether the dask scheduler runs in this process."""
        return self.scheduler == "local"
