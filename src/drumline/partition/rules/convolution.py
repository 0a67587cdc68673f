"""Convolutions, plain and transposed: by channels (outputs of a column, inputs of a row, whole groups), by samples, and
along the rows of an image, where a window brings the rows of others and the convolution itself stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..layout import Split
from ..spatial.conv import paddings
from ..spatial.slide import each, slide, slide_transposed
from ..spread import Pass, rule
from ..values import Value
from .local import local_shape, operator_of, own, rows_of, scaled_cuts
from .matmul import contract

aten = torch.ops.aten

_CONV = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
_TRANSPOSED = {1: aten.conv_transpose1d.default, 2: aten.conv_transpose2d.input, 3: aten.conv_transpose3d.input}


@rule(
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
)
def conv(
    at: Pass,
    node: Node,
    x: Value,
    w: Value,
    b: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """x: (samples, inputs, ...), w: (outputs, inputs / groups, ...)."""
    if x.dim != w.dim:
        return NotImplemented
    if _is_spatial(x, w):
        return _along(at, node, x, w, b, stride, padding, dilation, groups)
    layer = _Layer(operator_of(node), groups, 0, 1, (*_lists(w, stride, padding, dilation), groups))
    return _by_channels(at, node, layer, x, w, b)


@rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def conv_transpose(
    at: Pass,
    node: Node,
    x: Value,
    w: Value,
    b: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """x: (samples, inputs, ...), w: (inputs, outputs / groups, ...)."""
    if x.dim != w.dim:
        return NotImplemented
    if _is_spatial(x, w):
        return _along_transposed(at, node, x, w, b, stride, padding, output_padding, groups, dilation)
    stride, padding, output_padding, dilation = _lists(w, stride, padding, output_padding, dilation)
    layer = _Layer(operator_of(node), groups, 1, 0, (stride, padding, output_padding, groups, dilation))
    return _by_channels(at, node, layer, x, w, b)


def _lists(w: Value, *given: Any) -> list[Any]:
    """A number for each spatial dim; words stay words."""
    return [g if isinstance(g, str) else list(each(g, w.dim - 2)) for g in given]


def _is_spatial(x: Value, w: Value) -> bool:
    return w.layout is None and x.layout is not None and x.layout.dim > 1


# -- channels and samples


@dataclass(frozen=True, slots=True)
class _Layer:
    """A convolution as an operator with channels."""

    operator: Any
    groups: int
    given: int
    """The weight's dim of outputs."""
    summed: int
    """The weight's dim of inputs."""
    rest: tuple[Any, ...]
    """The arguments after the bias; the fourth is the number of groups."""

    def call(self, at: Pass, node: Node, x: Value, w: Value, b: Value | None, groups: int) -> Node:
        """On this rank's channels, whose groups are counted anew."""
        rest = [*self.rest[:3], groups, *self.rest[4:]]
        many = w.fake.shape[self.given] * (groups if self.given else 1)
        shape = [x.fake.shape[0], many, *node.meta["val"].shape[2:]]
        return own(at, self.operator, shape, x, w, b, *rest)


def _by_channels(at: Pass, node: Node, layer: _Layer, x: Value, w: Value, b: Value | None) -> Any:
    if w.layout is not None and w.layout.dim > 1:
        return NotImplemented
    if layer.groups == 1:
        return _one_group(at, node, layer, x, w, b)
    if w.layout is None and x.layout is not None and x.layout.dim == 0:
        w, b = at.whole(w, enter=True), None if b is None else at.whole(b, enter=True)
        return at.value(layer.call(at, node, x, w, b, layer.groups), x.layout)
    return _whole_groups(at, node, layer, x, w, b)


def _one_group(at: Pass, node: Node, layer: _Layer, x: Value, w: Value, b: Value | None) -> Any:
    blank = " " * (x.dim - 2)
    names, kernel = "ni" + blank, ("oi" if layer.given == 0 else "io") + blank

    def emit(v: Sequence[Value]) -> Node:
        return layer.call(at, node, v[0], v[1], v[2] if len(v) > 2 else None, 1)

    if w.layout is not None and (x.layout is None or x.layout.dim != 1 or w.layout.dim != layer.summed):
        x = at.whole(x)  # the weight's split decides
    by_inputs = x.layout is not None and x.layout.dim == 1
    summed = by_inputs if w.layout is None else w.layout.dim == layer.summed
    if b is not None and not summed:
        return contract(at, (x, w, b), (names, kernel, "o"), "no" + blank, emit)
    made = contract(at, (x, w), (names, kernel), "no" + blank, emit)
    if made is NotImplemented or b is None:
        return made
    return _add(at, made, b)


def _add(at: Pass, made: Value, b: Value) -> Value:
    """A bias after the sum: it has no part in the summands. Where the sum lies in parts of channels, so does it."""
    by_channels = made.layout is not None and made.layout.dim == 1
    b = at.split(b, Split(0, made.split.cuts)) if by_channels else at.whole(b, enter=made.layout is not None)
    bias = at.call(aten.reshape.default, b, [1, -1, *([1] * (made.dim - 2))])
    return Value(at.call(aten.add.Tensor, made, bias), made.layout, made.whole)


def _whole_groups(at: Pass, node: Node, layer: _Layer, x: Value, w: Value, b: Value | None) -> Any:
    """Each rank has some of the groups, with their inputs and outputs."""
    inputs, outputs = x.whole[1] // layer.groups, node.meta["val"].shape[1] // layer.groups
    per_weight = outputs if layer.given == 0 else inputs
    groups = None
    if w.layout is not None:
        groups = scaled_cuts(w.layout, 1, per_weight, 0) if w.layout.dim == 0 else None
    elif x.layout is not None and x.layout.dim == 1:
        groups = scaled_cuts(x.layout, 1, inputs, 0)
    elif b is not None and b.layout is not None:
        groups = scaled_cuts(b.layout, 1, outputs, 0)
    if groups is None:
        return NotImplemented
    x, w = at.split(x, _times(groups, inputs, 1)), at.split(w, _times(groups, per_weight, 0))
    b = None if b is None else at.split(b, _times(groups, outputs, 0))
    made = layer.call(at, node, x, w, b, groups.length(at.axis.index))
    return at.value(made, _times(groups, outputs, 1))


def _times(groups: Split, each_: int, dim: int) -> Split:
    split = scaled_cuts(groups, each_, 1, dim)
    assert split is not None
    return split


# -- along the rows of an image


def _along(
    at: Pass, node: Node, x: Value, w: Value, b: Value | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    """The rows that this rank's outputs need, then the convolution without padding in that dim."""
    if len(x.split.cuts) > 1:
        return NotImplemented
    n, k = w.dim - 2, x.split.dim - 2
    kernel, strides, steps = tuple(w.whole[2:]), each(stride, n), each(dilation, n)
    before, after = paddings(padding, kernel, steps)
    plan = slide(x.split.bounds, kernel[k], strides[k], before[k], after[k], steps[k])
    split = Split(x.split.dim, (plan.bounds,))
    rows = rows_of(at, x, plan.wanted)
    sides = [0 if i == k else before[i] for i in range(n)]
    extra = [0 if i == k else after[i] - before[i] for i in range(n)]
    if any(extra):
        rows = at.call(aten.constant_pad_nd.default, rows, [side for e in reversed(extra) for side in (0, e)], 0.0)
    w, b = at.whole(w, enter=True), None if b is None else at.whole(b, enter=True)
    of = (list(strides), sides, list(steps), groups)
    return at.value(own(at, _CONV[n], local_shape(at, node, split), rows, w, b, *of), split)


def _along_transposed(
    at: Pass,
    node: Node,
    x: Value,
    w: Value,
    b: Value | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
) -> Any:
    """The rows that reach this rank's outputs, spread without cropping in that dim, and cropped to the outputs."""
    if len(x.split.cuts) > 1:
        return NotImplemented
    n, dim = w.dim - 2, x.split.dim
    k = dim - 2
    kernel, strides, steps = tuple(w.whole[2:]), each(stride, n), each(dilation, n)
    sides, further = list(each(padding, n)), list(each(output_padding, n))
    plan = slide_transposed(x.split.bounds, kernel[k], strides[k], sides[k], node.meta["val"].shape[dim], steps[k])
    split = Split(dim, (plan.bounds,))
    (first, last), (a, z) = plan.wanted[at.axis.index], plan.out(at.axis.index)
    start = first * strides[k] - sides[k] if first < last else a
    stop = (last - 1) * strides[k] - sides[k] + steps[k] * (kernel[k] - 1) + 1 if first < last else a
    sides[k] = further[k] = 0
    # Outputs that no input reaches are of the bias alone; whether there are any is the same on all ranks of a later
    # axis, but not on all of this one, which has no message after this point.
    inside = start <= a and z <= stop
    rows = rows_of(at, x, plan.wanted)
    w, bias = at.whole(w, enter=True), None if b is None or not inside else at.whole(b, enter=True)
    shape = local_shape(at, node, split)
    shape[dim] = stop - start
    of = (list(strides), sides, further, groups, list(steps))
    made = own(at, _TRANSPOSED[n], shape, rows, w, bias, *of)
    if (start, stop) != (a, z):
        made = at.call(aten.constant_pad_nd.default, made, [*([0, 0] * (n - 1 - k)), start - a, z - stop], 0.0)
    out = at.value(made, split)
    return out if inside or b is None else _add(at, out, b)
