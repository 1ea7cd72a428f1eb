"""Events of a dask scheduler in the folder of a cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpujobs.injob.events import DaskWorkers, EventReader, events_file


def write_events(folder: Path, *events: Mapping[str, Any], attempt: int = 1) -> None:
    """Append events, as the plugin of the dask scheduler does."""
    with (folder / events_file(attempt)).open("a") as file:
        file.write("".join(f"\n{json.dumps(event)}\n" for event in events))


def dask_workers(folder: Path, attempt: int = 1) -> DaskWorkers:
    """Return what the events in the folder of a cluster amount to."""
    return EventReader(folder / events_file(attempt)).read()
