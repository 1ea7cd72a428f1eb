"""The software that a site has for its users: environments and containers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import sitekinds as kinds
from .model import ARGV, TEXT, WORD, Items, M, Model, Table, optional
from .profile import RUNTIME, Environment, Runtime, Software


@dataclass(frozen=True, kw_only=True)
class SiteEnvironment(Model):
    """An environment of the site that its jobs copy to their nodes."""

    staging: str | None = optional(
        kinds.FOLDER,
        "tarball with bin/python that is unpacked once on each node; jobs use its Python",
    )
    staging_folder: str | None = optional(
        kinds.FOLDER, "node-local folder that outlives jobs; default: the site's scratch"
    )


@dataclass(frozen=True, kw_only=True)
class Containers(Model):
    """How jobs run in containers."""

    runtime: Runtime | None = optional(RUNTIME, "for profiles that name none")
    images: dict[str, str] = optional(
        Table(WORD, kinds.IMAGE), "name → path or address of an image", default={}
    )
    binds: tuple[str, ...] = optional(
        Items(kinds.BIND, extendable=True),
        "folders of the node, as PATH or PATH:PATH_IN_THE_CONTAINER",
        default=(),
    )
    args: tuple[str, ...] = optional(
        ARGV, "arguments of this runtime, before the profile's", default=()
    )

    def with_own(self, own: Containers | None) -> Containers:
        """Return these with the keys that those of a queue have; arguments are of one runtime."""
        if own is None:
            return self
        found = overridden(self, own)
        if "runtime" in own.given and "args" not in own.given and own.runtime != self.runtime:
            found = replace(found, args=())
        return replace(found, images={**self.images, **own.images})

    def check(self) -> None:
        """Check that the arguments have a runtime."""
        if self.args and not self.runtime:
            raise ValueError("needs `runtime` with `args`: they are those of one runtime")


@dataclass(frozen=True, kw_only=True)
class NamedEnvironment(Software):
    """An environment of the site that profiles name."""

    description: str | None = optional(TEXT, "for `gpujobs sites environments`")
    gpu: str | None = optional(
        kinds.CUDA_VERSION,
        "CUDA version that it needs, which the driver of the nodes must support: 13 or 12.9",
    )

    def with_own(self, own: Environment) -> Environment:
        """Return this environment with the keys that a profile adds."""
        return replace(
            own,
            setup=self.setup + own.setup,
            python=own.python or self.python,
            container=own.container or self.container,
        )


def overridden(section: M, own: M | None) -> M:
    """Return a section of a site with the keys that the one of a queue has."""
    if own is None:
        return section
    of_queue = {name: getattr(own, name) for name in own.given}
    return replace(section, **of_queue, given=section.given | own.given)
