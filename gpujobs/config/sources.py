"""Where site files are looked for, how files are layered, and what a submission was asked to be.

Sites are searched in ``$GPUJOBS_SITE_PATH`` (colon-separated), the user's configuration folder, ``/etc/gpujobs/sites``
and the package, in this order; the first ``NAME.yaml`` wins. A file that ``extends`` its own name is laid over the next
one found.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, Position, Problem
from .model import build
from .profile import Profile
from .site import Site
from .yamlfile import Document, Loc, parse_value, read

SYSTEM_SITES = Path("/etc/gpujobs/sites")


@dataclass(frozen=True)
class SiteFile:
    """A site, and the document that it came from. ``name`` is the file's stem."""

    name: str
    path: Path
    site: Site
    document: Document


@dataclass(frozen=True)
class ClusterSpec:
    """What one submission was asked to be: a site, a profile, and where each value came from."""

    site: SiteFile
    profile: Profile
    document: Document
    name: str
    workdir: Path
    python: str = sys.executable
    """The interpreter that runs gpujobs."""

    def position(self, *loc: str | int) -> Position:
        """Return where the profile's value at ``loc`` was written."""
        return self.document.position(loc)

    def site_position(self, *loc: str | int) -> Position:
        """Return where the site's value at ``loc`` was written."""
        return self.site.document.position(loc)


def data_folder(name: str) -> Path:
    """Return ``templates`` or ``site_configs``: beside the package when installed, at the top of a checkout."""
    package = Path(__file__).parents[1]
    return package / name if (package / name).is_dir() else package.parent / name


def site_folders() -> list[Path]:
    """Return the folders that are searched for sites, the strongest first."""
    from platformdirs import user_config_path

    own = [
        Path(item).expanduser()
        for item in os.environ.get("GPUJOBS_SITE_PATH", "").split(os.pathsep)
        if item
    ]
    return [*own, user_config_path("gpujobs") / "sites", SYSTEM_SITES, data_folder("site_configs")]


def site_paths() -> dict[str, Path]:
    """Return the path of every known site by its name, sorted."""
    found: dict[str, Path] = {}
    for folder in reversed(site_folders()):
        found.update({path.stem: path for path in sorted(folder.glob("*.yaml"))})
    return dict(sorted(found.items()))


def load_site(name: str, base: Path | None = None) -> SiteFile:
    """Load the site ``name``; a name with a slash or ending in .yaml is a path, relative to ``base``."""
    path = _site_path(name, base or Path.cwd())
    document = _layered(path, ())
    return SiteFile(path.stem, path, build(Site, document), document)


def load_spec(
    profile: Path, *, site: str | None = None, settings: tuple[str, ...] = ()
) -> ClusterSpec:
    """Load the profile at the path ``profile`` for ``site``, with ``key=value`` ``settings`` laid over it."""
    document = settings_document(settings).over(read(profile))
    return make_spec(document, site=site, base=profile.parent, name=default_name(profile.stem))


def make_spec(
    document: Document,
    *,
    site: str | SiteFile | None = None,
    base: Path | None = None,
    name: str = "dask",
) -> ClusterSpec:
    """Return the order that ``document`` describes, on ``site`` or else the one the document, the
    environment variable ``GPUJOBS_SITE`` or the host's name chooses."""
    if isinstance(site, SiteFile):
        return _make_spec(document, site, name)
    own = document.value.get("site")
    chosen = (
        site
        or (own if isinstance(own, str) else None)
        or os.environ.get("GPUJOBS_SITE")
        or _site_of_this_host()
    )
    if not site and isinstance(own, str):
        try:
            site_file = load_site(chosen, base)
        except NoSuchSiteError as error:
            raise InputError(
                replace(error.problems[0], position=document.position(("site",)))
            ) from None
    else:
        site_file = load_site(chosen)
    return _make_spec(document, site_file, name)


def _make_spec(document: Document, site_file: SiteFile, name: str) -> ClusterSpec:
    whole = document.over(site_file.document.at("defaults"))
    profile = build(Profile, whole)
    return ClusterSpec(
        site_file, profile, whole, profile.name or name, Path(profile.workdir or Path.cwd())
    )


def with_settings(spec: ClusterSpec, settings: Document) -> ClusterSpec:
    """Return ``order`` with ``settings`` laid over its profile."""
    document = settings.over(spec.document)
    return replace(spec, document=document, profile=build(Profile, document))


def write_spec(spec: ClusterSpec, path: Path) -> None:
    """Keep what was asked for, so that more of the same can be asked for when the files have changed."""
    value = {
        "site": {
            "name": spec.site.name,
            "path": str(spec.site.path),
            "document": spec.site.document.value,
        },
        "document": spec.document.value,
        "name": spec.name,
        "workdir": str(spec.workdir),
        "python": spec.python,
    }
    path.write_text(json.dumps(value))


def read_spec(path: Path) -> ClusterSpec:
    """Return the order that `write_order` kept; its positions name that file."""
    try:
        value = json.loads(path.read_text())
        document = Document(value["site"]["document"], source=str(path))
        site = SiteFile(
            value["site"]["name"], Path(value["site"]["path"]), build(Site, document), document
        )
        asked = Document(value["document"], source=str(path))
        return ClusterSpec(
            site,
            build(Profile, asked),
            asked,
            value["name"],
            Path(value["workdir"]),
            value["python"],
        )
    except InputError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path} does not say what was submitted: {error}") from None


def settings_document(settings: tuple[str, ...]) -> Document:
    """Return ``("workers.memory=40GiB", …)`` as a document."""
    whole = Document({}, source="--set")
    for setting in settings:
        key, equals, text = setting.partition("=")
        source = f"--set {setting}"
        if not equals or not re.fullmatch(r"\w+(\.[\w-]+)*", key):
            raise InputError(
                Problem("must be KEY=VALUE, as in workers.memory=40GiB", Position(source))
            )
        loc: Loc = tuple(key.split("."))
        value: Any = parse_value(text, source).value["value"]
        for step in reversed(loc):
            value = {step: value}
        place = Position(source)
        whole = Document(
            value, {loc[:n]: place for n in range(1, len(loc) + 1)}, {loc: place}, source
        ).over(whole)
    return whole


def default_name(text: str) -> str:
    """Return ``text`` as a name: letters, digits and dashes."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:40] or "dask"


class NoSuchSiteError(InputError):
    """No site file of that name in any folder."""


class NoSiteHereError(InputError):
    """Nobody named a site, and none knows this host."""


def _site_path(name: str, base: Path) -> Path:
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = base / Path(name).expanduser()
        if not path.is_file():
            raise NoSuchSiteError(Problem(f"there is no site file {path}"))
        return path
    paths = site_paths()
    if name not in paths:
        raise NoSuchSiteError(
            Problem(
                f"there is no site `{name}`; known: {', '.join(paths)}",
                hint="`gpujobs sites list` says where",
            )
        )
    return paths[name]


def _layered(path: Path, seen: tuple[Path, ...]) -> Document:
    document = read(path)
    below = document.value.get("extends")
    if not isinstance(below, str):
        return document
    place = document.position(("extends",))
    if path in seen:
        raise InputError(
            Problem(
                f"`extends` goes in a circle: {' → '.join(p.stem for p in (*seen, path))}", place
            )
        )
    if below == path.stem:
        others = [
            folder / f"{below}.yaml"
            for folder in site_folders()
            if folder / f"{below}.yaml" not in (*seen, path)
        ]
        lower = next((other for other in others if other.is_file()), None)
        if lower is None:
            raise InputError(Problem(f"`extends: {below}` finds no other site of that name", place))
    else:
        try:
            lower = _site_path(below, path.parent)
        except NoSuchSiteError as error:
            raise InputError(replace(error.problems[0], position=place)) from None
    return document.over(_layered(lower, (*seen, path)))


def _site_of_this_host() -> str:
    patterns: list[tuple[str, str]] = []
    for name, path in site_paths().items():
        hostnames = read(path).value.get("hostnames")
        patterns += (
            [(str(pattern), name) for pattern in hostnames] if isinstance(hostnames, list) else []
        )
    host = ""
    # The full name may need a slow answer from the network: only where the short one tells nothing.
    for ask in (socket.gethostname, socket.getfqdn):
        host = str(ask())
        found = sorted({name for pattern, name in patterns if _matches(pattern, host)})
        if len(found) == 1:
            return found[0]
        if found:
            raise InputError(
                f"this host ({host}) belongs to several sites: {', '.join(found)}",
                hint="use --site",
            )
    raise NoSiteHereError(
        f"no site is named, and none knows this host ({host})",
        hint="use --site NAME (`gpujobs sites list`), --site local to run on this machine, or set GPUJOBS_SITE",
    )


def _matches(pattern: str, host: str) -> bool:
    try:
        return re.fullmatch(pattern, host) is not None
    except re.error:
        return False
