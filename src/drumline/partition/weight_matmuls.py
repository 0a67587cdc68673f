"""Matmuls and convolutions with a parameter: the dim that they sum over, and the dim of the output features. Also the
heads of attention, which limit the ranks of tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..torchkit.operators import softmax

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class WeightMatmul:
    """One matmul or convolution with a weight."""

    node: Node
    input: Node
    input_dim: int
    """The dim of the input that is summed over."""
    weight: Node
    """A placeholder."""
    reduced_dim: int | None
    """The weight's dim that is summed over; None if it cannot be split."""
    feature_dim: int | None
    """The weight's dim of output features; None if it cannot be split."""
    bias: Node | None

    @property
    def module(self) -> str:
        """The module that it belongs to."""
        return str(self.node.meta.get("module", ""))


CONVOLUTIONS = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
)
TRANSPOSES = (aten.t.default, aten.numpy_T.default, aten.mT.default, aten.transpose.int)
TRANSPOSED_CONVOLUTIONS = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)


def weight_matmul(node: Node) -> WeightMatmul | None:
    """The matmul with a parameter that a node is, or None."""
    if node.op != "call_function":
        return None
    args = list(node.args)
    if node.target is aten.linear.default:
        bias = args[2] if len(args) > 2 else None
        return _two_dim(node, args[0], args[1], 1, 0, bias)
    if node.target is aten.addmm.default:
        return _two_dim(node, args[1], args[2], 0, 1, args[0])
    if node.target in (aten.mm.default, aten.matmul.default):
        return _two_dim(node, args[0], args[1], 0, 1, None)
    if node.target in CONVOLUTIONS and is_parameter(args[1]):
        groups = args[6] if len(args) > 6 else 1
        bias = args[2] if len(args) > 2 else None
        if groups == 1:
            return _built(node, args[0], 1, args[1], 1, 0, bias)
    if node.target in TRANSPOSED_CONVOLUTIONS and is_parameter(args[1]):
        groups = args[6] if len(args) > 6 else 1
        if groups == 1:
            return _built(node, args[0], 1, args[1], 0, 1, args[2] if len(args) > 2 else None)
    return None


def is_parameter(node: object) -> bool:
    """Whether a node is a parameter itself."""
    return isinstance(node, Node) and node.op == "placeholder" and node.meta.get("role") == "parameter"


def is_transposed_parameter(node: object) -> bool:
    """Whether a node is the transpose of a two-dimensional parameter."""
    turned = isinstance(node, Node) and node.op == "call_function" and node.target in TRANSPOSES
    return turned and is_parameter(node.args[0]) and node.meta["val"].dim() == 2  # type: ignore[attr-defined]


def _two_dim(
    node: Node, given: object, weight: object, summed: int, features: int, bias: object
) -> WeightMatmul | None:
    """With a two-dimensional weight, plain or transposed."""
    if is_transposed_parameter(weight):
        weight, summed, features = weight.args[0], 1 - summed, 1 - features  # type: ignore[attr-defined]
    if not is_parameter(weight) or weight.meta["val"].dim() != 2:  # type: ignore[attr-defined]
        return None
    return _built(node, given, -1, weight, summed, features, bias)


def _built(
    node: Node, given: object, along: int, weight: object, summed: int, features: int, bias: object
) -> WeightMatmul | None:
    if not isinstance(given, Node) or not isinstance(weight, Node):
        return None
    dims = given.meta["val"].dim()
    along = along + dims if along < 0 else along
    own = bias if isinstance(bias, Node) and is_parameter(bias) else None
    splittable = bias is None or own is not None
    return WeightMatmul(node, given, along, weight, summed, features if splittable else None, own)


SOFTMAX = (aten.softmax.int, softmax.default)
MATMULS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default)


def uneven_heads(nodes: Iterable[Node], columns: Iterable[WeightMatmul], n: int) -> Iterator[tuple[str, int]]:
    """(module, heads) of every attention among the nodes whose heads n does not divide."""
    widths = [int(c.weight.meta["val"].shape[c.feature_dim or 0]) for c in columns]
    for node in nodes:
        heads, width = _heads(node)
        if not heads:
            continue
        counts = [heads, *_key_heads(heads, width, widths)]
        uneven = [h for h in counts if h % n]
        if uneven:
            yield str(node.meta.get("module", "")), min(uneven)


def heads_in(nodes: Iterable[Node], module: str) -> int:
    """The number of query heads of a module's attention; 0 if it has none."""
    return max((_heads(n)[0] for n in nodes if n.op == "call_function" and n.meta.get("module") == module), default=0)


def _key_heads(heads: int, width: int, widths: list[int]) -> list[int]:
    """Number of key heads: of their own projection, or of a fused one, next to the queries."""
    if not width or any(w % width for w in widths):
        return []
    if len(widths) == 1:
        rest = widths[0] // width - heads
        return [rest // 2] if rest > 0 and rest % 2 == 0 else []
    return [w // width for w in widths]


def _heads(node: Node) -> tuple[int, int]:
    """(heads, width of one) of an attention, width 0 if unknown; (0, 0) for other nodes."""
    if node.target is aten.scaled_dot_product_attention.default:
        q = node.args[0].meta["val"]  # type: ignore[union-attr]
        return (int(q.shape[-3]), int(q.shape[-1])) if q.dim() > 3 else (0, 0)
    if node.target in SOFTMAX and node.meta["val"].dim() == 4:
        scores = _score_matmul(node)
        if scores is not None:
            queries = next(a for a in scores.all_input_nodes[-2:])
            return int(node.meta["val"].shape[1]), int(queries.meta["val"].shape[-1])
    return 0, 0


def _score_matmul(node: Node) -> Node | None:
    """The matmul of queries and keys, a few nodes before."""
    seen = [node]
    for _ in range(12):
        if not seen:
            return None
        at = seen.pop(0)
        if at.target in MATMULS:
            return at
        seen += [a for a in at.all_input_nodes if a.op == "call_function"]
    return None
