"""The origin of each value of a profile: command line, profile, site defaults, built-in."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import InputError, Position
from .document import Document, Loc
from .hints import misspelled
from .model import Key, Table, key_names, keys_of
from .profile import Group, Profile
from .site import Site
from .sitefiles import SiteFile, site_layers
from .spec import OF_THE_CLUSTER, settings_document
from .yamlfile import read

COMMAND_LINE, PROFILE, QUEUE = "command line", "profile", "queue of the site"
SITE, SITE_KEY, BUILT_IN = "site default", "site", "built-in"


@dataclass(frozen=True)
class Origin:
    """One value of a key and its place; ``kind`` is one of the words above."""

    value: object
    kind: str
    position: Position
    site_key: str = ""
    """The key of the site file that supplies the value, if it is another one than the profile's."""


@dataclass(frozen=True)
class KeyOrigins:
    """All values that a key was given, the one that counts first; the built-in one is last."""

    key: str
    description: str
    origins: tuple[Origin, ...]


def origins_of(
    key: str,
    profile: Path,
    site_file: SiteFile,
    *,
    site: str | None = None,
    settings: tuple[str, ...] = (),
    groups: Collection[str] = (),
    queue_key: str | None = None,
    supplied: Sequence[Origin] = (),
) -> KeyOrigins:
    """Return the values of the profile's ``key``, such as ``workers.memory``.

    ``site`` is the option ``--site``, ``groups`` are those of the profile, ``queue_key`` is the
    queue of the plan if it is known. ``supplied``: the values of keys of the site, which count
    before the built-in one. InputError if there is no such key.
    """
    loc: Loc = tuple(key.split("."))
    group, of_group = split_group(key)
    _check_group(key, groups)
    declared = _declared(of_group, Group) if group else _declared(key, Profile)
    locs = [loc]
    if group and loc[2] not in OF_THE_CLUSTER:
        locs.append(loc[2:])
    layers = list(_layers(profile, site_file, settings, queue_key))
    found = [
        origin for place in locs for kind, layer in layers for origin in _values(layer, place, kind)
    ]
    if key == "site":
        found = [*_site_origins(site, site_file), *found]
    found += supplied
    if declared and declared.required:
        return KeyOrigins(key, declared.description, tuple(found))
    if declared:
        built_in = Origin(declared.default, BUILT_IN, Position(BUILT_IN))
        return KeyOrigins(key, declared.description, (*found, built_in))
    return KeyOrigins(key, "", tuple(found))


def _check_group(key: str, groups: Collection[str]) -> None:
    table, _, of_table = key.partition(".")
    group = of_table.partition(".")[0]
    if table == "groups" and of_table and group not in groups:
        hint = f"its groups are {', '.join(sorted(groups))}" if groups else "it has no groups"
        raise InputError(f"the profile has no group `{group}`", hint=hint)


def split_group(key: str) -> tuple[str, str]:
    """Return the group and its key in ``groups.GROUP.KEY``; ("", ``key``) for another key."""
    first, _, rest = key.partition(".")
    group, _, of_group = rest.partition(".")
    return (group, of_group) if first == "groups" and of_group else ("", key)


def _layers(
    profile: Path, site_file: SiteFile, settings: Sequence[str], queue_key: str | None
) -> Iterator[tuple[str, Document]]:
    """Yield the kinds and documents that have keys of a profile; the first one counts."""
    for setting in reversed(settings):
        yield COMMAND_LINE, settings_document((setting,))
    yield PROFILE, read(profile)
    for queue in _queue_layers(site_file, queue_key):
        yield QUEUE, queue
    for layer in site_layers(site_file.path):
        yield SITE, layer.section("defaults")


def _queue_layers(site_file: SiteFile, key: str | None) -> Iterator[Document]:
    """Yield the keys of a profile that the queue ``key`` has: `walltime` and `env`."""
    if key:
        queue = site_file.document.section("queues").section(key)
        value = {name: queue.value[name] for name in ("walltime", "env") if name in queue.value}
        yield replace(queue, value=value)


def _values(layer: Document, loc: Loc, kind: str) -> Iterator[Origin]:
    value: object = layer.value
    for step in loc:
        if not isinstance(value, Mapping) or step not in value:
            return
        value = value[step]
    yield Origin(value, kind, layer.position(loc))


def _site_origins(site: str | None, site_file: SiteFile) -> Iterator[Origin]:
    """Yield how the site was selected, if the profile has not selected it."""
    if site:
        yield Origin(site, COMMAND_LINE, Position(f"--site {site}"))
    elif name := os.environ.get("GPUJOBS_SITE"):
        yield Origin(name, COMMAND_LINE, Position("$GPUJOBS_SITE"))


def _declared(key: str, model: type[Profile | Group]) -> Key | None:
    """Return the declaration of ``key`` in ``model``; None for a name of the user's choice."""
    names = list(key_names(model))
    found = [name for name in names if name.startswith(f"{key}.")]
    if found:
        raise InputError(f"`{key}` is a section", hint=f"name one of its keys, such as {found[0]}")
    if key not in names:
        if any(key.startswith(f"{table}.") for table in _tables(model, names)):
            return None
        owner = "profile" if model is Profile else "group"
        raise InputError(f"a {owner} has no key `{key}`", hint=_hint(key, names))
    return _key_in(keys_of(model), key)


def _tables(model: type[Profile | Group], names: Sequence[str]) -> Iterator[str]:
    """Yield the keys whose values are mappings with names of the user's choice."""
    keys = keys_of(model)
    for name in names:
        if (key := _key_in(keys, name)) and isinstance(key.kind, Table):
            yield name


def _hint(key: str, names: Sequence[str]) -> str:
    """Return a hint for a key that profiles do not have."""
    if key.partition(".")[0] in keys_of(Site).keys() - keys_of(Profile).keys():
        return "it is a key of a site: `gpujobs sites show NAME --effective` has its origin"
    return misspelled(key.rpartition(".")[2], names, names)


def _key_in(keys: Mapping[str, Key], name: str) -> Key | None:
    first, _, rest = name.partition(".")
    key = keys.get(first)
    model = getattr(key.kind, "model", None) if key else None
    return _key_in(keys_of(model), rest) if rest and model else key
