"""torchrun: fixed (`--nproc-per-node 4`) or elastic (`--nnodes 1:4`), with restarts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from ..core.rank_info import ELASTIC
from .launcher import LAUNCHER, Launcher


@final
class TorchrunLauncher(Launcher):
    """Ranks of torchrun, or of any other program that sets RANK and WORLD_SIZE."""

    name = "torchrun"
    how = "torchrun --nproc-per-node N -m drumline train JOB"

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> bool:
        """By RANK and WORLD_SIZE; one rank alone counts only under torchrun, which may add others later."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment or LAUNCHER in environment:
            return False
        return ELASTIC in environment or environment["WORLD_SIZE"] != "1"
