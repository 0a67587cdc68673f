"""mpiexec of Open MPI and MPICH. With mpi4py the ranks find each other through MPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from ..core.rank_info import rank_info
from .launcher import Launcher


@final
class MpiexecLauncher(Launcher):
    """Ranks of mpiexec."""

    name = "mpiexec"
    how = "mpiexec -n N drumline train JOB"

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> bool:
        """By the variables of Open MPI or MPICH, for more than one rank."""
        where = rank_info(environment)
        return where.launcher in ("Open MPI", "MPICH") and where.size > 1
