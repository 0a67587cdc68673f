"""All-reduce of two ranks with shared memory, at every block boundary: each writes where it has just read."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from test_shm import group_of
from torch import Tensor

from drumline.comm.shm.segment import SLOT, SMALL

OPS: dict[dist.ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.AVG: lambda a, b: (a + b) / 2,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.uint8, torch.int16, torch.int64)


def input_of(rank: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A rank's input: floats that are sensitive to rounding and order, or integers with all bits."""
    draw = torch.Generator().manual_seed(2 * seed + rank)
    if dtype in FLOATS:
        return torch.randn(size, generator=draw, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, (size,), generator=draw).to(dtype)


def reduced(a: Tensor, b: Tensor, op: dist.ReduceOp) -> Tensor:
    """The expected reduction in rank order; half types in float, rounded once."""
    wide = a.dtype in (torch.float16, torch.bfloat16)
    return OPS[op](a.float(), b.float()).to(a.dtype) if wide else OPS[op](a, b)


def check(size: int, dtype: torch.dtype, op: dist.ReduceOp, seed: int, shift: int = 0) -> None:
    """Check one all-reduce bit by bit; the tensor starts `shift` elements into its memory, whose rest must not change."""
    group = group_of()
    mine = input_of(group.rank(), shift + size + 1, dtype, seed)
    before = mine.clone()
    dist.all_reduce(mine[shift : shift + size], op=op, group=group)
    a, b = (input_of(r, shift + size + 1, dtype, seed)[shift : shift + size] for r in (0, 1))
    assert torch.equal(mine[shift : shift + size], reduced(a, b, op)), (size, dtype, op)
    assert torch.equal(mine[:shift], before[:shift]) and mine[-1] == before[-1], (size, dtype, op)


def edges(dtype: torch.dtype) -> list[int]:
    """Sizes near the limits of the mailbox, of a tile, and of one to five blocks."""
    item = dtype.itemsize
    marks = [SMALL, SLOT, SLOT + 2048, 2 * SLOT, 3 * SLOT, 4 * SLOT, 5 * SLOT + 6144]
    return [mark // item + off for mark in marks for off in (-1, 0, 1)]


def every_edge() -> None:
    for seed, size in enumerate(edges(torch.float32)):
        check(size, torch.float32, dist.ReduceOp.SUM, seed, shift=seed % 3)


def every_type_and_operator() -> None:
    for seed, dtype in enumerate((*FLOATS, *WHOLE)):
        for op in OPS:
            if op == (dist.ReduceOp.BXOR if dtype in FLOATS else dist.ReduceOp.AVG):
                continue
            check(5 * SLOT // dtype.itemsize + 77, dtype, op, seed)


def among_others(calls: int) -> None:
    """Other collectives use the same memory in between, and one rank or the other is late."""
    group, alike = group_of(), random.Random(3)
    r, own = group.rank(), random.Random(100 + group.rank())
    for seed in range(calls):
        if own.random() < 0.2:
            time.sleep(own.random() * 0.002)
        check(alike.choice(edges(torch.float32)), torch.float32, dist.ReduceOp.SUM, seed)
        size, kind = alike.choice(edges(torch.float32)), alike.choice(("broadcast", "gather", "reduce", "nothing"))
        mine = input_of(r, size, torch.float32, seed)
        a, b = (input_of(s, size, torch.float32, seed) for s in (0, 1))
        if kind == "broadcast":
            dist.broadcast(mine, group_src=1, group=group)
            assert torch.equal(mine, b)
        elif kind == "gather":
            whole = torch.empty(2 * size)
            group.all_gather_single(whole, mine).wait()
            assert torch.equal(whole, torch.cat([a, b]))
        elif kind == "reduce":
            dist.reduce(mine, group_dst=0, group=group)
            assert r == 1 or torch.equal(mine, a + b)


def test_at_every_edge_of_a_block(world) -> None:
    world(2).run(every_edge)


def test_every_type_and_operator_has_the_same_bits_on_both_ranks(world) -> None:
    world(2).run(every_type_and_operator)


@pytest.mark.parametrize("calls", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_between_other_collectives_and_late_ranks(world, calls: int) -> None:
    world(2).run(among_others, calls)
