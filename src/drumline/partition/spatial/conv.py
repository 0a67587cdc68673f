"""Convolutions along a split dim, plain and transposed, in one to three spatial dims: the result of the whole image.

A rank gets the rows that its outputs need and convolves them without padding in that dim. While foreign rows are
in transit, it computes the outputs that need only its own. `overlap_halos` makes a graph do the same, as the last pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from ..sharding.halo_exchange import Halo, Span, needs_exchange, start_exchange, window
from ..sharding.layout import Bounds
from ..sharding.redistribution import Axis
from .rows import ceil_div, per_dim, plan_slide, plan_transposed_slide, zeros_from

_CONV = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}
_MIN_INTERIOR_RATIO = 4
"""Computing the border separately pays where it is smaller than the interior by this factor."""

Numbers = int | Sequence[int]
Local = Callable[[torch.Tensor], torch.Tensor]


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Numbers,
    padding: Numbers | str,
    dilation: Numbers,
    groups: int,
    dim: int,
    bounds: Bounds,
    axis: Axis,
    *,
    overlap: bool = True,
) -> tuple[torch.Tensor, Bounds]:
    """This rank's rows of the convolution, and the bounds of the output. `dim` is the split spatial dim of x."""
    n = weight.dim() - 2
    dim %= x.dim()
    at = dim - (x.dim() - n)
    kernel, strides, steps = tuple(weight.shape[2:]), per_dim(stride, n), per_dim(dilation, n)
    before, after = paddings(padding, kernel, steps)
    plan = plan_slide(bounds, kernel[at], strides[at], before[at], after[at], steps[at])
    sides = [before[i] if i != at else 0 for i in range(n)]
    extra = [after[i] - before[i] if i != at else 0 for i in range(n)]

    def local(rows: torch.Tensor) -> torch.Tensor:
        if any(extra):
            rows = F.pad(rows, [side for e in reversed(extra) for side in (0, e)])
        return _CONV[n](rows, weight, bias, strides, sides, steps, groups)

    halo = start_exchange(x, dim, bounds, tuple((span,) for span in plan.wanted), axis)
    out = plan.out(axis.index)
    if out[0] == out[1]:
        geometry = zip(x.shape[x.dim() - n :], kernel, strides, before, after, steps, strict=True)
        whole = [0 if i == at else plan_slide((0, size), *of).bounds[-1] for i, (size, *of) in enumerate(geometry)]
        return zeros_from([*x.shape[: dim - at - 1], weight.shape[0], *whole], halo.rows(), weight, bias), plan.bounds
    reach = _Kernel(kernel[at], strides[at], before[at], steps[at])
    inner = reach.interior(out, (bounds[axis.index], bounds[axis.index + 1]))
    border = out[1] - out[0] - (inner[1] - inner[0])
    if (
        overlap
        and axis.halo
        and needs_exchange(bounds, plan.wanted)
        and inner[1] - inner[0] >= _MIN_INTERIOR_RATIO * border
    ):
        return _overlapped(halo, local, dim, out, inner, reach), plan.bounds
    return local(halo.rows(plan.wanted[axis.index])), plan.bounds


def conv_of_window(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Numbers,
    padding: Numbers,
    dilation: Numbers,
    groups: int,
    dim: int,
    bounds: Bounds,
    wanted: Sequence[Span],
    axis: Axis,
) -> torch.Tensor:
    """Convolve, without padding along `dim`, the rows that each rank wants: the interior during the exchange."""
    n = weight.dim() - 2
    at = dim - (x.dim() - n)
    strides, sides, steps = per_dim(stride, n), per_dim(padding, n), per_dim(dilation, n)
    assert sides[at] == 0, f"{sides} along dim {dim}"

    def local(rows: torch.Tensor) -> torch.Tensor:
        return _CONV[n](rows, weight, bias, strides, sides, steps, groups)

    first, last = wanted[axis.index]
    halo = start_exchange(x, dim, bounds, tuple((span,) for span in wanted), axis)
    reach = _Kernel(weight.shape[2 + at], strides[at], -first, steps[at])
    count = (last - first - (reach.kernel - 1) * reach.dilation - 1) // reach.stride + 1
    inner = reach.interior((0, count), (bounds[axis.index], bounds[axis.index + 1]))
    if inner[1] - inner[0] >= _MIN_INTERIOR_RATIO * (count - (inner[1] - inner[0])):
        return _overlapped(halo, local, dim, (0, count), inner, reach)
    return local(halo.rows((first, last)))


def conv_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Numbers,
    padding: Numbers,
    output_padding: Numbers,
    groups: int,
    dilation: Numbers,
    dim: int,
    bounds: Bounds,
    axis: Axis,
) -> tuple[torch.Tensor, Bounds]:
    """This rank's rows of the transposed convolution, and the bounds of the output."""
    n = weight.dim() - 2
    dim %= x.dim()
    at = dim - (x.dim() - n)
    kernel, strides, steps = tuple(weight.shape[2:]), per_dim(stride, n), per_dim(dilation, n)
    sides, further = list(per_dim(padding, n)), list(per_dim(output_padding, n))
    reach = steps[at] * (kernel[at] - 1)
    count = (bounds[-1] - 1) * strides[at] - 2 * sides[at] + reach + further[at] + 1
    plan = plan_transposed_slide(bounds, kernel[at], strides[at], sides[at], count, steps[at])
    (first, last), (a, b) = plan.wanted[axis.index], plan.out(axis.index)
    start, stop = first * strides[at] - sides[at], (last - 1) * strides[at] - sides[at] + reach + 1
    sides[at] = further[at] = 0
    rows = window(x, dim, bounds, plan.wanted, axis)
    if first == last:
        out = zeros_from(
            _shape_transposed(rows, weight, strides, sides, steps, further, groups, at, b - a), rows, weight
        )
        return _with_bias(out, bias, n), plan.bounds
    inside = start <= a and b <= stop  # else some outputs are the bias alone
    out = _TRANSPOSED[n](rows, weight, bias if inside else None, strides, sides, further, groups, steps)
    if (start, stop) != (a, b):
        out = F.pad(out, [*([0, 0] * (n - 1 - at)), start - a, b - stop])
    return (out if inside else _with_bias(out, bias, n)), plan.bounds


def paddings(
    padding: Numbers | str, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of padding before and after, per spatial dim. 'same' pads one more after, if uneven."""
    if padding == "valid":
        padding = 0
    if isinstance(padding, str):
        assert padding == "same", padding
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    sides = per_dim(padding, len(kernel))
    return sides, sides


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel along the split dim."""

    kernel: int
    stride: int
    before: int
    dilation: int

    def needed(self, out: Span) -> Span:
        """The rows that outputs need."""
        last = (out[1] - 1) * self.stride - self.before + (self.kernel - 1) * self.dilation
        return out[0] * self.stride - self.before, last + 1

    def interior(self, out: Span, own: Span) -> Span:
        """The outputs that need only own rows."""
        first = max(out[0], ceil_div(own[0] + self.before, self.stride))
        last = min(out[1], (own[1] - 1 + self.before - (self.kernel - 1) * self.dilation) // self.stride + 1)
        return (first, last) if first < last else (out[0], out[0])


def _overlapped(halo: Halo, local: Local, dim: int, out: Span, inner: Span, kernel: _Kernel) -> torch.Tensor:
    """Compute the interior during the exchange, then the borders."""
    middle = local(halo.here(*kernel.needed(inner)))
    sides = [(out[0], inner[0]), (inner[1], out[1])]
    top, bottom = ([local(halo.rows(kernel.needed(side)))] if side[0] < side[1] else [] for side in sides)
    halo.finish()  # a rank that only sends waits too
    parts = [*top, middle, *bottom]
    return middle if len(parts) == 1 else torch.cat(parts, dim)


def _shape_transposed(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    further: Sequence[int],
    groups: int,
    at: int,
    rows: int,
) -> list[int]:
    n = weight.dim() - 2
    sizes = [
        (x.shape[i - n] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[2 + i] - 1) + further[i] + 1
        for i in range(n)
    ]
    sizes[at] = rows
    return [*x.shape[: x.dim() - n - 1], weight.shape[1] * groups, *sizes]


def _with_bias(out: torch.Tensor, bias: torch.Tensor | None, n: int) -> torch.Tensor:
    return out if bias is None else out + bias.view(-1, *([1] * n))


aten = torch.ops.aten

CONVOLUTIONS = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}


def overlap_halos(graph: Graph) -> int:
    """Fuse windows with the convolutions that read them, in place; returns their number. No axis can be sharded
    afterwards."""
    fused = 0
    for node in list(graph.nodes):
        if _can_overlap(node):
            source = node.args[0]
            x, dim, bounds, wanted, axis = source.args[:5]
            node.target = conv_of_window
            node.args = (x, *node.args[1:7], dim, bounds, wanted, axis)
            graph.erase_node(source)
            fused += 1
    return fused


def _can_overlap(node: Node) -> bool:
    """Whether a node convolves, without padding along its dim, a window that only it reads."""
    if node.target not in CONVOLUTIONS or len(node.args) < 7:
        return False
    source = node.args[0]
    if not isinstance(source, Node) or source.target is not window or len(source.users) > 1:
        return False
    _, dim, bounds, wanted, axis, *fill = source.args
    padding = node.args[4]
    assert isinstance(padding, list | tuple) and isinstance(dim, int) and isinstance(axis, Axis)
    if not axis.halo:
        return False
    first = node.meta["val"].dim() - CONVOLUTIONS[node.target]
    return dim >= first and not padding[dim - first] and not any(fill) and needs_exchange(bounds, wanted)
