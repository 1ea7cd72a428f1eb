"""Find and load site files.

Sites are searched in ``$GPUJOBS_SITE_PATH`` (colon-separated), in the user's configuration folder,
in ``/etc/gpujobs/sites`` and in the package, in this order; the first ``NAME.yaml`` is used. A file
that ``extends`` its own name is laid over the next file of that name.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from ..errors import InputError, Position, Problem
from ..schedulers import get_scheduler
from ..text import alike, matches, nearest, with_home
from .document import Document, read
from .model import build
from .site import Site
from .trust import check_writers, without_acts

# -- inheritance in site files: a file extends another one, a queue is like another one ------------
# Mappings are merged key by key, lists and scalars are replaced. ``{append: [...]}`` in the place
# of a list extends the list that would be replaced, and null in the place of a queue removes it.

_BUILT_IN = ("request", "cpu_request")
"""Lists of the batch scheduler if the site has none, so that nothing can be appended to them."""
_NOTHING = Document({})
_MOST_LAYERS = 20
"""Of files that extend each other, and of queues that are like each other."""


def over(upper: Document, lower: Document) -> Document:
    """Return ``upper`` laid over ``lower``; InputError if it removes a queue that is not there."""
    merged, removed = _extended(upper, lower).over(lower), _removed_queues(upper, lower)
    if not removed:
        return merged
    return merged.having({**merged.items, "queues": merged.section("queues").without(*removed)})


def _removed_queues(upper: Document, lower: Document) -> list[str]:
    removed = [name for name, queue in upper.section("queues").value.items() if queue is None]
    for name in removed:
        if name not in lower.section("queues").items:
            position = upper.key_position(("queues", name))
            raise InputError(Problem(f"there is no queue `{name}` that can be removed", position))
    return removed


def resolved(site: Document) -> Document:
    """Return the document of a site with all keys in each queue that it inherits.

    InputError if a queue is like one that does not exist, or like itself.
    """
    if "like" in site.section("queue_defaults").items:
        position = site.key_position(("queue_defaults", "like"))
        raise InputError(Problem("`like` is a key of a queue, not of `queue_defaults`", position))
    queues = site.section("queues")
    whole = {key: _queue(site, str(key), ()) for key, one in queues.items.items() if one.is_mapping}
    if _appends(site):
        site = _complete(site)
        whole = {key: _complete(_extended(queue, site)) for key, queue in whole.items()}
    if not whole:
        return site
    return site.having({**site.items, "queues": queues.having({**queues.items, **whole})})


def _queue(site: Document, name: str, upper: tuple[str, ...]) -> Document:
    """Return the queue ``name`` with the keys that it inherits; ``upper`` are like it."""
    queues, names = site.section("queues"), (*upper, name)
    own, lower = queues.section(name), site.section("queue_defaults")
    like, position = own.value_at(("like",)), own.position(("like",))
    if isinstance(like, str):
        if like in names:
            message = f"`like` forms a cycle: {' → '.join((*names, like))}"
            raise InputError(Problem(message, position))
        if len(names) > _MOST_LAYERS:
            message = f"`like` leads through more than {_MOST_LAYERS} queues"
            raise InputError(Problem(message, position))
        if not isinstance(queues.value.get(like), Mapping):
            known = ", ".join(queues.value)
            message = f"there is no queue `{like}` in this site; it has {known}"
            raise InputError(Problem(message, position))
        lower = _queue(site, like, names)
    return _extended(own, lower).over(lower)


def _extended(upper: Document, lower: Document) -> Document:
    """Return ``upper`` with whole lists in the place of those that extend lists of ``lower``."""
    own, below = _appended(upper), _appended(lower)
    if own is not None and below is not None:
        return upper.having({"append": Document([*below, *own], upper.place)})
    if own is not None and isinstance(lower.plain, list):
        return Document([*lower.items.values(), *own], upper.place, upper.key)
    if own is not None or not upper.is_mapping or not lower.items:
        return upper
    return upper.having(
        {key: _extended(item, lower.items.get(key, _NOTHING)) for key, item in upper.items.items()}
    )


def _complete(document: Document, key: str | int = "") -> Document:
    """Return ``document``, the value of ``key``, with whole lists in the place of appended ones."""
    own = _appended(document)
    if own is not None:
        if key in _BUILT_IN:
            message = f"`{key}` has nothing to extend: the site has no `{key}`"
            raise InputError(Problem(message, document.place, hint="write the whole list"))
        return Document(own, document.place, document.key)
    if key == "queues" or not document.is_mapping:  # each queue is completed by itself
        return document
    return document.having({step: _complete(one, step) for step, one in document.items.items()})


def _appends(document: Document) -> bool:
    """Return whether a list in the document may extend another one."""
    return any(loc[-1] == "append" for loc, _ in document.parts())


def _appended(document: Document) -> list[Document] | None:
    """Return the items of ``{append: [...]}``; None if the document is something else."""
    added = document.items.get("append")
    if added is None or len(document.items) > 1 or not isinstance(added.plain, list):
        return None
    return list(added.items.values())


# -- the name of the batch scheduler's cluster on this host, which may select a site ---------------
# It is read from a configuration file. A command of the batch scheduler could delay each start of
# gpujobs, until a time-out where its server does not answer.


def cluster_name(scheduler: str) -> str:
    """Return the name of the cluster of a batch scheduler; "" if it is not known."""
    inventory = get_scheduler(scheduler).inventory
    if inventory is None:
        return ""
    for path in inventory.configuration_files(os.environ):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if name := inventory.cluster_name(text):
            return name
    return ""


# -- find and load site files ----------------------------------------------------------------------
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
    files: tuple[Path, ...] = ()
    """The file, and those that it extends."""
    received: bool = False
    """Whether only a profile names the file (see `trust`)."""
    unused: tuple[str, ...] = ()
    """Keys that are not used because the file is received."""
    acting: tuple[Path, ...] = ()
    """Which of `files` are received, and have such keys."""
    loosened: str = ""
    """Which file overrides a rule of a file that it extends; "" if none does."""

    def check_named(self) -> None:
        """Raise InputError if the file is received and has keys that act: the user must name it."""
        if not self.unused:
            return
        keys = ", ".join(f"`{key}`" for key in self.unused)
        message = f"{self.path} has {keys}, which run commands, and only the profile names it"
        raise InputError(message, hint=f"read it; if you trust it, use --site {self.path}")


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
    own = [Path(with_home(item)) for item in listed if item]
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


def load_site(name: str, base: Path | None = None, *, by_profile: bool = False) -> SiteFile:
    """Load the site ``name``.

    A name with a slash or one that ends in .yaml is a path, relative to ``base`` (default: the
    working directory). ``by_profile``: only a profile names it, so a path is received.
    NoSuchSiteError if there is no such file, InputError if it is not valid.
    """
    path = _site_path(name, base)
    layers = _layers(path, (), _searched(name, path))
    received = by_profile and is_path(name)
    documents: list[Document] = []
    unused: list[str] = []
    acting: list[Path] = []
    for document, by_name in layers:
        if received and not by_name:
            document, found = without_acts(document)
            unused += found
            acting += [Path(document.source)] if found else []
        documents.append(document)
    site, whole = _built(tuple(documents))
    return SiteFile(
        name=path.stem,
        path=path,
        site=site,
        document=whole,
        files=tuple(Path(document.source) for document in documents),
        received=received,
        unused=tuple(dict.fromkeys(unused)),
        acting=tuple(acting),
        loosened=_loosened(documents, whole),
    )


def _loosened(documents: list[Document], whole: Document) -> str:
    """Return which file overrides `encryption: required` of a file that it extends, or ""."""
    rule = ("network", "encryption")
    if whole.value_at(rule) == "required":
        return ""
    lower = [document for document in documents if document.value_at(rule) == "required"]
    if not lower:
        return ""
    return f"{whole.position(rule)} overrides `encryption: required` of {lower[-1].source}"


@lru_cache(maxsize=8)  # like `document.parse`: commands load the site twice, first for its `hosts`
def _built(layers: tuple[Document, ...]) -> tuple[Site, Document]:
    document = resolved(_merged(layers))
    return build(Site, document), document


def working_folder() -> Path:
    """Return the working directory. InputError if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        hint = "cd to a folder that exists"
        raise InputError("the working directory was removed", hint=hint) from None


def is_path(name: str) -> bool:
    """Return whether `load_site` takes ``name`` for a path."""
    return "/" in name or name.endswith((".yaml", ".yml"))


def _searched(name: str, path: Path, otherwise: Path | None = None) -> Path | None:
    """Return the folder in which ``name`` was found; ``otherwise`` if it is a path."""
    return otherwise if is_path(name) else path.parent


def _site_path(name: str, base: Path | None) -> Path:
    if is_path(name):
        path = Path(with_home(name))
        if not path.is_absolute():
            path = (base or working_folder()) / path
    else:
        path = _named_path(name)
    try:
        if path.is_file():
            return path
        reason = _why_no_site_file(path)
    except OSError as error:  # the name is too long, or a folder of it may not be read
        reason = f"{name[:80]}: {error.strerror}"
    raise NoSuchSiteError(Problem(reason))


def _why_no_site_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a directory, not a site file"
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which does not lead to a file"
    if path.exists():
        return f"{path} is not a regular file"
    return f"there is no site file {path}"


def _named_path(name: str) -> Path:
    paths = site_paths()
    if name in paths:
        return paths[name]
    message = f"there is no site `{name}`"
    hint = "`gpujobs sites list` shows all; `gpujobs sites init` drafts one"
    if near := nearest(name, paths, 0.7):
        hint = f"did you mean {near}? `gpujobs sites list` shows all"
    elif similar := alike(name, paths):
        hint = f"similar names: {', '.join(similar)}; {hint}"
    if same := [path for path in ignored_files() if path.stem == name]:
        hint = f"rename {same[0]} to {name}.yaml"
    raise NoSuchSiteError(Problem(message, hint=hint))


def layered(path: Path, folder: Path | None) -> Document:
    """Return the document in ``path``, laid over the file that it extends.

    ``folder``: the one of the search path in which it was found; None for a path of the user's.
    InputError if other users could have written a file that was found.
    """
    return _merged(tuple(document for document, _ in _layers(path, (), folder)))


def _merged(layers: tuple[Document, ...]) -> Document:
    *others, document = layers
    for other in reversed(others):
        document = over(other, document)
    return document


_Layer: TypeAlias = tuple[Document, bool]
"""The document of one file, and whether it was found by its name on the search path."""


def _layers(path: Path, upper: tuple[Path, ...], folder: Path | None) -> tuple[_Layer, ...]:
    if not path.is_file() and path.exists():  # reading a named pipe might never end
        raise InputError(f"{path}: not a regular file")
    if folder and path.parent != data_folder("site_configs"):
        check_writers(path, folder, alternative=_IF_TRUSTED)
    document = read(path)
    name = document.value.get("extends")
    if not isinstance(name, str):
        return ((document, folder is not None),)
    position = document.position(("extends",))
    if path in upper:
        cycle = " → ".join(one.stem for one in (*upper, path))
        raise InputError(Problem(f"`extends` forms a cycle: {cycle}", position))
    if len(upper) >= _MOST_LAYERS:
        message = f"`extends` leads through more than {_MOST_LAYERS} files"
        raise InputError(Problem(message, position))
    lower = _lower_path(name, path, (*upper, path), position)
    layers = _layers(lower, (*upper, path), _searched(name, lower, folder))
    return ((document, folder is not None), *layers)


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


# -- the site of this host: the one whose variables, host or cluster names match here --------------
_SELECTS = re.compile("^(hostnames|environment_variables|cluster_names):", re.M)


class NoSiteHereError(InputError):
    """No site was given, and no site file matches this host."""


def site_of_this_host() -> str:
    """Return the name of the one site whose variables, host or cluster names match here.

    They are tried in this order. NoSiteHereError if there is none, InputError if there are several.
    """
    sites = dict(_selecting_sites())
    variables = (name for name, site in sites.items() if _matches_variables(site))
    if found := _only(variables, "several sites match the environment variables here"):
        return found
    patterns = [
        (pattern, name) for name, site in sites.items() for pattern in _texts(site, "hostnames")
    ]
    host = ""
    # The fully qualified name may need a slow query of the network, so the short name comes first.
    for get_name in (socket.gethostname, socket.getfqdn):
        host = get_name()
        names = (name for pattern, name in patterns if matches(pattern, host))
        if found := _only(names, f"several sites match this host ({host})"):
            return found
    clusters = (name for name, site in sites.items() if _matches_cluster(site))
    if found := _only(clusters, "several sites match the name of the cluster here"):
        return found
    raise NoSiteHereError(
        f"no site given, and no site file matches this host ({host})",
        hint="use --site NAME (`gpujobs sites list`), or --site local to run on this machine; "
        "`gpujobs sites init -o NAME.yaml` drafts a site file for the batch scheduler of this host",
    )


def selects_this_host(site: Mapping[str, object]) -> bool | None:
    """Return whether variables, host or cluster names of a site match here; None: it has none."""
    if not any(site.get(key) for key in ("environment_variables", "hostnames", "cluster_names")):
        return None
    patterns = _texts(site, "hostnames")
    for host in (socket.gethostname(), socket.getfqdn()) if patterns else ():
        if any(matches(pattern, host) for pattern in patterns):
            return True
    return _matches_variables(site) or _matches_cluster(site)


def _only(names: Iterable[str], message: str) -> str:
    """Return the one name, "" if there is none. InputError with ``message`` for several."""
    found = sorted(set(names))
    if len(found) > 1:
        raise InputError(f"{message}: {', '.join(found)}", hint="use --site")
    return "".join(found)


def _matches_variables(site: Mapping[str, object]) -> bool:
    """Return whether the environment has all variables, each with a value that matches."""
    patterns = site.get("environment_variables")
    if not patterns or not isinstance(patterns, Mapping):
        return False
    environ = os.environ
    return all(matches(str(one), environ.get(key, "")) for key, one in patterns.items())


def _matches_cluster(site: Mapping[str, object]) -> bool:
    """Return whether the batch scheduler's cluster has one of the names."""
    patterns = _texts(site, "cluster_names")
    try:
        name = cluster_name(str(site.get("scheduler"))) if patterns else ""
    except InputError:  # no such batch scheduler: `load_site` reports it
        return False
    return any(matches(pattern, name) for pattern in patterns)


def _selecting_sites() -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the name and the keys, unchecked, of each site that may be selected."""
    included = data_folder("site_configs")
    for name, path in site_paths().items():
        # Most of the many included files name no host, and parsing all takes most of a second.
        if path.parent == included and not _SELECTS.search(path.read_text(encoding="utf-8")):
            continue
        try:
            yield name, layered(path, path.parent).value
        except InputError as error:
            logger.warning("a site file is ignored: %s", str(error).splitlines()[0])


def _texts(site: Mapping[str, object], key: str) -> list[str]:
    value = site.get(key)
    return [str(one) for one in value] if isinstance(value, list) else []
