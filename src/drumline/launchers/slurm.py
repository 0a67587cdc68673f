"""Slurm: ranks of srun, and the batch script that starts them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import final

from ..core.errors import InputError
from ..core.rank_info import rank_info
from .launcher import Launcher, LaunchOptions

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_GRACE = 120
"""Seconds before the end of the time limit at which the ranks are asked to save."""


@final
class SlurmLauncher(Launcher):
    """Ranks of srun."""

    name = "slurm"
    how = (
        "srun --ntasks N drumline train JOB; or drumline launch --launcher slurm --emit job.sh ..., then sbatch job.sh"
    )

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> bool:
        """By srun's variables, for more than one task: one alone may be an interactive shell."""
        where = rank_info(environment)
        return where.launcher == "Slurm" and where.size > 1

    def script(self, command: Sequence[str], options: LaunchOptions) -> str:
        """The batch script. Ranks get USR1 before the time is up, and save; a rank that fails ends the others."""
        name = options.name or "drumline"
        if not _NAME.fullmatch(name):
            raise InputError(f"--name {name[:80]!r}", rule="letters, digits, dots, hyphens and underscores, at most 64")
        lines = [
            "#!/bin/bash",
            f"#SBATCH --job-name={name}",
            f"#SBATCH --nodes={options.nodes}",
            f"#SBATCH --ntasks-per-node={options.per_node}",
            f"#SBATCH --signal=USR1@{_GRACE}",
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
            "",
            "# A rank that fails ends the job. After a preemption, --save-every and --resume auto continue the run.",
            *(f"export {key}={shlex.quote(value)}" for key, value in options.environment.items()),
            "exec srun --kill-on-bad-exit=1 " + shlex.join([sys.executable, "-m", "drumline", *command]),
        ]
        return "\n".join(lines) + "\n"
