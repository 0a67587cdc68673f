"""Helpers of the rules (random numbers, windows, empty parts), and rules for operators of earlier passes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from ...torchkit.fake_tensors import FakeTensor
from ..partial_gradients import divide_gradient
from ..sharding import redistribution
from ..sharding.halo_exchange import Span, rebalance, window, windows
from ..sharding.layout import ShardedValue, Split
from ..sharding.redistribution import Axis
from ..sharding.ring_attention import ring_attention
from ..sharding_pass import ShardingPass, rule
from ..spatial.rows import average_rows, empty_part, pick_rows, sample_rows, scale_rows


@contextmanager
def per_rank_random(index: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers that follow from the common generator's next number and from `index`.

    Afterwards, ranks with the same seed have drawn one number each, whatever they drew inside.
    """
    seed = int(torch.randint(2**62, ()).item())
    host = torch.get_rng_state()
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    torch.default_generator.manual_seed((seed + 0x9E3779B97F4A7C15 * (index + 1)) % 2**63)
    if state is not None:
        torch.cuda.manual_seed((seed + 0x9E3779B97F4A7C15 * (index + 1)) % 2**63)
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if state is not None:
            torch.cuda.set_rng_state(state, device)


def per_rank_dropout(x: torch.Tensor, operator: Any, p: float, index: int) -> torch.Tensor:
    """Dropout of this rank's part."""
    if isinstance(x, FakeTensor):
        return operator(x, p, True)  # type: ignore[no-any-return]  # torch's own
    with per_rank_random(index, x.device):
        return operator(x, p, True)  # type: ignore[no-any-return]  # torch's own


def operator_of(node: Node) -> Any:
    """The operator of a node, also where the node stands for it on an empty part."""
    return node.args[0] if node.target is empty_part else node.target


def call_on_part(ctx: ShardingPass, do: Any, shape: Sequence[int], *args: Any) -> Node:
    """Call an operator on this rank's part; its result has this shape."""
    tensors = [
        a.fake if isinstance(a, ShardedValue) else a.meta["val"] for a in args if isinstance(a, ShardedValue | Node)
    ]
    if all(t.numel() for t in tensors):
        return ctx.call(do, *args)
    return ctx.call(empty_part, do, list(shape), *args)


def local_shape(ctx: ShardingPass, node: Node, split: Split) -> list[int]:
    """The shape of this rank's part of a node's result."""
    shape = list(node.meta["val"].shape)
    shape[split.dim] = split.length(ctx.axis.index)
    return shape


def part_by_part(ctx: ShardingPass, node: Node, x: ShardedValue, *args: Any) -> ShardedValue:
    """Apply an operator that keeps the split dim to each part independently."""
    return ctx.value(call_on_part(ctx, operator_of(node), local_shape(ctx, node, x.split), x, *args), x.layout)


def with_indices(ctx: ShardingPass, node: Node, x: ShardedValue, *args: Any) -> Any:
    """Maxima and their indices, by samples or channels: each rank its own."""
    if not x.fake.numel():
        return NotImplemented
    result = ctx.call(node.target, x, *args)
    wholes = [v.shape for v in node.meta["val"]]
    return [ShardedValue(ctx.call(operator.getitem, result, i), x.layout, whole) for i, whole in enumerate(wholes)]


def reads_indices(node: Node) -> bool:
    """Whether the indices of the maxima are read."""
    return any(user.args[1] != 0 and user.users for user in node.users)


def rows_of(
    ctx: ShardingPass, x: ShardedValue, wanted: Sequence[Span], fill: float = 0.0, axis: Axis | None = None
) -> Node:
    """The rows that each rank wants of a split value."""
    bounds = x.split.bounds
    if tuple(wanted) == tuple(pairwise(bounds)):
        return x.node
    return ctx.call(window, x, x.split.dim, bounds, tuple(wanted), axis or ctx.axis, fill)


def scaled_cuts(split: Split, times: int, over: int, dim: int) -> Split | None:
    """Every bound times a fraction, along another dim; None if it is not whole."""
    if any(b * times % over for bounds in split.cuts for b in bounds):
        return None
    return Split(dim, tuple(tuple(b * times // over for b in bounds) for bounds in split.cuts))


@rule(empty_part)
def of_empty_part(ctx: ShardingPass, node: Node, do: Any, shape: Sequence[int], *args: Any) -> Any:
    """Apply the rule of the operator that it stands for."""
    apply: Callable[..., Any] | None = ctx.rules.get(do)
    return apply(ctx, node, *args) if apply else NotImplemented


@rule(window, windows, rebalance, pick_rows, scale_rows, average_rows, sample_rows)
def along_one_dim(ctx: ShardingPass, node: Node, x: ShardedValue, dim: int, *args: Any) -> Any:
    """Operators that an earlier pass inserted along its dim: elementwise along the others."""
    if x.split.dim == dim:
        return NotImplemented
    return ctx.value(ctx.call(node.target, x, dim, *args), x.layout)


@rule(redistribution.enter_split_work, redistribution.reduce_partial, divide_gradient, per_rank_dropout)
def same(ctx: ShardingPass, node: Node, x: ShardedValue, *args: Any) -> Any:
    """Elementwise."""
    return ctx.value(ctx.call(node.target, x, *args), x.layout)


@rule(
    redistribution.gather,
    redistribution.gather_into_split_work,
    redistribution.take_part,
    redistribution.reduce_scatter_partial,
)
def along(ctx: ShardingPass, node: Node, x: ShardedValue, split: Split, axis: Axis) -> Any:
    """Along a dim that this axis does not split."""
    if x.split.dim == split.dim:
        return NotImplemented
    return ctx.value(ctx.call(node.target, x, split, axis), x.layout)


@rule(ring_attention)
def ring(
    ctx: ShardingPass,
    node: Node,
    q: ShardedValue,
    k: ShardedValue,
    v: ShardedValue,
    *args: Any,
    mask: Any = None,
    **kwargs: Any,
) -> Any:
    """By heads or samples, each rank its own."""
    dim = next(x.layout for x in (q, k, v) if x.layout is not None).dim
    if dim >= q.dim - 2 or q.whole[dim] != k.whole[dim]:
        return NotImplemented
    split = next(x.layout for x in (q, k, v) if x.layout is not None)
    q, k, v = (ctx.split(x, split) for x in (q, k, v))
    if isinstance(mask, ShardedValue):
        place = dim - (q.dim - mask.dim)
        wide = place >= 0 and mask.whole[place] > 1
        mask = ctx.split(mask, split.along(place)) if wide else ctx.whole(mask, enter=True)
    return ctx.value(ctx.call(node.target, q, k, v, *args, mask=mask, **kwargs), split)
