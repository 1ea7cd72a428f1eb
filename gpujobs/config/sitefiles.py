"""Find and load site files.

Sites are searched in ``$GPUJOBS_SITE_PATH`` (colon-separated), in the user's configuration folder,
in ``/etc/gpujobs/sites`` and in the package, in this order; the first ``NAME.yaml`` is used. A file
that ``extends`` its own name is laid over the next file of that name.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

from ..errors import InputError, Position, Problem
from . import layers
from .clustername import cluster_name
from .document import Document
from .model import build
from .site import Site
from .trust import check_writers
from .yamlfile import read

logger = logging.getLogger("gpujobs")

_SELECTS = re.compile("^(hostnames|environment_variables|cluster_names):", re.M)
SYSTEM_SITES = Path("/etc/gpujobs/sites")


@dataclass(frozen=True)
class SiteFile:
    """A site, and the document that it was built from. ``name`` is the file's stem."""

    name: str
    path: Path
    site: Site
    document: Document


class NoSuchSiteError(InputError):
    """There is no site file of that name in any folder."""


class NoSiteHereError(InputError):
    """No site was given, and no site file matches this host."""


def data_folder(name: str) -> Path:
    """Return ``templates`` or ``site_configs``: in the installed package, or in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def site_folders() -> list[Path]:
    """Return the folders that are searched for sites, in the order of the search."""
    from platformdirs import user_config_path

    listed = os.environ.get("GPUJOBS_SITE_PATH", "").split(os.pathsep)
    own = [Path(item).expanduser() for item in listed if item]
    return [*own, user_config_path("gpujobs") / "sites", SYSTEM_SITES, data_folder("site_configs")]


def _trusted(path: Path) -> Path:
    """Return the path of a file that was found in a folder. InputError if others can write it."""
    if path.is_file() and path.parent != data_folder("site_configs"):
        check_writers(path)
    return path


def site_paths() -> dict[str, Path]:
    """Return the path of every known site by its name, sorted."""
    found: dict[str, Path] = {}
    for folder in reversed(site_folders()):
        # Hidden files belong to editors, such as Emacs' link .#delta.yaml.
        paths = (path for path in _files(folder, ".yaml") if not path.name.startswith("."))
        found.update({path.stem: path for path in paths})
    return dict(sorted(found.items()))


def _files(folder: Path, suffix: str) -> list[Path]:
    """Return the files in a folder that end in ``suffix``; a folder need not exist."""
    try:
        return [path for path in folder.iterdir() if path.suffix == suffix]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        logger.warning("a folder of sites is ignored: %s: %s", folder, error.strerror)
        return []


def ignored_files() -> list[Path]:
    """Return files in the folders that are not searched because they end in .yml."""
    return sorted(path for folder in site_folders() for path in _files(folder, ".yml"))


def load_site(name: str, base: Path | None = None) -> SiteFile:
    """Load the site ``name``.

    A name with a slash or one that ends in .yaml is a path, relative to ``base`` (default: the
    working directory). NoSuchSiteError if there is no such file, InputError if it is not valid.
    """
    path = _site_path(name, base)
    document = layers.resolved(_layered(path, ()))
    return SiteFile(path.stem, path, build(Site, document), document)


def site_of_this_host() -> str:
    """Return the name of the one site whose variables, host or cluster names match here.

    They are tried in this order. NoSiteHereError if there is none, InputError if there are several.
    """
    selections = list(_selections())
    variables = (one.name for one in selections if one.matches_variables())
    if found := _only(variables, "several sites match the environment variables here"):
        return found
    patterns = [(pattern, one.name) for one in selections for pattern in one.hostnames]
    host = ""
    # The fully qualified name may need a slow query of the network, so the short name comes first.
    for get_name in (socket.gethostname, socket.getfqdn):
        host = get_name()
        names = (name for pattern, name in patterns if _matches(pattern, host))
        if found := _only(names, f"several sites match this host ({host})"):
            return found
    clusters = (one.name for one in selections if one.matches_cluster())
    if found := _only(clusters, "several sites match the name of the cluster here"):
        return found
    raise NoSiteHereError(
        f"no site given, and no site file matches this host ({host})",
        hint="use --site NAME (`gpujobs sites list`), or --site local to run on this machine; "
        "`gpujobs sites init` writes a site file for the batch scheduler of this host",
    )


def _only(names: Iterable[str], message: str) -> str:
    """Return the one name, "" if there is none. InputError with ``message`` for several."""
    found = sorted(set(names))
    if len(found) > 1:
        raise InputError(f"{message}: {', '.join(found)}", hint="use --site")
    return "".join(found)


def working_folder() -> Path:
    """Return the working directory. InputError if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        hint = "cd to a folder that exists"
        raise InputError("the working directory was removed", hint=hint) from None


def _site_path(name: str, base: Path | None) -> Path:
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if not path.is_absolute():
            path = (base or working_folder()) / path
    else:
        path = _named_path(name)
    if path.is_file():
        return path
    message = f"there is no site file {path}"
    if path.is_dir():
        message = f"{path} is a directory, not a site file"
    elif path.is_symlink():
        message = f"{path} is a link to {path.readlink()}, which does not lead to a file"
    elif path.exists():
        message = f"{path} is not a regular file"
    raise NoSuchSiteError(Problem(message))


def _named_path(name: str) -> Path:
    paths = site_paths()
    if name in paths:
        return _trusted(paths[name])
    message = f"there is no site `{name}`"
    hint = "`gpujobs sites list` shows their files"
    if near := difflib.get_close_matches(name, paths, n=1, cutoff=0.7):
        hint = f"did you mean {near[0]}? `gpujobs sites list` shows all"
    else:
        message += f"; known: {', '.join(paths)}"
    if same := [path for path in ignored_files() if path.stem == name]:
        hint = f"rename {same[0]} to {name}.yaml"
    raise NoSuchSiteError(Problem(message, hint=hint))


def site_layers(path: Path) -> list[Document]:
    """Return the document in ``path`` and those that it extends, one after the other."""
    return _layers(path, ())


def _layered(path: Path, upper: tuple[Path, ...]) -> Document:
    """Return the document in ``path``, laid over the file that it extends; ``upper`` extend it."""
    *others, document = _layers(path, upper)
    for other in reversed(others):
        document = layers.over(other, document)
    return document


def _layers(path: Path, upper: tuple[Path, ...]) -> list[Document]:
    if not path.is_file() and path.exists():  # reading a named pipe might never end
        raise InputError(f"{path}: not a regular file")
    document = read(path)
    name = document.value.get("extends")
    if not isinstance(name, str):
        return [document]
    position = document.position(("extends",))
    if path in upper:
        cycle = " → ".join(one.stem for one in (*upper, path))
        raise InputError(Problem(f"`extends` forms a cycle: {cycle}", position))
    lower = _lower_path(name, path, (*upper, path), position)
    return [document, *_layers(lower, (*upper, path))]


def _lower_path(name: str, path: Path, upper: tuple[Path, ...], position: Position) -> Path:
    """Return the path of the site ``name`` that the file ``path`` extends."""
    if name == path.stem:
        for folder in site_folders():
            other = folder / f"{name}.yaml"
            if other not in upper and other.is_file():
                return _trusted(other)
        raise InputError(Problem(f"`extends: {name}`: no other site has this name", position))
    try:
        return _site_path(name, path.parent)
    except NoSuchSiteError as error:
        raise InputError(replace(error.problems[0], position=position)) from None


@dataclass(frozen=True)
class _Selection:
    """What selects the site ``name`` on a host."""

    name: str
    hostnames: tuple[str, ...]
    variables: Mapping[str, str]
    cluster_names: tuple[str, ...]
    scheduler: str

    def matches_variables(self) -> bool:
        """Return whether the environment has all variables, each with a value that matches."""
        environ = os.environ
        found = (_matches(pattern, environ.get(key, "")) for key, pattern in self.variables.items())
        return bool(self.variables) and all(found)

    def matches_cluster(self) -> bool:
        """Return whether the batch scheduler's cluster has one of the names."""
        if not self.cluster_names:
            return False
        try:
            name = cluster_name(self.scheduler)
        except InputError:  # no such batch scheduler: `load_site` reports it
            return False
        return any(_matches(pattern, name) for pattern in self.cluster_names)


def _selections() -> Iterator[_Selection]:
    """Yield what selects each site that names hosts or variables."""
    included = data_folder("site_configs")
    for name, path in site_paths().items():
        # Most of the many included files name no host, and parsing all takes most of a second.
        if path.parent == included and not _SELECTS.search(path.read_text()):
            continue
        try:
            value = _layered(_trusted(path), ()).value
        except InputError as error:
            logger.warning("a site file is ignored: %s", str(error).splitlines()[0])
            continue
        variables = value.get("environment_variables")
        yield _Selection(
            name,
            _texts(value.get("hostnames")),
            variables if _is_texts(variables) else {},
            _texts(value.get("cluster_names")),
            str(value.get("scheduler")),
        )


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, list) else ()


def _is_texts(value: object) -> TypeGuard[Mapping[str, str]]:
    return isinstance(value, Mapping) and all(isinstance(one, str) for one in value.values())


def _matches(pattern: str, host: str) -> bool:
    try:
        return re.fullmatch(pattern, host) is not None
    except re.error:
        return False
