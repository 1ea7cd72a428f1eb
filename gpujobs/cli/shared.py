"""Options and arguments that several commands share, and the completion of their values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import click

from ..errors import InputError

if TYPE_CHECKING:
    from ..clusters.ledger import Ledger
    from ..config.document import Document
    from ..config.spec import ClusterSpec

P = ParamSpec("P")
T = TypeVar("T", bound=Callable[..., Any])


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


def _read_settings(
    ctx: click.Context, param: click.Parameter, settings: tuple[str, ...]
) -> Document:
    """Return the keys of --set; ``--set gpus 2`` is reported before click reports the 2."""
    from ..config import spec

    return spec.settings_document(settings)


def parsed(kind: str) -> Callable[[click.Context, click.Parameter, str | None], int | None]:
    """Return the callback of an option: its value is a ``duration`` or a ``size``."""

    def parse(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
        from ..config import fields

        try:
            return None if text is None else int(getattr(fields, kind)(text))
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return parse


def flag(*names: str, help: str) -> Callable[[T], T]:
    """Return an option without a value."""
    return click.option(*names, is_flag=True, help=help)


def output_option(help: str, name: str = "output") -> Callable[[T], T]:
    """Return the option -o, the path of a file or folder."""
    return click.option("-o", "--output", name, type=click.Path(path_type=Path), help=help)


profile_argument = click.argument("profile", type=click.Path(path_type=Path))
site_option = click.option(
    "--site",
    metavar="SITE",
    shell_complete=complete_sites,
    help="Name of a site, or path of a site file.",
)
settings_option = click.option(
    "--set",
    "settings",
    multiple=True,
    callback=_read_settings,
    metavar="KEY=VALUE",
    help="Set a key of the profile, for example workers.memory=40GiB.",
)
soonest_option = flag(
    "--soonest", help="Let `queue: auto` first try the queues that have enough free GPUs now."
)


def former_option(name: str, hint: str, *, is_flag: bool = False) -> Callable[[T], T]:
    """Return an option that does not exist any more; its error is ``hint``."""

    def refuse(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value:
            raise click.UsageError(f"{name} does not exist any more: {hint}", ctx)

    return click.option(name, is_flag=is_flag, hidden=True, expose_value=False, callback=refuse)


after_option = click.option(
    "--after",
    metavar="ID[:ok|:any]",
    shell_complete=complete_clusters,
    help="Start after this cluster; with :any, also if it fails. Overrides the profile.",
)
json_option = flag("--json", "as_json", help="Print JSON.")
cluster_argument = click.argument("cluster_id", metavar="ID", shell_complete=complete_clusters)
clusters_argument = click.argument(
    "cluster_ids", nargs=-1, metavar="[ID]...", shell_complete=complete_clusters
)


def with_after(spec: ClusterSpec, after: str) -> ClusterSpec:
    """Return ``spec`` with the value of --after."""
    from ..config.document import Document
    from ..config.spec import with_settings

    value = Document(after, source=f"--after {after}")
    return with_settings(spec, Document({"after": value}))


def profile_options(
    command: Callable[Concatenate[Any, P], None], *, folders: bool = False
) -> Callable[..., None]:
    """Add PROFILE, --site, --set and --soonest to a command; it receives their ClusterSpec.

    ``folders``: PROFILE may be the path of a job folder, which the command receives as it is.
    """

    @functools.wraps(command)
    def load_and_run(
        profile: Path,
        site: str | None,
        settings: Document,
        soonest: bool,
        *arguments: P.args,
        **options: P.kwargs,
    ) -> None:
        from ..config import sitefiles, spec

        if folders and profile.is_dir():
            if site or settings.value or soonest:
                raise InputError("--site, --set and --soonest need a profile")
            command(profile, *arguments, **options)
            return
        try:
            loaded = spec.load_spec(profile, site=site, settings=settings)
        except sitefiles.NoSiteHereError:
            if not options.get("here"):
                raise
            loaded = spec.load_spec(profile, site="local", settings=settings)
        if soonest:
            from ..clusters import freequeues

            loaded = freequeues.with_order(loaded, soonest=True)
        command(loaded, *arguments, **options)

    decorated: Callable[..., None] = load_and_run
    former = former_option("--prefer", "use --soonest")
    for decorate in (former, soonest_option, settings_option, site_option, profile_argument):
        decorated = decorate(decorated)
    return decorated
