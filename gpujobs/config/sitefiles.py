"""Find and load site files.

Sites are searched in ``$GPUJOBS_SITE_PATH`` (colon-separated), in the user's configuration folder,
in ``/etc/gpujobs/sites`` and in the package, in this order; the first ``NAME.yaml`` is used. A file
that ``extends`` its own name is laid over the next file of that name.
"""

from __future__ import annotations

import difflib
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import InputError, Position, Problem
from . import layers
from .document import Document
from .model import build
from .site import Site
from .trust import check_writers
from .yamlfile import read

logger = logging.getLogger("gpujobs")

_IF_TRUSTED = ", or give the file's path to --site if you trust it"
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
    document = layers.resolved(layered(path, _searched(name, path)))
    return SiteFile(path.stem, path, build(Site, document), document)


def working_folder() -> Path:
    """Return the working directory. InputError if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        hint = "cd to a folder that exists"
        raise InputError("the working directory was removed", hint=hint) from None


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def _searched(name: str, path: Path, otherwise: Path | None = None) -> Path | None:
    """Return the folder in which ``name`` was found; ``otherwise`` if it is a path."""
    return otherwise if _is_path(name) else path.parent


def _site_path(name: str, base: Path | None) -> Path:
    if _is_path(name):
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
        return paths[name]
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
    return _layers(path, (), None)


def layered(path: Path, folder: Path | None) -> Document:
    """Return the document in ``path``, laid over the file that it extends.

    ``folder``: the one of the search path in which it was found; None for a path of the user's.
    InputError if other users could have written a file that was found.
    """
    *others, document = _layers(path, (), folder)
    for other in reversed(others):
        document = layers.over(other, document)
    return document


def _layers(path: Path, upper: tuple[Path, ...], folder: Path | None) -> list[Document]:
    if not path.is_file() and path.exists():  # reading a named pipe might never end
        raise InputError(f"{path}: not a regular file")
    if folder and path.parent != data_folder("site_configs"):
        check_writers(path, folder, alternative=_IF_TRUSTED)
    document = read(path)
    name = document.value.get("extends")
    if not isinstance(name, str):
        return [document]
    position = document.position(("extends",))
    if path in upper:
        cycle = " → ".join(one.stem for one in (*upper, path))
        raise InputError(Problem(f"`extends` forms a cycle: {cycle}", position))
    lower = _lower_path(name, path, (*upper, path), position)
    return [document, *_layers(lower, (*upper, path), _searched(name, lower, folder))]


def _lower_path(name: str, path: Path, upper: tuple[Path, ...], position: Position) -> Path:
    """Return the path of the site ``name`` that the file ``path`` extends."""
    if name == path.stem:
        for folder in site_folders():
            other = folder / f"{name}.yaml"
            if other not in upper and other.is_file():
                return other
        raise InputError(Problem(f"`extends: {name}`: no other site has this name", position))
    try:
        return _site_path(name, path.parent)
    except NoSuchSiteError as error:
        raise InputError(replace(error.problems[0], position=position)) from None
