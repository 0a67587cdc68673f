"""The heads of attention that a number of ranks cannot share: what a refusal of tensor parallelism has to name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node

from .weights import Weighing

aten = torch.ops.aten
SOFTMAX = (aten.softmax.int, aten._softmax.default)
PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default)


def uneven_heads(nodes: Iterable[Node], columns: Iterable[Weighing], n: int) -> Iterator[tuple[str, int]]:
    """(module, heads) of every attention among the nodes whose heads n ranks cannot share."""
    widths = [int(c.weight.meta["val"].shape[c.given or 0]) for c in columns]
    for node in nodes:
        heads, width = _heads(node)
        if not heads:
            continue
        counts = [heads, *_keys(heads, width, widths)]
        wrong = [h for h in counts if h % n]
        if wrong:
            yield str(node.meta.get("module", "")), min(wrong)


def heads_in(nodes: Iterable[Node], module: str) -> int:
    """The heads of a module's attention, as its queries have them; 0 where it has none."""
    return max((_heads(n)[0] for n in nodes if n.op == "call_function" and n.meta.get("module") == module), default=0)


def _keys(heads: int, width: int, widths: list[int]) -> list[int]:
    """How many heads the keys have: of their own projection, or what a fused one gives beside the queries."""
    if not width or any(w % width for w in widths):
        return []
    if len(widths) == 1:
        rest = widths[0] // width - heads
        return [rest // 2] if rest > 0 and rest % 2 == 0 else []
    return [w // width for w in widths]


def _heads(node: Node) -> tuple[int, int]:
    """The heads of an attention and the width of one (0 where it is not known); (0, 0) of anything else."""
    if node.target is aten.scaled_dot_product_attention.default:
        q = node.args[0].meta["val"]  # type: ignore[union-attr]
        return (int(q.shape[-3]), int(q.shape[-1])) if q.dim() > 3 else (0, 0)
    if node.target in SOFTMAX and node.meta["val"].dim() == 4:
        scores = _product(node)
        if scores is not None:
            queries = next(a for a in scores.all_input_nodes[-2:])
            return int(node.meta["val"].shape[1]), int(queries.meta["val"].shape[-1])
    return 0, 0


def _product(node: Node) -> Node | None:
    """The scores of queries and keys: a product of two tensors, a few steps before."""
    seen = [node]
    for _ in range(12):
        if not seen:
            return None
        at = seen.pop(0)
        if at.target in PRODUCTS:
            return at
        seen += [a for a in at.all_input_nodes if a.op == "call_function"]
    return None
