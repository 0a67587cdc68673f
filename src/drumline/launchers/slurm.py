"""Slurm: ranks of srun, and the batch script that starts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from ..core.rank_info import rank_info
from .launcher import Launcher


@final
class SlurmLauncher(Launcher):
    """Ranks of srun."""

    name = "slurm"
    how = "srun --ntasks N drumline train JOB"

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> bool:
        """By srun's variables, for more than one task: one alone may be an interactive shell."""
        where = rank_info(environment)
        return where.launcher == "Slurm" and where.size > 1
