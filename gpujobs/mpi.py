"""For scripts that run in all ranks of an MPI allocation (``layout: mpi``, ``run_on: ranks``)."""

from __future__ import annotations

from .injob.rank import initialize

__all__ = ["initialize"]
