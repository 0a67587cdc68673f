"""What the tests of the launcher run on ranks: functions that end in every way that a rank can end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drumline.comm.environment import connect, place, rank_zero_first
from drumline.core.errors import PlanError


def whereabouts(*given: Any) -> tuple[Any, ...]:
    """Rank, size, threads and what was given."""
    here = place()
    return here.rank, here.size, torch.get_num_threads(), given


def add_up() -> torch.Tensor:
    """A tensor that went through a collective."""
    x = torch.full((3,), float(connect().rank + 1))
    dist.all_reduce(x)
    return x


def mutate(x: torch.Tensor) -> list[float]:
    """Write to an argument: it is this rank's own."""
    x += place().rank + 1
    time.sleep(0.2)
    return x.tolist()  # type: ignore[no-any-return]  # torch's


def emit_and_return(emit: Any, n: int) -> int:
    """Records on the way."""
    for i in range(n):
        emit({"i": i})
    return place().rank


def fails(bad: int, how: str) -> Any:
    """One rank ends badly; the others wait for it in a collective."""
    where = connect()
    dist.barrier()
    if where.rank == bad:
        if how == "value":
            raise ValueError("the first line\nthe second")
        if how == "ours":
            raise PlanError("a plan", where="here", rule="r", fix="f")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(3)
        if how == "os._exit":
            os._exit(7)
        if how == "unpicklable":
            return lambda: None
        if how == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    dist.barrier()
    return None


def all_fail() -> None:
    """Every rank has something to say."""
    raise ValueError(f"from {place().rank}")


def in_order(folder: str) -> list[str]:
    """The first rank is slow, and yet before the others."""
    with rank_zero_first():
        rank = place().rank
        seen = sorted(p.name for p in Path(folder).iterdir())
        if rank == 0:
            time.sleep(0.3)
        (Path(folder) / str(rank)).touch()
    return seen


def zero_fails_first() -> str:
    """What the first rank raises inside does not leave the others waiting."""
    try:
        with rank_zero_first():
            if place().rank == 0:
                raise ValueError("no download")
    except ValueError:
        return "raised"
    return "done"
