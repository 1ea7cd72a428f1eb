"""The site of this host: the one whose variables, host or cluster names match here."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from ..errors import InputError
from ..text import matches
from .clustername import cluster_name
from .sitefiles import data_folder, layered, site_paths

logger = logging.getLogger("gpujobs")

_SELECTS = re.compile("^(hostnames|environment_variables|cluster_names):", re.M)


class NoSiteHereError(InputError):
    """No site was given, and no site file matches this host."""


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
        names = (name for pattern, name in patterns if matches(pattern, host))
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
        found = (matches(pattern, environ.get(key, "")) for key, pattern in self.variables.items())
        return bool(self.variables) and all(found)

    def matches_cluster(self) -> bool:
        """Return whether the batch scheduler's cluster has one of the names."""
        if not self.cluster_names:
            return False
        try:
            name = cluster_name(self.scheduler)
        except InputError:  # no such batch scheduler: `load_site` reports it
            return False
        return any(matches(pattern, name) for pattern in self.cluster_names)


def _selections() -> Iterator[_Selection]:
    """Yield what selects each site that names hosts or variables."""
    included = data_folder("site_configs")
    for name, path in site_paths().items():
        # Most of the many included files name no host, and parsing all takes most of a second.
        if path.parent == included and not _SELECTS.search(path.read_text(encoding="utf-8")):
            continue
        try:
            value = layered(path, path.parent).value
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
