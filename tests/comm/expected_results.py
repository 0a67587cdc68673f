"""The expected result of each collective, computed from all ranks' inputs, and a function that calls any of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from drumline.comm import Communicator, Operator
from drumline.schedules import ALGORITHMS

TABLE = [(collective, algorithm) for collective, known in ALGORITHMS.items() for algorithm in known]
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
ROWS = ("reduce_scatter", "scatter", "all_to_all")
"""Collectives whose input has one row per rank."""


def whole(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor that differs by rank and position; small integers, so that sums are exact in any order."""
    size = int(torch.tensor(shape).prod()) if shape else 1
    return (torch.arange(size) * 3 + 7 * rank).remainder(50).to(dtype).view(shape)


def matrices(rank: int, shape: tuple[int, ...]) -> Tensor:
    """Packed 2 x 2 integer matrices in the last dim: their products depend on the rank order."""
    size = int(torch.tensor(shape).prod())
    return (torch.arange(size) * 5 + 3 * rank + 1).remainder(4).to(torch.int64).view(shape)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply packed matrices modulo 101, so that nothing overflows."""
    return (a.view(-1, 2, 2) @ b.view(-1, 2, 2)).remainder(101).view(a.shape)


MATMUL = Operator(product, commutes=False, unit=4, name="matmul")


def expected(
    collective: str, inputs: list[Tensor], rank: int, root: int, op: Callable[[Tensor, Tensor], Tensor] = torch.add
) -> Tensor | None:
    """The expected result on a rank."""
    at_root = rank == root
    match collective:
        case "all_reduce":
            return reduce(op, inputs)
        case "reduce":
            return reduce(op, inputs) if at_root else None
        case "reduce_scatter":
            return reduce(op, inputs)[rank]
        case "scan":
            return reduce(op, inputs[: rank + 1])
        case "exscan":
            return reduce(op, inputs[:rank]) if rank else None
        case "broadcast":
            return inputs[root]
        case "all_gather":
            return torch.stack(inputs)
        case "gather":
            return torch.stack(inputs) if at_root else None
        case "scatter":
            return inputs[root][rank]
        case "all_to_all":
            return torch.stack([t[rank] for t in inputs])
    assert collective == "barrier"
    return None


def call(
    comm: Communicator, collective: str, tensor: Tensor, *, root: int = 0, op: Any = "sum", **how: Any
) -> Tensor | None:
    """Call a collective by name, with the arguments that it takes."""
    if collective == "barrier":
        return comm.barrier(**{k: v for k, v in how.items() if k == "algorithm"})
    if collective in REDUCING:
        how["op"] = op
    if collective in ROOTED:
        how["root"] = root
    if collective == "scatter" and comm.rank != root:
        return comm.scatter(None, out=torch.empty_like(tensor[0]), **how)
    return getattr(comm, collective)(tensor, **how)


def same(got: Tensor | None, wanted: Tensor | None) -> None:
    """Assert equal bits, shape and type."""
    if wanted is None:
        assert got is None
        return
    assert got is not None
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, f"{got.shape} {got.dtype}, not {wanted.shape}"
    assert torch.equal(got, wanted), f"{got.tolist()}, not {wanted.tolist()}"


def shape_of(collective: str, size: int, p: int) -> tuple[int, ...]:
    """The shape of an input whose share, or whole, has `size` elements."""
    return (p, size) if collective in ROWS else (size,)
