"""MPI's own collectives on flat CPU tensors, through mpi4py: used by `algorithm="native"` and the torch backend.

A small collective is started and then polled; a large one polls a barrier until all ranks are ready and then runs at
MPI's full speed. So a long wait occupies no core, and a missing rank leads to a timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.errors import GaveUp, InputError
from .world import bytes_of, load, until, world

SMALL = 64 << 10
"""Bytes up to which a collective is started and polled."""
_LARGEST = (1 << 31) - 1
"""The largest count of one MPI call."""
_PIECE = 1 << 28
"""Elements of a reduction per MPI call."""

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.bool: "C_BOOL",
}
_HALF = (torch.float16, torch.bfloat16)
"""Types that MPI lacks: reduced in float32 and rounded once."""
_OPS = {
    "sum": "SUM",
    "avg": "SUM",
    "product": "PROD",
    "max": "MAX",
    "min": "MIN",
    "land": "LAND",
    "lor": "LOR",
    "lxor": "LXOR",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
_BOOL_OPS = {
    "sum": "LOR",
    "max": "LOR",
    "lor": "LOR",
    "bor": "LOR",
    "product": "LAND",
    "min": "LAND",
    "land": "LAND",
    "band": "LAND",
    "lxor": "LXOR",
    "bxor": "LXOR",
}
"""Torch's operators on booleans, as MPI's logical operators."""


def can_reduce(op: str, dtype: torch.dtype) -> bool:
    """Whether MPI has this reduction for this type, with torch's semantics."""
    if dtype == torch.bool:
        return op in _BOOL_OPS
    if op not in _OPS or (dtype not in _TYPES and dtype not in _HALF):
        return False
    if dtype.is_complex:
        return op in ("sum", "avg", "product")
    if dtype.is_floating_point:
        return op in ("sum", "avg", "product", "max", "min")
    return op != "avg"


class MpiCollectives:
    """The collectives of an mpi4py communicator. All ranks make it together; one call at a time."""

    def __init__(self, comm: Any = None, *, timeout: float = 300.0) -> None:
        self._mpi = load()
        self.comm = (world() if comm is None else comm).Dup()
        self.rank, self.size = int(self.comm.Get_rank()), int(self.comm.Get_size())
        self.timeout = timeout

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Reduce in place on every rank."""
        work = self._reducible(tensor)
        for start in range(0, work.numel(), _PIECE):
            part = work[start : start + _PIECE]
            self._run("Allreduce", part, self._mpi.IN_PLACE, self._typed(part), self._op(op, tensor.dtype))
        self._finish(work, tensor, op)

    def reduce(self, source: Tensor, target: Tensor | None, op: str, root: int) -> None:
        """Reduce into `target` on the root."""
        work = self._reducible(source)
        result = work.new_empty(work.shape) if target is not None and self.rank == root else None
        for start in range(0, work.numel(), _PIECE):
            part = work[start : start + _PIECE]
            into = None if result is None else self._typed(result[start : start + _PIECE])
            self._run("Reduce", part, self._typed(part), into, self._op(op, source.dtype), root)
        if result is not None and target is not None:
            self._finish(result, target, op)

    def reduce_scatter(self, source: Tensor, target: Tensor, op: str) -> None:
        """Reduce `source`, which has one share per rank, and write this rank's share to `target`."""
        work = self._reducible(source)
        share = work.new_empty(target.numel())
        self._run("Reduce_scatter_block", work, self._typed(work), self._typed(share), self._op(op, source.dtype))
        self._finish(share, target, op)

    def scan(self, source: Tensor, target: Tensor, op: str, *, exclusive: bool = False) -> None:
        """Reduce over the ranks up to this one, or before it if `exclusive`, which writes nothing on rank 0."""
        work = self._reducible(source)
        result = work.new_empty(work.shape)
        name = "Exscan" if exclusive else "Scan"
        self._run(name, work, self._typed(work), self._typed(result), self._op(op, source.dtype))
        if not exclusive or self.rank > 0:
            self._finish(result, target, op, ranks=self.rank + (0 if exclusive else 1))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy from the root to all ranks."""
        data = bytes_of(tensor)
        for start in range(0, len(data), _PIECE):
            self._run("Bcast", tensor, [data[start : start + _PIECE], self._mpi.BYTE], root)

    def all_gather(self, source: Tensor, target: Tensor) -> None:
        """Concatenate every rank's `source` in `target`."""
        self._run("Allgather", target, self._raw(source), self._raw(target))

    def gather(self, source: Tensor, target: Tensor | None, root: int) -> None:
        """Concatenate every rank's `source` in the root's `target`."""
        into = None if target is None else self._raw(target)
        self._run("Gather", source, self._raw(source), into, root, ranks=self.size)

    def scatter(self, source: Tensor | None, target: Tensor, root: int) -> None:
        """Distribute the root's `source`, one share per rank."""
        given = None if source is None else self._raw(source)
        self._run("Scatter", target, given, self._raw(target), root, ranks=self.size)

    def all_to_all(self, source: Tensor, target: Tensor) -> None:
        """Send a block of `source` to each rank and receive a block of `target` from each; all have the same length."""
        self._run("Alltoall", source, self._raw(source), self._raw(target))

    def all_to_allv(self, source: Tensor, sent: Sequence[int], target: Tensor, received: Sequence[int]) -> None:
        """All-to-all with blocks of different lengths, in elements."""
        sides = []
        for tensor, counts in ((source, sent), (target, received)):
            lengths = [n * tensor.element_size() for n in counts]
            places = [sum(lengths[:i]) for i in range(len(lengths))]
            sides.append([self._raw(tensor)[0], (lengths, places), self._mpi.BYTE])
        # Sizes differ by rank, and all ranks must use the same method: always poll.
        self._poll(self.comm.Ialltoallv(*sides), "Alltoallv")

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._poll(self.comm.Ibarrier(), "Barrier")

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        """All-gather equally long bytes, by rank."""
        table = bytearray(len(mine) * self.size)
        byte = self._mpi.BYTE
        self._poll(self.comm.Iallgather([mine, len(mine), byte], [table, len(mine), byte]), "Allgather")
        return [bytes(table[i : i + len(mine)]) for i in range(0, len(table), len(mine))]

    def _run(self, name: str, sized: Tensor, *arguments: Any, ranks: int = 1) -> None:
        """Run a collective; `sized` has the same size on all ranks, so that all use the same method."""
        try:
            if sized.numel() * sized.element_size() * ranks <= SMALL:
                self._poll(getattr(self.comm, "I" + name.lower())(*arguments), name)
            else:
                self._poll(self.comm.Ibarrier(), name)
                getattr(self.comm, name)(*arguments)
        except self._mpi.Exception as e:
            raise GaveUp(f"rank {self.rank} in MPI's {name}", rule=e.Get_error_string().splitlines()[0]) from e

    def _poll(self, request: Any, name: str) -> None:
        if not until(request.Test, self.timeout):
            raise GaveUp(
                f"rank {self.rank} waits in MPI's {name}", rule=f"not all ranks called it within {self.timeout:g} s"
            )

    def _reducible(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in _HALF else tensor

    def _finish(self, result: Tensor, target: Tensor, op: str, *, ranks: int | None = None) -> None:
        if op == "avg":
            result /= self.size if ranks is None else ranks
        if result.data_ptr() != target.data_ptr():
            target.copy_(result)

    def _typed(self, tensor: Tensor) -> list[Any]:
        self._check(tensor.numel())
        kind = getattr(self._mpi, _TYPES[tensor.dtype])
        return [bytes_of(tensor), kind]

    def _raw(self, tensor: Tensor) -> list[Any]:
        data = bytes_of(tensor)
        self._check(len(data))
        return [data, self._mpi.BYTE]

    def _check(self, count: int) -> None:
        if count > _LARGEST:
            raise InputError(f"a collective of {count} at once", rule=f"MPI counts up to {_LARGEST}", fix="cut it")

    def _op(self, op: str, dtype: torch.dtype) -> Any:
        return getattr(self._mpi, _BOOL_OPS[op] if dtype == torch.bool else _OPS[op])
