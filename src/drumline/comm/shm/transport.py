"""Shared memory below the communicator: messages through the rings, and the core's own collectives as `native`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import InputError
from ..calls import signature
from ..mail.transport import MailTransport
from ..transport import WORD, Native
from .core import DTYPES, OPS
from .engine import ShmEngine

_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_BITS = {"band", "bor", "bxor"}
_groups = 0


class ShmTransport(MailTransport):
    """The ranks of a group on one host."""

    name = "shm"

    def __init__(self, engine: ShmEngine) -> None:
        super().__init__(engine.matching, context=1)
        self._engine = engine
        self.per_node = engine.size
        self._words = torch.zeros(engine.size, WORD, dtype=torch.uint8)

    @classmethod
    def over(cls, group: dist.ProcessGroup | None = None, *, timeout: float = 300.0) -> ShmTransport:
        """For the ranks of a torch process group of any backend; they meet through its store. All of them call it."""
        global _groups
        if not dist.is_initialized():
            raise InputError("torch.distributed is not initialised", fix="torch.distributed.init_process_group()")
        _groups += 1
        store = dist.distributed_c10d._get_process_group_store(group or dist.group.WORLD)  # type: ignore[arg-type]  # WORLD is there once initialised
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls(ShmEngine(dist.PrefixStore(f"drumline/shm/{_groups}", store), rank, size, timeout))

    def agree(self, word: bytes) -> list[bytes]:
        """Everybody's word, through the mailboxes: one wait."""
        mine = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        self._engine.all_gather(mine, list(self._words), _AGREE)
        return [row.numpy().tobytes() for row in self._words]

    def native(self, collective: str) -> Native | None:
        """The core's own."""
        run = _NATIVE.get(collective)
        if run is None:
            return None

        def call(source: Tensor | None, target: Tensor | None, *, op: str, root: int) -> bool:
            some = source if source is not None else target
            if some is not None and (some.is_cuda or not _knows(op, some.dtype)):
                return False
            run(self._engine, source, target, op, root)
            return True

        return call

    def close(self) -> None:
        """Leave the group."""
        self._engine.close()


_AGREE = signature("agree")


def _knows(op: str, dtype: torch.dtype) -> bool:
    if not op:
        return True
    if op not in OPS or dtype not in DTYPES:
        return False
    if dtype == torch.bool:
        return op in {"band", "bor", "bxor", "max", "min"}
    if dtype.is_complex:
        return op in {"sum", "product", "avg"}
    return (op not in _BITS) if dtype in _FLOATS else op != "avg"


def _rows(tensor: Tensor | None, p: int) -> list[Tensor]:
    assert tensor is not None
    return list(tensor.view(p, -1).unbind(0))


def _all_reduce(e: ShmEngine, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert target is not None
    e.all_reduce(target, op, signature("all_reduce", target.dtype, (target.numel(),), op))


def _reduce(e: ShmEngine, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert source is not None
    work = source.clone() if target is None else target.copy_(source)
    e.all_reduce(work, op, signature("reduce", work.dtype, (work.numel(),), op, root), root=root)


def _broadcast(e: ShmEngine, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert target is not None
    e.broadcast(target, root, signature("broadcast", target.dtype, (target.numel(),), "", root))


def _all_gather(e: ShmEngine, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert source is not None
    e.all_gather(source, _rows(target, e.size), signature("all_gather", source.dtype, (source.numel(),)))


def _reduce_scatter(e: ShmEngine, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert target is not None
    call = signature("reduce_scatter", target.dtype, (target.numel(),), op)
    e.reduce_scatter(_rows(source, e.size), target, op, call)


def _gather(e: ShmEngine, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert source is not None
    call = signature("gather", source.dtype, (source.numel(),), "", root)
    out: list[Tensor | None] = [None] * e.size
    into: list[Tensor | None] = [None] * e.size
    if e.rank == root:
        rows = _rows(target, e.size)
        rows[root].copy_(source.view(-1))
        into = [None if s == root else row for s, row in enumerate(rows)]
    else:
        out[root] = source
    e.exchange(out, into, call)


def _scatter(e: ShmEngine, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert target is not None
    call = signature("scatter", target.dtype, (target.numel(),), "", root)
    out: list[Tensor | None] = [None] * e.size
    into: list[Tensor | None] = [None] * e.size
    if e.rank == root:
        rows = _rows(source, e.size)
        target.view(-1).copy_(rows[root])
        out = [None if s == root else row for s, row in enumerate(rows)]
    else:
        into[root] = target
    e.exchange(out, into, call)


def _all_to_all(e: ShmEngine, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    out, into = _rows(source, e.size), _rows(target, e.size)
    into[e.rank].copy_(out[e.rank])
    e.exchange(
        [None if s == e.rank else row for s, row in enumerate(out)],
        [None if s == e.rank else row for s, row in enumerate(into)],
        signature("all_to_all", out[0].dtype, (out[0].numel(),)),
    )


def _barrier(e: ShmEngine, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    e.barrier(signature("barrier"))


_NATIVE: dict[str, Callable[[ShmEngine, Tensor | None, Tensor | None, str, int], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}
