"""Groups of workers: each is specified by a profile of its own.

A profile without `groups` has one group, whose name is "".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .model import build
from .profile import Profile
from .spec import ClusterSpec, given_names

OF_THE_CLUSTER = ("gpus", "groups", "head", "start_workers")
"""Keys of the top level that are no defaults of groups."""


def group_specs(spec: ClusterSpec) -> dict[str, ClusterSpec]:
    """Return the specification of each group by name, in the order of the profile.

    It has the keys of the group laid over those of the top level, with their positions.
    """
    if not spec.profile.groups:
        return {"": spec}
    return dict(_group_specs(spec))


def _group_specs(spec: ClusterSpec) -> Iterator[tuple[str, ClusterSpec]]:
    defaults = spec.document.without(*OF_THE_CLUSTER)
    groups = spec.document.section("groups")
    for name in spec.profile.groups:
        document = groups.section(name).over(defaults)
        own = given_names(groups.section(name))
        yield (
            name,
            replace(
                spec,
                document=document,
                profile=build(Profile, document),
                from_site=spec.from_site - own,
            ),
        )
