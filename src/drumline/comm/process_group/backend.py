"""The interface below a torch process group in Python: moves contiguous tensors between its ranks (`shm`, `mpi4py`)."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...core.errors import InputError
from ..call_check import CallSignature, CallSite, digest, signature
from .buffers import RefusedCall


class BackendMessage(Protocol):
    """A send or receive in progress."""

    source: int
    """The rank that sent it."""

    def test(self) -> bool:
        """Whether it is complete; makes progress."""

    def wait(self, timeout: float | None) -> None:
        """Block until it is complete."""


class CollectiveBackend(ABC):
    """Moves contiguous CPU tensors between the ranks of a group. All ranks make the same calls in the same order."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str, call: CallSignature, *, root: int = -1) -> None:
        """Reduce in place, on all ranks or on `root` alone."""

    @abstractmethod
    def reduce_scatter(self, blocks: Sequence[Tensor], out: Tensor, op: str, call: CallSignature) -> None:
        """Write block `rank` of the reduction of all ranks' blocks to `out`."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, call: CallSignature) -> None:
        """Copy the root's tensor to all ranks."""

    @abstractmethod
    def all_gather(self, mine: Tensor, outs: Sequence[Tensor], call: CallSignature) -> None:
        """Write rank s's tensor to `outs[s]`; all have the same size."""

    @abstractmethod
    def exchange(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None], call: CallSignature) -> None:
        """Send `out[s]` to rank s and receive `into[s]` from it; None is no message."""

    @abstractmethod
    def barrier(self, call: CallSignature, timeout: float | None = None) -> None:
        """Return when all ranks have called it, within `timeout` seconds or the group's own timeout."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int) -> BackendMessage:
        """Start a send; it is complete when the tensor may be used again."""

    @abstractmethod
    def receive(self, tensor: Tensor, src: int, tag: int) -> BackendMessage:
        """Start a receive, from any rank if `src` is -1."""

    @abstractmethod
    def at_site(self, site: CallSite) -> None:
        """Set the line of the user's program that makes the next call."""

    def refuse(self, what: str) -> None:
        """Report to the others that this rank's call was refused, so that they do not wait for it."""
        text = f"refused: {what}"
        with contextlib.suppress(InputError):  # this rank's own error is more precise
            self.barrier(CallSignature(text, digest(text)))

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    def all_reduce_sparse(self, tensor: Tensor, op: str, size: int) -> None:
        """Sum sparse (COO) tensors in place: gather all ranks' entries and add them in rank order.

        The ranks may have different numbers of entries, but agree on shape and type.
        """
        if op != "sum":
            raise RefusedCall(f"{op} of sparse tensors", rule="sparse tensors can be summed")
        mine = tensor.detach().coalesce()
        indices, values = mine.indices(), mine.values()
        call = signature("all_reduce_sparse", mine.dtype, (mine.sparse_dim(), *mine.shape), op)
        counts = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
        self.all_gather(torch.tensor([indices.shape[1]]), counts, call)
        entries = [int(n) for n in counts]
        most = max(entries)

        def gather(rows: Tensor) -> Tensor:
            """All ranks' rows, concatenated; padded to the longest for the exchange."""
            padded = rows.new_zeros((most, *rows.shape[1:]))
            padded[: rows.shape[0]] = rows
            parts = [torch.empty_like(padded) for _ in range(size)]
            self.all_gather(padded, parts, call)
            return torch.cat([part[:n] for part, n in zip(parts, entries, strict=True)])

        total = torch.sparse_coo_tensor(gather(indices.t()).t(), gather(values), mine.shape, check_invariants=False)
        tensor.copy_(total.coalesce())  # not into a detached tensor: that has its own number of entries
