"""Shared memory as a transport: messages through the rings, and the core's collectives as `native`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import InputError
from ...torchkit.process_groups import store_of
from ..call_check import signature
from ..messaging.transport import MatcherTransport
from ..transport import FINGERPRINT_BYTES, NativeCollective
from .core import DTYPES, OPS
from .process_group import ShmBackend

_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_BITWISE = {"band", "bor", "bxor"}
_made = 0
"""Number of transports made, for distinct keys in the store."""


class ShmTransport(MatcherTransport):
    """The ranks of a group on one host."""

    name = "shm"

    def __init__(self, backend: ShmBackend) -> None:
        super().__init__(backend.matcher, context=1)
        self._backend = backend
        self.per_node = backend.size
        self._words = torch.zeros(backend.size, FINGERPRINT_BYTES, dtype=torch.uint8)

    @classmethod
    def over(cls, group: dist.ProcessGroup | None = None, *, timeout: float = 300.0) -> ShmTransport:
        """For the ranks of a torch process group of any backend, through its store. All ranks call it."""
        global _made
        if not dist.is_initialized():
            raise InputError("torch.distributed is not initialised", fix="torch.distributed.init_process_group()")
        _made += 1
        store = store_of(group)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls(ShmBackend(dist.PrefixStore(f"drumline/shm/{_made}", store), rank, size, timeout))

    def agree(self, word: bytes) -> list[bytes]:
        """All-gather through the mailboxes: one wait."""
        mine = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        self._backend.all_gather(mine, list(self._words), _AGREE)
        return [row.numpy().tobytes() for row in self._words]

    def native(self, collective: str) -> NativeCollective | None:
        """The core's own collective."""
        run = _NATIVE.get(collective)
        if run is None:
            return None

        def call(source: Tensor | None, target: Tensor | None, *, op: str, root: int) -> bool:
            some = source if source is not None else target
            if some is not None and (some.is_cuda or not _supports(op, some.dtype)):
                return False
            run(self._backend, source, target, op, root)
            return True

        return call

    def close(self) -> None:
        """Leave the group."""
        self._backend.close()


_AGREE = signature("agree")


def _supports(op: str, dtype: torch.dtype) -> bool:
    if not op:
        return True
    if op not in OPS or dtype not in DTYPES:
        return False
    if dtype == torch.bool:
        return op in {"band", "bor", "bxor", "max", "min"}
    if dtype.is_complex:
        return op in {"sum", "product", "avg"}
    return (op not in _BITWISE) if dtype in _FLOATS else op != "avg"


def _rows(tensor: Tensor | None, p: int) -> list[Tensor]:
    assert tensor is not None
    return list(tensor.view(p, -1).unbind(0))


def _all_reduce(b: ShmBackend, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert target is not None
    b.all_reduce(target, op, signature("all_reduce", target.dtype, (target.numel(),), op))


def _reduce(b: ShmBackend, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert source is not None
    work = source.clone() if target is None else target.copy_(source)
    b.all_reduce(work, op, signature("reduce", work.dtype, (work.numel(),), op, root), root=root)


def _broadcast(b: ShmBackend, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert target is not None
    b.broadcast(target, root, signature("broadcast", target.dtype, (target.numel(),), "", root))


def _all_gather(b: ShmBackend, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert source is not None
    b.all_gather(source, _rows(target, b.size), signature("all_gather", source.dtype, (source.numel(),)))


def _reduce_scatter(b: ShmBackend, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert target is not None
    call = signature("reduce_scatter", target.dtype, (target.numel(),), op)
    b.reduce_scatter(_rows(source, b.size), target, op, call)


def _gather(b: ShmBackend, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert source is not None
    call = signature("gather", source.dtype, (source.numel(),), "", root)
    out: list[Tensor | None] = [None] * b.size
    into: list[Tensor | None] = [None] * b.size
    if b.rank == root:
        rows = _rows(target, b.size)
        rows[root].copy_(source.view(-1))
        into = [None if s == root else row for s, row in enumerate(rows)]
    else:
        out[root] = source
    b.exchange(out, into, call)


def _scatter(b: ShmBackend, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    assert target is not None
    call = signature("scatter", target.dtype, (target.numel(),), "", root)
    out: list[Tensor | None] = [None] * b.size
    into: list[Tensor | None] = [None] * b.size
    if b.rank == root:
        rows = _rows(source, b.size)
        target.view(-1).copy_(rows[root])
        out = [None if s == root else row for s, row in enumerate(rows)]
    else:
        into[root] = target
    b.exchange(out, into, call)


def _all_to_all(b: ShmBackend, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    out, into = _rows(source, b.size), _rows(target, b.size)
    into[b.rank].copy_(out[b.rank])
    b.exchange(
        [None if s == b.rank else row for s, row in enumerate(out)],
        [None if s == b.rank else row for s, row in enumerate(into)],
        signature("all_to_all", out[0].dtype, (out[0].numel(),)),
    )


def _barrier(b: ShmBackend, source: Tensor | None, target: Tensor | None, op: str, root: int) -> None:
    b.barrier(signature("barrier"))


_NATIVE: dict[str, Callable[[ShmBackend, Tensor | None, Tensor | None, str, int], None]] = {
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
