"""Container runtimes: the command that starts a program in an image.

All of them get the same folders, the same working directory and the variables of the profile. How
they pass the rest of the environment, GPUs and network devices differs, and is said at each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from .bash import command

IN_CONTAINER = '"${container[@]}"'
"""The words of the container's command, in a job."""


@dataclass(frozen=True)
class Mount:
    """A folder of the node and its place in the container; both are words of bash."""

    source: str
    target: str

    def __str__(self) -> str:
        """Return the mount as all runtimes take it."""
        return f"{self.source}:{self.target}"


@dataclass(frozen=True)
class Invocation:
    """What a runtime starts. The texts are words of bash."""

    mounts: Sequence[Mount]
    workdir: str
    args: Sequence[str]
    variables: Mapping[str, str]
    """The profile's `env`."""
    gpus: bool


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
    def words(self, call: Invocation) -> list[str]:
        """Return the words of ``container`` in a job, as bash."""

    def prepare(self, call: Invocation) -> list[str]:
        """Return lines of bash that come before the words."""
        return []

    def environment(self, call: Invocation) -> dict[str, str]:
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

    def words(self, call: Invocation) -> list[str]:
        """Return ``apptainer exec …``."""
        return [
            f"{self.program} exec",
            *(["--nv"] if call.gpus else []),
            *(f"--bind={mount}" for mount in call.mounts),
            f"--pwd={call.workdir}",
            *call.args,
            '"$image"',
        ]

    def environment(self, call: Invocation) -> dict[str, str]:
        """Return the profile's variables so that they have priority over the image's."""
        prefix = f"{self.program.upper()}ENV_"
        return {f"{prefix}{name}": value for name, value in call.variables.items()}


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

    def prepare(self, call: Invocation) -> list[str]:
        """Return the lines that find out if the image has variables."""
        return [
            'export USER="${USER:-$(id -un)}"',
            "of_image=(--set-env)   # an image need not have a file of variables",
            '[ ! -d "$image" ] || [ -e "$image/ch/environment" ] || of_image=()',
        ]

    def words(self, call: Invocation) -> list[str]:
        """Return ``ch-run … --``."""
        return [
            "env --unset=TMPDIR ch-run",
            *(f"--unset-env={name}" for name in self._unset),
            '"${of_image[@]}"',
            *(f"--bind={mount}" for mount in call.mounts),
            f"--cd={call.workdir}",
            *call.args,
            '--set-env=TMPDIR="$scratch"',
            # ch-run replaces $NAME: the values are not in its arguments, which others can read.
            *(f"--set-env='{name}=${self._prefix}{name}'" for name in call.variables),
            '"$image" --',
        ]

    def environment(self, call: Invocation) -> dict[str, str]:
        """Return the profile's variables under the names in `words`."""
        return {f"{self._prefix}{name}": value for name, value in call.variables.items()}


class Pyxis(Runtime):
    """Pyxis, which is part of Slurm's ``srun``: passes the environment, the image's has priority.

    The hooks of enroot make GPUs and InfiniBand visible, as these variables say.
    """

    name = "pyxis"
    program = "srun"
    separators = ":, "
    launcher = "srun"

    def prepare(self, call: Invocation) -> list[str]:
        """Return a check of the plugin, and the list of mounts, which `words` joins by commas."""
        return [
            "[[ $(srun --help 2>&1) == *--container-image* ]] ||",
            '    gpujobs_stop "srun has no option --container-image: Slurm has no plugin Pyxis"',
            f"mounts=({command(map(str, call.mounts))})",
        ]

    def words(self, call: Invocation) -> list[str]:
        """Return options of srun."""
        names = ",".join(call.variables)
        return [
            '--container-image="$image"',
            '--container-mounts="$(IFS=,; echo "${mounts[*]}")"',
            f"--container-workdir={call.workdir}",
            "--no-container-remap-root",
            *([f"--container-env={names}"] if names else []),
            *call.args,
        ]

    def environment(self, call: Invocation) -> dict[str, str]:
        """Return the variables that enroot's hooks read."""
        found = {"MELLANOX_VISIBLE_DEVICES": "all"}
        if call.gpus:
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
    runtime.name: runtime for runtime in (Apptainer(), Singularity(), Charliecloud(), Pyxis())
}
"""By the value of `runtime`."""
