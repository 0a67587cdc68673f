"""Matmuls: labels say which dims belong together, as in `einsum`, and one rule serves all.

A parameter's split decides, because it cannot be moved. A split label that is in the result stays split there; one that
is summed over leaves partial sums, which are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..sharding.layout import ShardedValue, Split
from ..sharding_pass import ShardingPass, rule

aten = torch.ops.aten

Emit = Callable[[Sequence[ShardedValue]], Node]


def contract(ctx: ShardingPass, operands: Sequence[ShardedValue], labels: Sequence[str], out: str, emit: Emit) -> Any:
    """Contract `operands` whose dims have `labels` (a blank for a broadcast dim of size 1)."""
    chosen = _chosen(operands, labels)
    if chosen is None:
        return NotImplemented
    label, split = chosen
    placed = []
    for v, names in zip(operands, labels, strict=True):
        if label in names:
            placed.append(ctx.split(v, split.along(names.index(label))))
        else:
            # where the label is summed over, the work of the others is split too
            placed.append(ctx.whole(v, enter=True))
    result = emit(placed)
    if label in out:
        return ctx.value(result, split.along(out.index(label)))
    assert ctx.current is not None
    return ctx.reduce_partial(result, ctx.current.meta["val"].shape)


def _chosen(operands: Sequence[ShardedValue], labels: Sequence[str]) -> tuple[str, Split] | None:
    split_operands = [(v, names) for v, names in zip(operands, labels, strict=True) if v.layout is not None]
    split_operands.sort(key=lambda pair: not is_parameter(pair[0]))
    for v, names in split_operands:
        label = names[v.split.dim]
        if label != " ":
            return label, v.split
    return None


def is_parameter(v: ShardedValue) -> bool:
    """Whether a value is a parameter, possibly transposed or cast."""
    node = v.node
    while node.op == "call_function" and node.target in (aten.t.default, aten.transpose.int, aten.to.dtype):
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "placeholder" and node.meta.get("role") == "parameter"


@rule(aten.linear.default)
def linear(ctx: ShardingPass, node: Node, x: ShardedValue, w: ShardedValue, b: ShardedValue | None = None) -> Any:
    """Column (rows of the weight) or row (columns of the weight, with the bias added after the reduction)."""
    lead = "abcdefgh"[: x.dim - 1]
    if b is None:
        return contract(ctx, (x, w), (lead + "i", "oi"), lead + "o", lambda v: ctx.call(node.target, *v))
    if not _sums(x, w, (lead + "i", "oi"), "i"):
        return contract(ctx, (x, w, b), (lead + "i", "oi", "o"), lead + "o", lambda v: ctx.call(node.target, *v))
    out = contract(ctx, (x, w), (lead + "i", "oi"), lead + "o", lambda v: ctx.call(node.target, *v))
    return out if out is NotImplemented else _add(ctx, out, b)


def _sums(x: ShardedValue, w: ShardedValue, labels: tuple[str, str], over: str) -> bool:
    """Whether the split dim is summed over, so that the bias is added after the reduction."""
    chosen = _chosen((x, w), labels)
    return chosen is not None and chosen[0] == over


def _add(ctx: ShardingPass, out: ShardedValue, b: ShardedValue) -> ShardedValue:
    """Add a bias after the reduction."""
    b = ctx.whole(b, enter=out.layout is not None)
    return ShardedValue(ctx.call(aten.add.Tensor, out, b), out.layout, out.whole)


@rule(aten.addmm.default)
def addmm(
    ctx: ShardingPass,
    node: Node,
    b: ShardedValue,
    x: ShardedValue,
    w: ShardedValue,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    """b + x w."""
    if not _sums(x, w, ("ai", "io"), "i"):
        own = _broadcast(b, "ao")
        return contract(
            ctx, (b, x, w), (own, "ai", "io"), "ao", lambda v: ctx.call(node.target, *v, beta=beta, alpha=alpha)
        )
    if b.dim > 1 or (beta, alpha) != (1, 1):
        return NotImplemented
    out = contract(ctx, (x, w), ("ai", "io"), "ao", lambda v: ctx.call(aten.mm.default, *v))
    return out if out is NotImplemented else _add(ctx, out, b)


def _broadcast(v: ShardedValue, names: str) -> str:
    """The labels of an operand whose last dims are `names`, with blanks where it is broadcast."""
    return "".join(c if v.whole[i] > 1 else " " for i, c in enumerate(names[len(names) - v.dim :]))


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def matmul(ctx: ShardingPass, node: Node, x: ShardedValue, y: ShardedValue) -> Any:
    """The last dim of x is summed with the second last of y; leading dims are broadcast."""
    dims = max(x.dim, y.dim)
    lead = "abcdefgh"[: max(dims - 2, 0)]

    def names(v: ShardedValue, tail: str) -> str:
        own = lead[len(lead) - max(v.dim - 2, 0) :]
        return "".join(c if v.whole[i] > 1 else " " for i, c in enumerate(own)) + tail

    first, second = ("k" if x.dim == 1 else "mk"), ("k" if y.dim == 1 else "kn")
    out = lead + first.replace("k", "") + second.replace("k", "")
    return contract(ctx, (x, y), (names(x, first), names(y, second)), out, lambda v: ctx.call(node.target, *v))


@rule(aten.baddbmm.default)
def baddbmm(
    ctx: ShardingPass,
    node: Node,
    b: ShardedValue,
    x: ShardedValue,
    y: ShardedValue,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    """b + x y, in batches; not where the summed dim is split."""
    if any(v.layout is not None and v.layout.dim == d for v, d in ((x, 2), (y, 1))):
        return NotImplemented
    names = (_broadcast(b, "amn"), "amk", "akn")
    return contract(ctx, (b, x, y), names, "amn", lambda v: ctx.call(node.target, *v, beta=beta, alpha=alpha))


@rule(aten.einsum.default)
def einsum(ctx: ShardingPass, node: Node, equation: str, operands: Sequence[ShardedValue], *_: Any, **__: Any) -> Any:
    """The labels are in the equation."""
    labels, out = _written_out(equation.replace(" ", ""), [v.dim for v in operands])
    if any(len(set(names)) < len(names) for names in labels):
        return NotImplemented
    sized = [_broadcast(v, names) for v, names in zip(operands, labels, strict=True)]
    return contract(ctx, operands, sized, out, lambda v: ctx.call(node.target, equation, list(v)))


def _written_out(text: str, dims: Sequence[int]) -> tuple[list[str], str]:
    """The labels of an equation, with letters for its ellipsis and for an implicit result."""
    given, arrow, out = text.partition("->")
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in text]
    terms = given.split(",")
    wide = max([d - len(t.replace("...", "")) for t, d in zip(terms, dims, strict=True) if "..." in t], default=0)
    dots = "".join(free[:wide])
    labels = []
    for term, d in zip(terms, dims, strict=True):
        own = d - len(term.replace("...", ""))
        labels.append(term.replace("...", dots[len(dots) - own :]) if "..." in term else term)
    if not arrow:
        letters = given.replace(",", "").replace(".", "")
        out = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return labels, out.replace("...", dots)


@rule(aten.outer.default)
def outer(ctx: ShardingPass, node: Node, x: ShardedValue, y: ShardedValue) -> Any:
    """The outer product of two vectors."""
    return contract(ctx, (x, y), ("a", "b"), "ab", lambda v: ctx.call(node.target, *v))
