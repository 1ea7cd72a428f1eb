"""Options and arguments that several commands share, and the completion of their values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import click

if TYPE_CHECKING:
    from ..clusters.ledger import Ledger
    from ..config.spec import ClusterSpec

P = ParamSpec("P")


class Seconds(click.FloatRange):
    """Seconds between two refreshes."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; nan and inf are refused."""
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


SECONDS = Seconds(min=0.5, max=86400)


def open_ledger() -> Ledger:
    """Return the ledger of this user."""
    from ..clusters import ledger

    return ledger.Ledger()


def complete_sites(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of sites that start with ``incomplete``."""
    from ..config import sitefiles

    return [name for name in sitefiles.site_paths() if name.startswith(incomplete)]


def complete_clusters(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the ids of clusters that start with ``incomplete``."""
    return [record.id for record in open_ledger().all() if record.id.startswith(incomplete)]


def _check_settings(
    ctx: click.Context, param: click.Parameter, settings: tuple[str, ...]
) -> tuple[str, ...]:
    """Report ``--set gpus 2`` before click reports the 2."""
    if settings:
        from ..config import spec

        spec.settings_document(settings)
    return settings


profile_argument = click.argument("profile", type=click.Path(path_type=Path))
site_option = click.option(
    "--site",
    metavar="SITE",
    shell_complete=complete_sites,
    help="Name of a site, or path of a site file; overrides the profile.",
)
settings_option = click.option(
    "--set",
    "settings",
    multiple=True,
    callback=_check_settings,
    metavar="KEY=VALUE",
    help="Set a key of the profile, for example workers.memory=40GiB.",
)
prefer_option = click.option(
    "--prefer",
    type=click.Choice(["soonest"]),
    help="Let `queue: auto` first try the queues that have enough free GPUs now.",
)
after_option = click.option(
    "--after",
    metavar="ID[:ok|:any]",
    shell_complete=complete_clusters,
    help="Start after this cluster; with :any, also if it fails. Overrides the profile.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
cluster_argument = click.argument("cluster_id", metavar="ID", shell_complete=complete_clusters)
clusters_argument = click.argument(
    "cluster_ids", nargs=-1, metavar="[ID]...", shell_complete=complete_clusters
)


def with_after(spec: ClusterSpec, after: str) -> ClusterSpec:
    """Return ``spec`` with the value of --after."""
    from ..config.document import Document, Loc
    from ..config.spec import with_settings
    from ..errors import Position

    place: dict[Loc, Position] = {("after",): Position(f"--after {after}")}
    return with_settings(spec, Document({"after": after}, place, place))


def profile_options(command: Callable[Concatenate[ClusterSpec, P], None]) -> Callable[..., None]:
    """Add PROFILE, --site, --set and --prefer to a command; it receives their ClusterSpec."""

    @functools.wraps(command)
    def load_and_run(
        profile: Path,
        site: str | None,
        settings: tuple[str, ...],
        prefer: str | None,
        *arguments: P.args,
        **options: P.kwargs,
    ) -> None:
        from ..config import spec

        own = spec.settings_document(settings)
        loaded = spec.load_spec(profile, site=site, settings=own)
        if prefer:
            from ..clusters import freequeues

            loaded = freequeues.with_preference(loaded, prefer)
        command(loaded, *arguments, **options)

    decorated: Callable[..., None] = load_and_run
    for decorate in (prefer_option, settings_option, site_option, profile_argument):
        decorated = decorate(decorated)
    return decorated
