"""Containers of jobs: image, runtime and mounts; the copy of a site's environment on each node."""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..config import profile as config
from ..config.profile import Workers
from ..config.site import Site
from ..config.sitesoftware import Containers
from ..injob.names import MODULES
from ..text import did_you_mean
from .bash import Bash, Diagnostics, command, with_variables

# -- container runtimes: the command that starts a program in an image -----------------------------
# All of them get the same folders, the same working directory and the variables of the profile.
# How they pass the rest of the environment, GPUs and network devices differs, and is said at
# each.

IN_CONTAINER = '"${container[@]}"'
"""The words of the container's command, in a job."""


class Runtime(ABC):
    """A program that starts another one in an image, which is ``$image`` in the job."""

    name: ClassVar[str]
    program: ClassVar[str]
    separators: ClassVar[str] = ":,"
    """Characters that the path of a mounted folder cannot have."""
    addresses: ClassVar[bool] = True
    """Whether an image may also be an address."""
    launcher: ClassVar[str] = ""
    """The only launcher of MPI and of single processes that understands `words`; "" for any."""

    @abstractmethod
    def words(self, container: Container, gpus: bool) -> list[str]:
        """Return the words of ``container`` in a job with or without ``gpus``, as bash."""

    def prepare(self, container: Container) -> list[str]:
        """Return lines of bash that come before the words."""
        return []

    def environment(self, container: Container, gpus: bool) -> dict[str, str]:
        """Return further variables with which the words work."""
        return {}

    def around(self, launcher: Sequence[str]) -> list[str]:
        """Return the words of bash that start a program in the container through ``launcher``."""
        return [*launcher, IN_CONTAINER]

    def supervisor(self) -> list[str]:
        """Return the words of bash that start one program in the container on this node."""
        return self.around([])


class Apptainer(Runtime):
    """Apptainer: passes the environment, but PATH and LD_LIBRARY_PATH are those of the image.

    It mounts /dev, with InfiniBand, as well as $HOME and /tmp unless the site forbids it.
    """

    name = "apptainer"
    program = "apptainer"

    def words(self, container: Container, gpus: bool) -> list[str]:
        return [
            f"{self.program} exec",
            *(["--nv"] if gpus else []),
            *(f"--bind={mount}" for mount in container.mounts),
            f"--pwd={container.workdir}",
            *container.args,
            '"$image"',
        ]

    def environment(self, container: Container, gpus: bool) -> dict[str, str]:
        """Return the profile's variables so that they have priority over the image's."""
        prefix = f"{self.program.upper()}ENV_"
        return {f"{prefix}{name}": value for name, value in container.env.items()}


class Singularity(Apptainer):
    """SingularityCE and old Singularity: Apptainer under its former name."""

    name = "singularity"
    program = "singularity"


class Charliecloud(Runtime):
    """Charliecloud's ``ch-run``: passes the whole environment, mounts /dev and /tmp.

    The variables of the image are set only on request. It would mount $TMPDIR as /tmp, and needs
    $USER.
    """

    name = "charliecloud"
    program = "ch-run"
    addresses = False
    _unset = ("LD_LIBRARY_PATH", "LD_PRELOAD")
    """Variables with paths of the node."""
    _prefix = "GPUJOBS_ENV_"

    def prepare(self, container: Container) -> list[str]:
        """Return the lines that find out if the image has variables."""
        return [
            'export USER="${USER:-$(id -un)}"',
            "of_image=(--set-env)   # an image need not have a file of variables",
            '[ ! -d "$image" ] || [ -e "$image/ch/environment" ] || of_image=()',
        ]

    def words(self, container: Container, gpus: bool) -> list[str]:
        return [
            "env --unset=TMPDIR ch-run",
            *(f"--unset-env={name}" for name in self._unset),
            '"${of_image[@]}"',
            *(f"--bind={mount}" for mount in container.mounts),
            f"--cd={container.workdir}",
            *container.args,
            '--set-env=TMPDIR="$scratch"',
            # ch-run replaces $NAME: the values are not in its arguments, which others can read.
            *(f"--set-env='{name}=${self._prefix}{name}'" for name in container.env),
            '"$image" --',
        ]

    def environment(self, container: Container, gpus: bool) -> dict[str, str]:
        """Return the profile's variables under the names in `words`."""
        return {f"{self._prefix}{name}": value for name, value in container.env.items()}


class Podman(Runtime):
    """Podman: has networks, process ids and an environment of its own, unless options say not.

    The supervisor must see the batch script, and a batch scheduler's cgroup holds only what has no
    cgroup of its own. A variable of the image has priority. An image that is a folder is read-only.
    """

    name = "podman"
    program = "podman"
    separators = ":"
    _before_run: ClassVar[str] = "--cgroup-manager=cgroupfs "
    _gpus: ClassVar[str] = '"${of_gpus[@]}"'
    """GPUs of the job, which `_find_gpus` has found."""
    _find_gpus: ClassVar[tuple[str, ...]] = (  # by the file that `nvidia-ctk cdi generate` writes
        "of_gpus=()",
        "! grep -qs nvidia.com/gpu /etc/cdi/* /run/cdi/* ||",
        "    of_gpus=(--device=nvidia.com/gpu=all)",
    )

    def prepare(self, container: Container) -> list[str]:
        """Return the lines that find out what kind of image it is, and what the node has."""
        return [
            *self._find_gpus,
            'of_image=("$image")',
            '[ ! -d "$image" ] || of_image=(--read-only --read-only-tmpfs=false --rootfs "$image")',
            "[ ! -d /dev/infiniband ] || "
            'of_image=(--device=/dev/infiniband --ulimit=memlock=-1 "${of_image[@]}")',
        ]

    def words(self, container: Container, gpus: bool) -> list[str]:
        return [
            f"env --unset=LD_LIBRARY_PATH --unset=LD_PRELOAD {self.program} {self._before_run}run",
            "--rm --network=host --pid=host --log-driver=none --entrypoint= --env-host",
            "--security-opt=label=disable --volume=/dev/shm:/dev/shm",
            *([self._gpus] if gpus else []),
            *(f"--volume={mount}" for mount in container.mounts),
            f"--workdir={container.workdir}",
            *container.args,
            # The value is that of the job: it is not in the arguments, which others can read.
            *(f"--env={name}" for name in ("TMPDIR", *container.env)),
            '"${of_image[@]}"',
        ]


class PodmanHpc(Podman):
    """NERSC's podman-hpc: Podman with the storage of the nodes, and an option for GPUs."""

    name = "podman-hpc"
    program = "podman-hpc"
    _before_run = ""
    _gpus = "--gpu"
    _find_gpus = ()


class Pyxis(Runtime):
    """Pyxis, which is part of Slurm's ``srun``: passes the environment, the image's has priority.

    The hooks of enroot make GPUs and InfiniBand visible, as these variables say.
    """

    name = "pyxis"
    program = "srun"
    separators = ":, "
    launcher = "srun"

    def prepare(self, container: Container) -> list[str]:
        """Return a check of the plugin, and the list of mounts, which `words` joins by commas."""
        return [
            "[[ $(srun --help 2>&1) == *--container-image* ]] ||",
            '    gpujobs_stop "srun has no option --container-image: Slurm has no plugin Pyxis"',
            f"mounts=({command(container.mounts)})",
        ]

    def words(self, container: Container, gpus: bool) -> list[str]:
        names = ",".join(container.env)
        return [
            '--container-image="$image"',
            '--container-mounts="$(IFS=,; echo "${mounts[*]}")"',
            f"--container-workdir={container.workdir}",
            "--no-container-remap-root",
            *([f"--container-env={names}"] if names else []),
            *container.args,
        ]

    def environment(self, container: Container, gpus: bool) -> dict[str, str]:
        """Return the variables that enroot's hooks read."""
        found = {"MELLANOX_VISIBLE_DEVICES": "all"}
        if gpus:
            found["NVIDIA_VISIBLE_DEVICES"] = "all"  # of those that the job may open
            found["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility"
        return found

    def around(self, launcher: Sequence[str]) -> list[str]:
        """Return srun with the options of the container first."""
        program, *options = launcher
        return [program, IN_CONTAINER, *options]

    def supervisor(self) -> list[str]:
        """Return a job step with all resources of this node, which other steps may use, too."""
        options = "--overlap --ntasks=1 --nodes=1 --mem=0 --cpu-bind=none --mpi=none --export=ALL"
        node = '--nodelist="$SLURMD_NODENAME"'
        return self.around(["srun", options, node, "--unbuffered"])


RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (Apptainer(), Singularity(), Charliecloud(), Pyxis(), Podman(), PodmanHpc())
}
"""By the value of `runtime`."""


# -- a copy of the site's environment on each node -------------------------------------------------
@dataclass(frozen=True)
class Staging:
    """A tarball that jobs unpack once per node. Both are words of bash, expanded in the job."""

    archive: Bash
    folder: Bash


def choose_staging(diagnostics: Diagnostics) -> Staging | None:
    """Return the site's staging, unless the profile selects a Python of its own."""
    spec = diagnostics.spec
    site, profile = spec.site.site, spec.profile
    archive = site.environment.staging
    if not archive:
        return None
    reason = ""
    if profile.environment.python or profile.environment.setup:
        reason = "the profile selects the Python of the jobs"
    elif profile.layout != "workers":
        reason = f"a job of `layout: {profile.layout}` may have several nodes"
    if reason:
        diagnostics.note(f"the environment of the site ({archive}) is not used: {reason}")
        return None
    return Staging(Bash(with_variables(archive)), Bash(_folder(site)))


def _folder(site: Site) -> str:
    folder = site.environment.staging_folder
    return with_variables(folder) if folder else f'"{site.scratch}"'


# -- the container of a cluster's jobs, from the profile and the site ------------------------------
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
    """Further folders of the node, which have the same path in the container; "": a job folder."""
    modules: bool
    """Whether the folder of the program, if it is there, is mounted, too."""
    scratch_word: str
    """The scratch folder, as a word of bash."""
    workdir: str
    """A word of bash."""
    args: tuple[str, ...]
    """Words of bash."""
    env: Mapping[str, str]
    """The profile's."""

    def __str__(self) -> str:
        return f"{self.image} ({self.runtime.name})"

    @property
    def is_path(self) -> bool:
        """Whether the image is a file or a folder, not an address."""
        return not _ADDRESS.fullmatch(self.image)

    @property
    def image_word(self) -> str:
        """The image as a word of bash."""
        return with_variables(self.image) if self.is_path else shlex.quote(self.image)

    @property
    def mounts(self) -> list[str]:
        """The folders that are mounted and their places in the container, as words of bash."""
        mounts = []
        for bind in self.binds:
            source, _, target = bind.partition(":")
            word = with_variables(source)
            mounts.append(f"{word}:{shlex.quote(target) if target else word}")
        words = []
        for folder in self.folders:
            words.append(shlex.quote(folder) if folder else '"$gpujobs_root"')
        words.append('"$scratch"')
        if self.modules:  # which may be missing on the node
            words.append(f'"${{{MODULES}:-$scratch}}"')
        return [*dict.fromkeys([*mounts, *(f"{word}:{word}" for word in words)])]


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
    site_args = site.containers.args if runtime.name == site.containers.runtime else ()
    return Container(
        runtime=runtime,
        image=image,
        binds=site.containers.binds,
        folders=(root, workdir),
        modules=_has_own_mount(spec.modules, runtime, workdir),
        scratch_word=scratch_word(profile.workers, site),
        workdir=shlex.quote(workdir),
        args=tuple(map(with_variables, (*site_args, *wanted.args))),
        env=profile.env,
    )


def _has_own_mount(modules: str, runtime: Runtime, workdir: str) -> bool:
    own = bool(modules) and not Path(modules).is_relative_to(workdir)
    return own and not set(modules) & set(runtime.separators)


def names_directory(workers: Workers, site: Site) -> bool:
    """Return whether profile or site name the scratch folder, not dask's configuration."""
    return bool(workers.local_directory) or site.scratch != Site.scratch


def scratch_word(workers: Workers, site: Site) -> str:
    """Return the scratch folder of workers, as a word of bash."""
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
    launchers = {
        "mpi": (("mpi", "command"), site.mpi.command),
        "allocation": (("node_launcher",), site.node_launcher),
    }
    key, command = launchers.get(spec.profile.layout, ((), None))
    if command and Path(command[0]).name != runtime.launcher:
        message = f"{runtime.name} needs {runtime.launcher}; the site starts nodes by {command[0]}"
        diagnostics.profile_error(message, *KEY, related=spec.site_position(*key))


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
    hint = did_you_mean(image, names) or f"a path, or docker://{image}"
    message = f"the site has no image {image}: {listed}"
    diagnostics.profile_error(message, *KEY, "image", hint=hint)
