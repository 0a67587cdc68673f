"""Functions that the launcher tests run on ranks: they end in every way that a rank can end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drumline.comm.environment import connect, rank_info, rank_zero_first
from drumline.comm.rank_status import rank_status
from drumline.core.errors import PlanError


def whereabouts(*given: Any) -> tuple[Any, ...]:
    """Rank, size, threads and the arguments."""
    here = rank_info()
    return here.rank, here.size, torch.get_num_threads(), given


def add_up() -> torch.Tensor:
    """The result of a collective."""
    x = torch.full((3,), float(connect().rank + 1))
    dist.all_reduce(x)
    return x


def mutate(x: torch.Tensor) -> list[float]:
    """Write to an argument, which is this rank's own copy."""
    x += rank_info().rank + 1
    time.sleep(0.2)
    return x.tolist()  # type: ignore[no-any-return]  # torch's


def emit_and_return(emit: Any, n: int) -> int:
    """Emit records while running."""
    for i in range(n):
        emit({"i": i})
    return rank_info().rank


def fails(bad: int, how: str) -> Any:
    """One rank fails; the others wait for it in a collective."""
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
            return threading.Lock()
        if how == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    dist.barrier()
    return None


def all_fail() -> None:
    """Every rank fails."""
    raise ValueError(f"from {rank_info().rank}")


def in_order(folder: str) -> list[str]:
    """The first rank is slow, yet runs before the others."""
    with rank_zero_first():
        rank = rank_info().rank
        seen = sorted(p.name for p in Path(folder).iterdir())
        if rank == 0:
            time.sleep(0.3)
        (Path(folder) / str(rank)).touch()
    return seen


def zero_fails_first() -> str:
    """An error of the first rank inside the block does not leave the others waiting."""
    try:
        with rank_zero_first():
            if rank_info().rank == 0:
                raise ValueError("no download")
    except ValueError:
        return "raised"
    return "done"


def emits_and_fails(emit: Any, folder: str, count: int) -> None:
    """The first rank emits records; then another one fails."""
    sent, failed = Path(folder, "sent"), Path(folder, "failed")
    if rank_info().rank == 0:
        for i in range(count):
            emit({"i": i})
        sent.touch()
        time.sleep(600)
    while not sent.exists():
        time.sleep(0.01)
    failed.touch()
    raise ValueError("after the last record")


def emits_and_hangs(emit: Any, count: int) -> None:
    """The ranks emit records, take warm steps, and then wait for good."""
    for i in range(count):
        emit({"i": i})
    for step in range(8):
        rank_status().step(step)
        time.sleep(0.1)
    time.sleep(600)
