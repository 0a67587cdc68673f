"""The rank of this process and the launcher that started it, read from the launcher's environment variables.

Without torch: the command line asks before it loads anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import InputError

LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""By launcher, the variables of rank, size, local rank and local size; the first one whose variables are set counts."""

STORE = "DRUMLINE_STORE"
"""The variable with the file store of Drumline's own launcher: no port is opened."""
REPLACED = "DRUMLINE_REPLACED"
"""The variable with the number of processes that had this rank before, in one run."""
ELASTIC = "TORCHELASTIC_RUN_ID"
"""Set by torchrun, and not by others that use its variables of rank and size."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of this process, and the launcher that started it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launcher: str = ""
    """Empty if there is none."""


def rank_info(environment: Mapping[str, str] | None = None) -> RankInfo:
    """Read rank and size from the environment; refuse values that are inconsistent or incomplete."""
    env = os.environ if environment is None else environment
    for launcher, (rank, size, local, _) in LAUNCHERS.items():
        if launcher == "Slurm" and "SLURM_STEP_ID" not in env:
            continue  # inside an allocation, but not started by srun
        if rank in env and size in env:
            r, n, i = integer(env, rank), integer(env, size), integer(env, local if local in env else rank)
            if r >= n:
                raise InputError(f"{rank}={r} and {size}={n}", where="environment", rule=f"{rank} < {size}")
            _check_half(env, f"{size}={n}", n)
            return RankInfo(r, n, i, launcher)
    _check_half(env, "no other launcher's variables", None)
    return RankInfo()


def local_size(where: RankInfo, environment: Mapping[str, str] | None = None) -> int | None:
    """Number of ranks on this host; None if the launcher does not report it."""
    env = os.environ if environment is None else environment
    if STORE in env:
        return where.size
    name = LAUNCHERS[where.launcher][3] if where.launcher else ""
    if where.launcher == "Slurm" and name not in env and env.get("SLURM_STEP_NUM_NODES") == "1":
        return where.size
    return integer(env, name) if name in env else None


def is_launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether another program has started this process as one of several ranks of a job.

    One rank alone is a job of its own (`srun --pty bash`), except under torchrun, which may add ranks later.
    """
    env = os.environ if environment is None else environment
    where = rank_info(env)
    return where.size > 1 or (where.launcher == "torchrun" and ELASTIC in env)


def is_first_rank() -> bool:
    """Whether this process speaks for the job: it is the launcher's first rank, or was not started by one."""
    return not is_launched() or rank_info().rank == 0


def _check_half(env: Mapping[str, str], other: str, size: int | None) -> None:
    """Refuse RANK without WORLD_SIZE, or the other way round, unless it agrees with another launcher's size.

    Ranks that ignored it would each train alone.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return
    for given, missing in (("WORLD_SIZE", "RANK"), ("RANK", "WORLD_SIZE")):
        if given not in env:
            continue
        value = integer(env, given)
        if given == "WORLD_SIZE" and value == (1 if size is None else size):
            continue
        raise InputError(
            f"{given}={value}, but {missing} is not set",
            where="environment",
            rule=f"RANK and WORLD_SIZE are set together; there is {other}",
            fix=f"set {missing} too, or unset {given}",
        )


def integer(env: Mapping[str, str], key: str) -> int:
    """The whole number in a variable."""
    text = env[key]
    if not re.fullmatch("[0-9]{1,9}", text):
        raise InputError(f"{key}={text!r}", where="environment", rule=f"{key} is a whole number of at least 0")
    return int(text)
