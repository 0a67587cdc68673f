"""Products with a parameter: which dim of the weight they sum over, and which one gives the result its features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class Weighing:
    """One product with a weight."""

    node: Node
    input: Node
    along: int
    """The dim of the input that is summed over."""
    weight: Node
    """A placeholder."""
    summed: int | None
    """The weight's dim that is summed over; None where it cannot be split."""
    given: int | None
    """The weight's dim that becomes the result's features; None where it cannot be split."""
    bias: Node | None

    @property
    def module(self) -> str:
        """Where it is."""
        return str(self.node.meta.get("module", ""))


CONVOLUTIONS = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
)
TURNED = (aten.t.default, aten.numpy_T.default, aten.mT.default, aten.transpose.int)
TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)


def weighing(node: Node) -> Weighing | None:
    """What a node is as a product with a parameter, if it is one."""
    if node.op != "call_function":
        return None
    args = list(node.args)
    if node.target is aten.linear.default:
        bias = args[2] if len(args) > 2 else None
        return _table(node, args[0], args[1], 1, 0, bias)
    if node.target is aten.addmm.default:
        return _table(node, args[1], args[2], 0, 1, args[0])
    if node.target in (aten.mm.default, aten.matmul.default):
        return _table(node, args[0], args[1], 0, 1, None)
    if node.target in CONVOLUTIONS and is_parameter(args[1]):
        groups = args[6] if len(args) > 6 else 1
        bias = args[2] if len(args) > 2 else None
        if groups == 1:
            return _made(node, args[0], 1, args[1], 1, 0, bias)
    if node.target in TRANSPOSED and is_parameter(args[1]):
        groups = args[6] if len(args) > 6 else 1
        if groups == 1:
            return _made(node, args[0], 1, args[1], 0, 1, args[2] if len(args) > 2 else None)
    return None


def is_parameter(node: object) -> bool:
    """Whether it is a parameter as it is held."""
    return isinstance(node, Node) and node.op == "placeholder" and node.meta.get("role") == "parameter"


def is_turned(node: object) -> bool:
    """Whether it is a parameter of two dims with its dims exchanged."""
    turned = isinstance(node, Node) and node.op == "call_function" and node.target in TURNED
    return turned and is_parameter(node.args[0]) and node.meta["val"].dim() == 2  # type: ignore[attr-defined]


def _table(node: Node, given: object, weight: object, summed: int, features: int, bias: object) -> Weighing | None:
    """With a weight of two dims, as it is or turned."""
    if is_turned(weight):
        weight, summed, features = weight.args[0], 1 - summed, 1 - features  # type: ignore[attr-defined]
    if not is_parameter(weight) or weight.meta["val"].dim() != 2:  # type: ignore[attr-defined]
        return None
    return _made(node, given, -1, weight, summed, features, bias)


def _made(
    node: Node, given: object, along: int, weight: object, summed: int, features: int, bias: object
) -> Weighing | None:
    if not isinstance(given, Node) or not isinstance(weight, Node):
        return None
    dims = given.meta["val"].dim()
    along = along + dims if along < 0 else along
    own = bias if isinstance(bias, Node) and is_parameter(bias) else None
    splittable = bias is None or own is not None
    return Weighing(node, given, along, weight, summed, features if splittable else None, own)
