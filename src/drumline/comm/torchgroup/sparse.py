"""The sum of sparse (COO) tensors over the ranks: every rank gets everybody's entries and adds them up in order."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calls import signature
from .buffers import Refused
from .engine import Engine


def all_reduce_sparse(engine: Engine, tensor: Tensor, op: str, size: int) -> None:
    """In place. The ranks may have different numbers of entries, but agree on shape and type."""
    if op != "sum":
        raise Refused(f"{op} of sparse tensors", rule="sparse tensors can be summed")
    mine = tensor.detach().coalesce()
    where, what = mine.indices(), mine.values()
    call = signature("all_reduce_sparse", mine.dtype, (mine.sparse_dim(), *mine.shape), op)
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    engine.all_gather(torch.tensor([where.shape[1]]), counts, call)
    entries = [int(n) for n in counts]
    most = max(entries)

    def spread(rows: Tensor) -> Tensor:
        """Everybody's rows, one below the other; all send as many as the longest."""
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        found = [torch.empty_like(padded) for _ in range(size)]
        engine.all_gather(padded, found, call)
        return torch.cat([part[:n] for part, n in zip(found, entries, strict=True)])

    total = torch.sparse_coo_tensor(spread(where.t()).t(), spread(what), mine.shape, check_invariants=False)
    tensor.copy_(total.coalesce())  # not of a detached one: that has its own number of entries
