"""Products: labels say which dims belong together, as in `einsum`, and one rule serves them all.

A parameter's split decides, because it cannot be moved. A label that is split and is in the result stays split there;
one that is summed over leaves summands, which are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..layout import Split
from ..spread import Pass, rule
from ..values import Value

aten = torch.ops.aten

Emit = Callable[[Sequence[Value]], Node]


def contract(at: Pass, operands: Sequence[Value], labels: Sequence[str], out: str, emit: Emit) -> Any:
    """A product of `operands` whose dims have `labels` (a blank for a dim of one element that is broadcast)."""
    chosen = _chosen(operands, labels)
    if chosen is None:
        return NotImplemented
    label, split = chosen
    placed = []
    for v, names in zip(operands, labels, strict=True):
        if label in names:
            placed.append(at.split(v, split.at(names.index(label))))
        else:
            # where the label is summed over, the others' work is split as well
            placed.append(at.whole(v, enter=True))
    made = emit(placed)
    if label in out:
        return at.value(made, split.at(out.index(label)))
    assert at.current is not None
    return at.settle(made, at.current.meta["val"].shape)


def _chosen(operands: Sequence[Value], labels: Sequence[str]) -> tuple[str, Split] | None:
    found = [(v, names) for v, names in zip(operands, labels, strict=True) if v.layout is not None]
    found.sort(key=lambda pair: not is_parameter(pair[0]))
    for v, names in found:
        label = names[v.split.dim]
        if label != " ":
            return label, v.split
    return None


def is_parameter(v: Value) -> bool:
    """Whether it comes straight from a parameter."""
    node = v.node
    while node.op == "call_function" and node.target in (aten.t.default, aten.transpose.int, aten.to.dtype):
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "placeholder" and node.meta.get("role") == "parameter"


@rule(aten.linear.default)
def linear(at: Pass, node: Node, x: Value, w: Value, b: Value | None = None) -> Any:
    """Column (rows of the weight) or row (columns of the weight, whose bias is added after the sum)."""
    lead = "abcdefgh"[: x.dim - 1]
    if b is None:
        return contract(at, (x, w), (lead + "i", "oi"), lead + "o", lambda v: at.call(node.target, *v))
    if not _sums(x, w, (lead + "i", "oi"), "i"):
        return contract(at, (x, w, b), (lead + "i", "oi", "o"), lead + "o", lambda v: at.call(node.target, *v))
    out = contract(at, (x, w), (lead + "i", "oi"), lead + "o", lambda v: at.call(node.target, *v))
    return out if out is NotImplemented else _add(at, out, b)


def _sums(x: Value, w: Value, labels: tuple[str, str], over: str) -> bool:
    """Whether what is split is summed over, so that a bias has to wait."""
    chosen = _chosen((x, w), labels)
    return chosen is not None and chosen[0] == over


def _add(at: Pass, out: Value, b: Value) -> Value:
    """A bias after the sum: it has no part in the summands."""
    b = at.whole(b, enter=out.layout is not None)
    return Value(at.call(aten.add.Tensor, out, b), out.layout, out.whole)


@rule(aten.addmm.default)
def addmm(at: Pass, node: Node, b: Value, x: Value, w: Value, *, beta: float = 1, alpha: float = 1) -> Any:
    """b + x w."""
    if not _sums(x, w, ("ai", "io"), "i"):
        own = _broadcast(b, "ao")
        return contract(
            at, (b, x, w), (own, "ai", "io"), "ao", lambda v: at.call(node.target, *v, beta=beta, alpha=alpha)
        )
    if b.dim > 1 or (beta, alpha) != (1, 1):
        return NotImplemented
    out = contract(at, (x, w), ("ai", "io"), "ao", lambda v: at.call(aten.mm.default, *v))
    return out if out is NotImplemented else _add(at, out, b)


def _broadcast(v: Value, names: str) -> str:
    """The labels of an operand whose last dims are `names`, with blanks where it has one element for all."""
    return "".join(c if v.whole[i] > 1 else " " for i, c in enumerate(names[len(names) - v.dim :]))


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def matmul(at: Pass, node: Node, x: Value, y: Value) -> Any:
    """The last dim of x is summed with the last but one of y; the dims before are broadcast."""
    dims = max(x.dim, y.dim)
    lead = "abcdefgh"[: max(dims - 2, 0)]

    def names(v: Value, tail: str) -> str:
        own = lead[len(lead) - max(v.dim - 2, 0) :]
        return "".join(c if v.whole[i] > 1 else " " for i, c in enumerate(own)) + tail

    first, second = ("k" if x.dim == 1 else "mk"), ("k" if y.dim == 1 else "kn")
    out = lead + first.replace("k", "") + second.replace("k", "")
    return contract(at, (x, y), (names(x, first), names(y, second)), out, lambda v: at.call(node.target, *v))


@rule(aten.baddbmm.default)
def baddbmm(at: Pass, node: Node, b: Value, x: Value, y: Value, *, beta: float = 1, alpha: float = 1) -> Any:
    """b + x y, in batches; not where the sum is split."""
    if any(v.layout is not None and v.layout.dim == d for v, d in ((x, 2), (y, 1))):
        return NotImplemented
    names = (_broadcast(b, "amn"), "amk", "akn")
    return contract(at, (b, x, y), names, "amn", lambda v: at.call(node.target, *v, beta=beta, alpha=alpha))


@rule(aten.einsum.default)
def einsum(at: Pass, node: Node, equation: str, operands: Sequence[Value], *_: Any, **__: Any) -> Any:
    """The labels are given."""
    labels, out = _written_out(equation.replace(" ", ""), [v.dim for v in operands])
    if any(len(set(names)) < len(names) for names in labels):
        return NotImplemented
    sized = [_broadcast(v, names) for v, names in zip(operands, labels, strict=True)]
    return contract(at, operands, sized, out, lambda v: at.call(node.target, equation, list(v)))


def _written_out(text: str, dims: Sequence[int]) -> tuple[list[str], str]:
    """The labels of an equation, with letters for its dots and for a result that it does not tell."""
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
def outer(at: Pass, node: Node, x: Value, y: Value) -> Any:
    """All products of two vectors."""
    return contract(at, (x, y), ("a", "b"), "ab", lambda v: at.call(node.target, *v))
