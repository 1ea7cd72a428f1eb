"""The container of a cluster's jobs, from the profile and the site."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..config import profile as config
from ..config.site import Containers, Site
from ..config.workers import Workers
from ..injob.names import MODULES
from .bash import with_variables
from .diagnostics import Diagnostics
from .runtimes import RUNTIMES, Invocation, Mount, Runtime

PYTHON = "python3"
"""The default of `environment.python` in a container."""
KEY = ("environment", "container")

_ADDRESS = re.compile(r".*(://|#).*")
_PATH = re.compile(r"(/|~/|\$|\./|\.\./).*|.*/.*|.*\.(sif|simg|img|sqsh|sqfs|squashfs)")
_ACTIVATES = re.compile(r"\b(conda|mamba|micromamba)\s+activate\b|/activate\b")


@dataclass(frozen=True)
class Container:
    """The image of a cluster's jobs, its runtime, and the folders that are mounted."""

    runtime: Runtime
    image: str
    """Path or address; a path may contain variables of the job."""
    binds: tuple[str, ...]
    folders: tuple[str, ...]
    """Further folders of the node, which have the same path in the container."""
    modules: bool
    """Whether the folder of the program, if it is there, is mounted, too."""
    scratch_word: str
    """The scratch folder, as a word of bash."""
    workdir: str
    args: tuple[str, ...]
    env: Mapping[str, str]
    """The profile's."""

    @property
    def is_path(self) -> bool:
        """Whether the image is a file or a folder, not an address."""
        return not _ADDRESS.fullmatch(self.image)

    @property
    def image_word(self) -> str:
        """The image as a word of bash."""
        return with_variables(self.image) if self.is_path else shlex.quote(self.image)

    def words(self, gpus: bool) -> list[str]:
        """Return the words of the runtime's command, as bash."""
        return self.runtime.words(self._call(gpus))

    def prepare(self, gpus: bool) -> list[str]:
        """Return lines of bash that come before the words."""
        return self.runtime.prepare(self._call(gpus))

    def environment(self, gpus: bool) -> dict[str, str]:
        """Return the variables of the runtime."""
        return self.runtime.environment(self._call(gpus))

    def _call(self, gpus: bool) -> Invocation:
        return Invocation(
            mounts=[*dict.fromkeys(self._mounts())],
            workdir=shlex.quote(self.workdir),
            args=[with_variables(word) for word in self.args],
            variables=self.env,
            gpus=gpus,
        )

    def _mounts(self) -> Iterator[Mount]:
        for bind in self.binds:
            source, _, target = bind.partition(":")
            word = with_variables(source)
            yield Mount(word, shlex.quote(target) if target else word)
        for folder in self.folders:
            yield Mount(shlex.quote(folder), shlex.quote(folder))
        yield Mount('"$scratch"', '"$scratch"')
        if self.modules:  # which may be missing on the node
            word = f'"${{{MODULES}:-$scratch}}"'
            yield Mount(word, word)


def runtime_of(container: config.Container | None, site: Site) -> Runtime | None:
    """Return the runtime of the profile, else of the site; None without a container."""
    name = container and (container.runtime or site.containers.runtime)
    return RUNTIMES[name] if name else None


def plan_container(diagnostics: Diagnostics, root: str) -> Container | None:
    """Return the container of the profile; None if it has none, or after an error.

    ``root``: the folder of the clusters' folders.
    """
    spec = diagnostics.spec
    profile, site = spec.profile, spec.site.site
    wanted = profile.environment.container
    if wanted is None:
        return None
    workdir = str(spec.workdir)
    _check_setup(diagnostics)
    image = _image(diagnostics, wanted.image, site.containers, workdir)
    runtime = runtime_of(wanted, site)
    if runtime is None:
        message = "`environment.container.runtime` is needed: the site names none"
        diagnostics.profile_error(message, *KEY, hint="runtime: apptainer")
        return None
    _check_runtime(diagnostics, runtime, image)
    _check_folder(diagnostics, runtime, "workdir", workdir)
    _check_folder(diagnostics, runtime, "the site's `directory`", root)
    return Container(
        runtime=runtime,
        image=image,
        binds=site.containers.binds,
        folders=(root, workdir),
        modules=_has_own_mount(spec.modules, runtime, workdir),
        scratch_word=_scratch_word(profile.workers, site),
        workdir=workdir,
        args=(*_site_args(site.containers, runtime), *wanted.args),
        env=profile.env,
    )


def _has_own_mount(modules: str, runtime: Runtime, workdir: str) -> bool:
    own = bool(modules) and not Path(modules).is_relative_to(workdir)
    return own and not set(modules) & set(runtime.separators)


def _site_args(site: Containers, runtime: Runtime) -> tuple[str, ...]:
    return site.args if runtime.name == site.runtime else ()


def _scratch_word(workers: Workers, site: Site) -> str:
    if workers.local_directory:
        return with_variables(workers.local_directory)
    return f'"{site.scratch}"'


def _check_setup(diagnostics: Diagnostics) -> None:
    """Report a setup for another Python: it runs outside of the container."""
    found = _ACTIVATES.search(diagnostics.spec.profile.environment.setup)
    if found:
        message = f"`setup` has no effect on the container's Python: {found[0].strip('/')}"
        hint = "environment.python names a Python of the image"
        diagnostics.profile_error(message, "environment", "setup", hint=hint)


def _check_runtime(diagnostics: Diagnostics, runtime: Runtime, image: str) -> None:
    if _ADDRESS.fullmatch(image) and not runtime.addresses:
        message = f"{runtime.name} runs a folder or a SquashFS file, not the address {image}"
        diagnostics.profile_error(message, *KEY, "image", hint="ch-image pull, then ch-convert")
    if runtime.launcher:
        _check_launcher(diagnostics, runtime)


def _check_launcher(diagnostics: Diagnostics, runtime: Runtime) -> None:
    spec = diagnostics.spec
    site = spec.site.site
    if site.scheduler != "slurm":
        message = f"{runtime.name} is a part of Slurm; this site has {site.scheduler}"
        diagnostics.profile_error(message, *KEY, "runtime")
    command = site.mpi.command
    if spec.profile.layout == "mpi" and command and Path(command[0]).name != runtime.launcher:
        message = f"{runtime.name} needs {runtime.launcher}; the site starts MPI by {command[0]}"
        diagnostics.profile_error(message, *KEY, related=spec.site_position("mpi", "command"))


def _check_folder(diagnostics: Diagnostics, runtime: Runtime, name: str, folder: str) -> None:
    found = sorted(set(folder) & set(runtime.separators))
    if found:
        listed = " and ".join(map(repr, found))
        message = f"{name} is {folder}, which {runtime.name} cannot mount: it has {listed}"
        diagnostics.profile_error(message, *KEY)


def _image(diagnostics: Diagnostics, image: str, site: Containers, workdir: str) -> str:
    """Return the path or address of an image, which may be one of the site's names."""
    if image in site.images:
        return site.images[image]
    if _ADDRESS.fullmatch(image):
        return image
    if not _PATH.fullmatch(image):
        _unknown_image(diagnostics, image, site)
    if re.match(r"/|~/|\$", image):
        return image
    return str(Path(workdir) / image)


def _unknown_image(diagnostics: Diagnostics, image: str, site: Containers) -> None:
    names = sorted(site.images)
    listed = f"its images are {', '.join(names)}" if names else "it names no images"
    near = difflib.get_close_matches(image, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"a path, or docker://{image}"
    message = f"the site has no image {image}: {listed}"
    diagnostics.profile_error(message, *KEY, "image", hint=hint)
