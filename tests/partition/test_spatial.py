"""Operators on tiles match the whole image, forward and backward, in float64 to 1e-12."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from world import World

from drumline.partition import spatial
from drumline.partition.sharding.layout import even_bounds
from drumline.partition.sharding.redistribution import Axis
from drumline.partition.spatial.rows import feasible_bounds, plan_slide
from drumline.runtime.state.process_groups import process_group

Worlds = Callable[[int], World]
Bounds = tuple[int, ...]
Whole = Callable[..., torch.Tensor]
Part = Callable[..., Any]
TOLERANCE = 1e-12


def axis_of() -> Axis:
    return Axis("rows", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def cuts(size: int) -> list[Bounds]:
    """Even, a rank with one row, a rank without rows, all rows on one rank."""
    n = dist.get_world_size()
    few = (0, *range(1, n), size)
    none = (0, *([size // 2] * (n - 1)), size) if n > 2 else (0, 0, size)
    return [even_bounds(size, n), few, none, (*([0] * n), size)]


def compare(
    what: str,
    whole: Whole,
    part: Part,
    shape: Sequence[int],
    dim: int,
    bounds: Bounds,
    *weights: torch.Tensor | None,
    replicated: bool = False,
    ties: bool = False,
) -> None:
    """`whole(x, *weights)` on one device against `part(x, *weights, dim, bounds, axis)` on the ranks."""
    axis = axis_of()
    random = torch.Generator().manual_seed(7)
    x = torch.randn(list(shape), dtype=torch.float64, generator=random)
    x = (x.round() if ties else x).requires_grad_()
    theirs = [w if w is None else w.clone().requires_grad_() for w in weights]
    y = whole(x, *theirs)
    gradient = torch.randn(y.shape, dtype=y.dtype, generator=random)
    y.backward(gradient)

    mine = x.detach().narrow(dim, bounds[axis.index], bounds[axis.index + 1] - bounds[axis.index]).clone()
    mine.requires_grad_()
    ours = [w if w is None else w.clone().requires_grad_() for w in weights]
    out, new = part(mine * 1.0, *ours, dim, bounds, axis)
    what = f"{what}, {tuple(shape)}, dim {dim} cut at {bounds} -> {new}, rank {axis.index}"
    if replicated:
        assert new is None, what
    else:
        assert len(new) == len(bounds) and new[0] == 0 and new[-1] == y.shape[dim] and sorted(new) == list(new), what
        y, gradient = (t.narrow(dim, new[axis.index], new[axis.index + 1] - new[axis.index]) for t in (y, gradient))
    close(out, y, f"{what}: output")
    out.backward(gradient)
    assert x.grad is not None
    close(mine.grad, x.grad.narrow(dim, bounds[axis.index], mine.shape[dim]), f"{what}: gradient of the input")
    for k, (w, their) in enumerate(zip(ours, theirs, strict=True)):
        if w is not None and their is not None:
            assert w.grad is not None, f"{what}: weight {k} has no gradient"
            dist.all_reduce(w.grad)
            close(w.grad, their.grad, f"{what}: gradient of weight {k}")


def close(a: torch.Tensor | None, b: torch.Tensor | None, what: str) -> None:
    assert a is not None and b is not None, what
    assert a.shape == b.shape, f"{what}: {tuple(a.shape)} is not {tuple(b.shape)}"
    if a.numel():
        error = (a - b).abs().max().item() / max(1.0, b.abs().max().item())
        assert error <= TOLERANCE, f"{what}: off by {error:.1e}"


def weights_of(*shapes: Sequence[int] | None) -> list[torch.Tensor | None]:
    random = torch.Generator().manual_seed(3)
    return [None if s is None else torch.randn(list(s), dtype=torch.float64, generator=random) for s in shapes]


# -- convolutions


def convolutions() -> None:
    """kernel, stride, padding, dilation, groups of 2-d ones; then 1-d, 3-d, 'same', unbatched, along columns."""
    table = [
        (3, 1, 1, 1, 1),
        (3, 2, 1, 1, 1),
        (7, 2, 3, 1, 2),
        (3, 1, 2, 2, 4),
        (1, 2, 0, 1, 1),
        (2, 2, 0, 1, 1),
        (4, 3, 1, 1, 1),
        (5, 1, 0, 1, 1),
        (3, 1, 4, 4, 1),
        (2, 4, 1, 1, 1),
        (1, 1, 0, 1, 1),
        ("same", 5),
        ("same", 4),
        ("valid", 3),
    ]
    warnings.filterwarnings("ignore", message="Using padding='same' with even kernel")  # the reference does
    module = sys.modules[spatial.conv.__module__]
    used: list[bool] = []
    overlapped = module._overlapped
    module._overlapped = lambda *arguments: (used.append(True), overlapped(*arguments))[1]  # type: ignore[attr-defined]
    for (size, overlap), row in product(((11, False), (40, True)), table):
        k, stride, padding, dilation, groups = row if len(row) == 5 else (row[1], 1, row[0], 1, 1)
        w, b = weights_of((8, 4 // groups, k, k), (8,) if stride == 1 else None)
        settings = (stride, padding, dilation, groups)
        for bounds in cuts(size):
            for dim in (2, 3) if size == 11 else (2,):
                shape = (2, 4, size, 6) if dim == 2 else (2, 4, 6, size)
                compare(
                    f"conv {row} overlap={overlap}",
                    lambda x, w, b, s=settings: F.conv2d(x, w, b, *s),
                    lambda x, w, b, *at, s=settings, o=overlap: spatial.conv(x, w, b, *s, *at, overlap=o),
                    shape,
                    dim,
                    bounds,
                    w,
                    b,
                )
    module._overlapped = overlapped  # type: ignore[attr-defined]
    count = torch.tensor(len(used))
    dist.all_reduce(count)
    assert count > 20, f"{count} interiors were computed while a halo travelled"
    other_convolutions()


def other_convolutions() -> None:
    for n, shape, dim in ((1, (2, 3, 13), 2), (3, (1, 3, 6, 13, 5), 3), (3, (1, 3, 13, 5, 6), 2), (2, (3, 13, 9), 1)):
        whole: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[n]
        w, b = weights_of((5, 3, *([3] * n)), (5,))
        for bounds, stride in product(cuts(13), (1, 2)):
            compare(
                f"conv{n}d",
                lambda x, w, b, f=whole, s=stride: f(x, w, b, s, 1),
                lambda x, w, b, *at, s=stride: spatial.conv(x, w, b, s, 1, 1, 1, *at),
                shape,
                dim,
                bounds,
                w,
                b,
            )


def transposed_convolutions() -> None:
    """kernel, stride, padding, output padding, dilation, groups."""
    table = [
        (2, 2, 0, 0, 1, 1),
        (4, 2, 1, 0, 1, 1),
        (3, 2, 1, 1, 1, 2),
        (3, 1, 1, 0, 1, 1),
        (1, 2, 0, 0, 1, 1),
        (1, 3, 0, 2, 1, 1),
        (5, 3, 2, 1, 1, 1),
        (3, 2, 2, 1, 2, 4),
        (2, 3, 0, 0, 1, 1),
        (3, 4, 0, 3, 1, 1),
    ]
    for row in table:
        k, stride, padding, further, dilation, groups = row
        w, b = weights_of((4, 8 // groups, k, k), (8,))
        settings = (stride, padding, further, groups, dilation)
        for bounds, dim, bias in product(cuts(7), (2, 3), (b, None)):
            compare(
                f"conv_transpose {row}",
                lambda x, w, b, s=settings: F.conv_transpose2d(x, w, b, *s),
                lambda x, w, b, *at, s=settings: spatial.conv_transpose(x, w, b, *s, *at),
                (2, 4, 7, 6) if dim == 2 else (2, 4, 6, 7),
                dim,
                bounds,
                w,
                bias,
            )
    for n, shape in ((1, (2, 4, 7)), (3, (1, 4, 7, 3, 4))):
        whole: Any = {1: F.conv_transpose1d, 3: F.conv_transpose3d}[n]
        w, b = weights_of((4, 5, *([3] * n)), (5,))
        for bounds in cuts(7):
            compare(
                f"conv_transpose{n}d",
                lambda x, w, b, f=whole: f(x, w, b, 2, 1, 1),
                lambda x, w, b, *at: spatial.conv_transpose(x, w, b, 2, 1, 1, 1, 1, *at),
                shape,
                2,
                bounds,
                w,
                b,
            )


def paddings() -> None:
    table = [
        ((2, 1, 3, 2), "constant", 1.5),
        ((0, 0, 4, 0), "constant", None),
        ((-1, 2, -3, 1), "constant", 0.0),
        ((0, 0, 0, -8), "constant", 0.0),
        ((2, 1, 3, 2), "reflect", None),
        ((1, 1, 8, 8), "reflect", None),
        ((2, 1, 3, 2), "replicate", None),
        ((1, 1, 12, 11), "replicate", None),
        ((2, 1, 3, 2), "circular", None),
        ((1, 2, 9, 9), "circular", None),
        ((2, 1), "circular", None),
    ]
    for (sides, mode, value), bounds in product(table, cuts(9)):
        shape, settings = ((2, 3, 9, 5) if len(sides) == 4 else (3, 9, 5)), (list(sides), mode, value)
        compare(
            f"pad {sides} {mode}",
            lambda x, s=settings: F.pad(x, *s),
            lambda x, *at, s=settings: spatial.pad(x, *s, *at),
            shape,
            len(shape) - 2,
            bounds,
        )


# -- pooling


def pools() -> None:
    """kernel, stride, padding, dilation, ceil."""
    table = [
        (2, 2, 0, 1, False),
        (3, 2, 1, 1, False),
        (3, 2, 1, 1, True),
        (3, 1, 1, 1, False),
        (2, 2, 0, 1, True),
        (3, 2, 1, 2, False),
        (3, 2, 0, 2, True),
        (4, 3, 2, 1, True),
        (2, 3, 1, 1, True),
        (5, 5, 2, 1, False),
    ]
    for row, (size, dim) in product(table, ((11, 2), (12, 3))):
        for bounds in cuts(size):
            shape = (2, 3, size, 9) if dim == 2 else (2, 3, 9, size)
            compare(
                f"max_pool {row}",
                lambda x, r=row: F.max_pool2d(x, *r),
                lambda x, *at, r=row: spatial.max_pool(x, (r[0], r[0]), *r[1:], *at),
                shape,
                dim,
                bounds,
                ties=True,
            )
            if row[3] == 1:
                for include, divisor in ((True, None), (False, None), (True, 5)):
                    compare(
                        f"avg_pool {row} {include} {divisor}",
                        lambda x, r=row, i=include, d=divisor: F.avg_pool2d(x, r[0], r[1], r[2], r[4], i, d),
                        lambda x, *at, r=row, i=include, d=divisor: spatial.avg_pool(
                            x, (r[0], r[0]), r[1], r[2], r[4], i, d, *at
                        ),
                        shape,
                        dim,
                        bounds,
                    )
    for bounds in cuts(13):
        compare(
            "max_pool1d",
            lambda x: F.max_pool1d(x, 3),
            lambda x, *at: spatial.max_pool(x, (3,), (), 0, 1, False, *at),
            (2, 3, 13),
            2,
            bounds,
        )
        compare(
            "avg_pool1d",
            lambda x: F.avg_pool1d(x, 3, 2, 1),
            lambda x, *at: spatial.avg_pool(x, (3,), (2,), 1, False, True, None, *at),
            (2, 3, 13),
            2,
            bounds,
        )
        compare(
            "max_pool3d",
            lambda x: F.max_pool3d(x, 2),
            lambda x, *at: spatial.max_pool(x, (2, 2, 2), (), 0, 1, False, *at),
            (2, 3, 4, 13, 4),
            3,
            bounds,
        )
        compare(
            "avg_pool3d",
            lambda x: F.avg_pool3d(x, 3, 1, 1, False, False),
            lambda x, *at: spatial.avg_pool(x, (3, 3, 3), 1, 1, False, False, None, *at),
            (1, 3, 4, 13, 4),
            3,
            bounds,
        )


def adaptive_pools() -> None:
    kinds: list[tuple[Any, Any]] = [
        (F.adaptive_avg_pool2d, spatial.adaptive_avg_pool),
        (F.adaptive_max_pool2d, spatial.adaptive_max_pool),
    ]
    for (whole, part), out, dim, ties in product(
        kinds, ((1, 1), (1, 3), (3, 1), (7, 7), (4, 5), (6, 12), (13, 13)), (2, 3), (False, True)
    ):
        for bounds in cuts(12):
            shape = (2, 3, 12, 10) if dim == 2 else (2, 3, 10, 12)
            compare(
                f"{whole.__name__} {out}",
                lambda x, f=whole, o=out: f(x, o),
                lambda x, *at, f=part, o=out: f(x, o, *at),
                shape,
                dim,
                bounds,
                replicated=out[dim - 2] == 1,
                ties=ties,
            )
    for bounds in cuts(12):
        compare(
            "1d",
            lambda x: F.adaptive_max_pool1d(x, 5),
            lambda x, *at: spatial.adaptive_max_pool(x, (5,), *at),
            (2, 3, 12),
            2,
            bounds,
        )
        compare(
            "3d",
            lambda x: F.adaptive_max_pool3d(x, (2, 1, 3)),
            lambda x, *at: spatial.adaptive_max_pool(x, (2, 1, 3), *at),
            (2, 3, 4, 12, 5),
            3,
            bounds,
            replicated=True,
            ties=True,
        )


# -- interpolation


def resizes() -> None:
    """A size, or a scale, per mode; in both dims."""
    names = {"nearest": "nearest", "nearest-exact": "nearest-exact", "linear": "bilinear", "cubic": "bicubic"}
    sizes: list[tuple[Any, Any]] = [
        ((22, 14), None),
        ((7, 9), None),
        ((11, 14), None),
        ((11, 7), None),
        ((1, 1), None),
        ((40, 3), None),
        ((33, 14), None),
        ((44, 21), None),
        (None, (2.0, 2.0)),
        (None, (1.7, 0.6)),
        (None, (2.05, 3.0)),
        (None, (0.4, 1.0)),
    ]
    for mode, (size, scale), dim, align in product(names, sizes, (2, 3), (False, True)):
        if (align and mode.startswith("nearest")) or (dim == 3 and size not in ((22, 14), (7, 9))):
            continue
        shape = (2, 3, 11, 7) if dim == 2 else (2, 3, 7, 11)
        size, scale = (v[::-1] if v and dim == 3 else v for v in (size, scale))
        target = size or [int(length * s) for length, s in zip(shape[2:], scale, strict=True)]
        corners = {} if mode.startswith("nearest") else {"align_corners": align}
        for bounds in cuts(11):
            compare(
                f"{mode} {size or scale} align={align}",
                lambda x, m=names[mode], s=size, f=scale, c=corners: F.interpolate(
                    x, size=s, scale_factor=f, mode=m, **c
                ),
                lambda x, *at, m=mode, t=target, a=align, f=scale: spatial.resize(x, t, m, a, f or (None, None), *at),
                shape,
                dim,
                bounds,
            )
    other_resizes()


def other_resizes() -> None:
    for bounds in cuts(9):
        compare(
            "1d",
            lambda x: F.interpolate(x, 20, mode="linear"),
            lambda x, *at: spatial.resize(x, (20,), "linear", False, (None,), *at),
            (2, 3, 9),
            2,
            bounds,
        )
        compare(
            "1d",
            lambda x: F.interpolate(x, 20),
            lambda x, *at: spatial.resize(x, (20,), "nearest", False, (None,), *at),
            (2, 3, 9),
            2,
            bounds,
        )
        compare(
            "3d",
            lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear"),
            lambda x, *at: spatial.resize(x, (6, 13, 4), "linear", False, (1.5, 1.5, 1.5), *at),
            (2, 3, 4, 9, 3),
            3,
            bounds,
        )
        compare(
            "3d",
            lambda x: F.interpolate(x, (6, 13, 4)),
            lambda x, *at: spatial.resize(x, (6, 13, 4), "nearest", False, (None,) * 3, *at),
            (2, 3, 4, 9, 3),
            3,
            bounds,
        )
    for bounds, dim in product(cuts(12), (2, 3)):
        shape = (2, 18, 12, 6) if dim == 2 else (2, 18, 6, 12)
        compare(
            "shuffle",
            lambda x: F.pixel_shuffle(x, 3),
            lambda x, *at: spatial.pixel_shuffle(x, 3, *at),
            shape,
            dim,
            bounds,
        )
        compare(
            "unshuffle",
            lambda x: F.pixel_unshuffle(x, 3),
            lambda x, *at: spatial.pixel_unshuffle(x, 3, *at),
            shape,
            dim,
            bounds,
        )


# -- norms


def norms() -> None:
    """Rows or columns split; then channels, aligned with the groups or not; values far from zero."""
    for bounds, dim in product(cuts(11), (2, 3)):
        shape = (3, 12, 11, 5) if dim == 2 else (3, 12, 5, 11)
        for groups, affine in product((1, 4, 12), (True, False)):
            w, b = weights_of((12,), (12,)) if affine else (None, None)
            group_norms(groups, shape, dim, bounds, w, b)
            running_norms(groups == 1, shape, dim, bounds, w, b)
        w, b = weights_of(shape[1:], shape[1:])
        compare(
            "layer_norm",
            lambda x, w, b, s=shape: F.layer_norm(x, s[1:], w, b),
            lambda x, w, b, dim, bounds, axis, s=shape: (
                spatial.layer_norm(x, s[1:], w, b, 1e-5, dim, bounds, axis),
                bounds,
            ),
            shape,
            dim,
            bounds,
            w,
            b,
        )
    n = dist.get_world_size()
    w, b = weights_of((12,), (12,))
    for bounds, groups in product(((*range(0, 12 - 12 % n, 12 // n), 12), *cuts(12)), (1, 2, 3, 4, 6, 12)):
        if len(bounds) == n + 1:
            group_norms(groups, (3, 12, 5, 4), 1, bounds, w, b)
    for bounds in cuts(11):
        group_norms(4, (2, 12, 11), 2, bounds, None, None, shift=1e4, tolerance=1e-7)


def group_norms(
    groups: int,
    shape: Sequence[int],
    dim: int,
    bounds: Bounds,
    w: Any,
    b: Any,
    shift: float = 0.0,
    tolerance: float = TOLERANCE,
) -> None:
    """A shift of 1e4 costs 2 x 4 of 16 digits where a variance is a difference of squares, and 4 where it is not."""

    def part(x: torch.Tensor, w: Any, b: Any, dim: int, bounds: Bounds, axis: Axis) -> Any:
        return spatial.group_norm(x + shift, w, b, groups, 1e-5, dim, bounds, axis), bounds

    global TOLERANCE
    before, TOLERANCE = TOLERANCE, tolerance
    compare(
        f"group_norm {groups}", lambda x, w, b: F.group_norm(x + shift, groups, w, b), part, shape, dim, bounds, w, b
    )
    TOLERANCE = before


def running_norms(training: bool, shape: Sequence[int], dim: int, bounds: Bounds, w: Any, b: Any) -> None:
    """Batch and instance norm, and their running statistics."""
    kinds: list[tuple[Any, Any]] = [(F.batch_norm, spatial.batch_norm), (F.instance_norm, spatial.instance_norm)]
    for whole, part in kinds:
        theirs, ours = ([torch.full((12,), 0.5, dtype=torch.float64) for _ in range(2)] for _ in range(2))

        def there(x: Any, w: Any, b: Any, whole: Any = whole, theirs: Any = theirs) -> Any:
            return whole(x, *theirs, w, b, training, 0.3, 1e-4)

        def here(x: Any, w: Any, b: Any, dim: int, bounds: Any, axis: Axis, part: Any = part, ours: Any = ours) -> Any:
            return part(x, w, b, *ours, training, 0.3, 1e-4, (axis,)), bounds

        compare(whole.__name__, there, here, shape, dim, bounds, w, b)
        for a, c in zip(ours, theirs, strict=True):
            close(a, c, f"running statistics of {whole.__name__}")


def two_axes() -> None:
    """Tiles of a 2 x 2 mesh: statistics span one axis, then the other."""
    rank = dist.get_rank()
    rows, columns = (0, 4, 11), (0, 5, 7)
    groups = [process_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    down, across = Axis("rows", 2, rank // 2, groups[2 + rank % 2]), Axis("columns", 2, rank % 2, groups[rank // 2])
    x = torch.randn(2, 4, 11, 7, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 4, 3, 3, dtype=torch.float64)
    y = F.group_norm(F.conv2d(x, w, None, 1, 1), 1)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    i, j = down.index, across.index

    def tile(t: torch.Tensor) -> torch.Tensor:
        return t[:, :, rows[i] : rows[i + 1], columns[j] : columns[j + 1]]

    mine = tile(x.detach()).clone().requires_grad_()
    from drumline.partition.sharding.halo_exchange import window

    tall = window(mine, 2, rows, ((-1, 5), (3, 12)), down)
    wide = window(tall, 3, columns, ((-1, 6), (4, 8)), across)
    out = spatial.group_norm_over(F.conv2d(wide, w), None, None, 1, 1e-5, 0, 3, (down, across))
    close(out, tile(y), "two axes")
    out.backward(tile(gradient))
    assert x.grad is not None
    close(mine.grad, tile(x.grad), "gradient over two axes")


RANKS = [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
FAMILIES = [convolutions, transposed_convolutions, paddings, pools, adaptive_pools, resizes, norms]


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_equal_to_the_whole(world: Worlds, p: int, family: Callable[[], None]) -> None:
    world(p).run(family)


def test_two_axes(world: Worlds) -> None:
    world(4).run(two_axes)


def half() -> None:
    """Sums and weights of half precision are kept in float32."""
    axis, bounds = axis_of(), (0, 5, 11)
    x = torch.randn(2, 4, 11, 6).bfloat16()
    mine = x[:, :, bounds[axis.index] : bounds[axis.index + 1]].clone().requires_grad_()
    w = torch.randn(4, requires_grad=True)
    for out, whole in (
        (spatial.group_norm(mine, w, None, 2, 1e-5, 2, bounds, axis), F.group_norm(x.float(), 2, w)),
        (spatial.layer_norm(mine, (11, 6), None, None, 1e-5, 2, bounds, axis), F.layer_norm(x.float(), (11, 6))),
    ):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(
            out.float(), whole[:, :, bounds[axis.index] : bounds[axis.index + 1]], rtol=1e-2, atol=1e-2
        )
        out.sum().backward()
        assert (
            mine.grad is not None
            and mine.grad.dtype == torch.bfloat16
            and w.grad is not None
            and w.grad.dtype == torch.float32
        )
    out, new = spatial.resize(mine, (22, 6), "linear", False, (None, None), 2, bounds, axis)
    whole = F.interpolate(x.float(), (22, 6), mode="bilinear")[:, :, new[axis.index] : new[axis.index + 1]]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), whole, rtol=1e-2, atol=1e-2)


def test_half_precision(world: Worlds) -> None:
    world(2).run(half)


def test_absent_samples_do_not_count(world: Worlds) -> None:
    world(2).run(absent)


def absent() -> None:
    """Rank 1 runs a stand-in: the statistics and the gradients are those of rank 0 alone."""
    axis = axis_of()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    theirs = x.clone().requires_grad_()
    F.batch_norm(theirs, None, None, training=True).square().mul(x).sum().backward()
    mine = (x if axis.index == 0 else x * 7).clone().requires_grad_()
    out = spatial.batch_norm(mine, None, None, None, None, True, 0.1, 1e-5, (axis,), present=axis.index == 0)
    out.square().mul(x).sum().backward()
    close(mine.grad, theirs.grad if axis.index == 0 else torch.zeros_like(x), "absent")


def shapes(x: torch.Tensor, w: torch.Tensor, axis: Axis) -> list[tuple[tuple[int, ...], Any]]:
    bounds = (0, 4, 8)
    calls = [
        functools.partial(spatial.conv, x, w, None, 2, 1, 1, 1),
        functools.partial(spatial.conv_transpose, x, w, None, 2, 1, 1, 1, 1),
        functools.partial(spatial.pad, x, (1, 1, 2, 2), "reflect", None),
        functools.partial(spatial.max_pool, x, (2, 2), (), 0, 1, False),
        functools.partial(spatial.avg_pool, x, (3, 3), (2, 2), 1, False, False, None),
        functools.partial(spatial.adaptive_avg_pool, x, (1, 1)),
        functools.partial(spatial.adaptive_max_pool, x, (1, 1)),
        functools.partial(spatial.adaptive_max_pool, x, (3, 3)),
        functools.partial(spatial.resize, x, (16, 12), "nearest", False, (None, None)),
        functools.partial(spatial.resize, x, (16, 12), "cubic", True, (None, None)),
        functools.partial(spatial.pixel_unshuffle, x, 2),
    ]
    results = []
    for call in calls:
        out, new = call(2, bounds, axis)
        out.sum().backward()
        results.append((tuple(out.shape), new))
    norm = spatial.group_norm(x, None, None, 2, 1e-5, 2, bounds, axis)
    return [*results, (tuple(norm.shape), bounds)]


def real_shapes() -> list[tuple[tuple[int, ...], Any]]:
    return shapes(torch.randn(2, 4, 4, 6, requires_grad=True), torch.randn(4, 4, 3, 3), axis_of())


def test_shapes_without_ranks(world: Worlds) -> None:
    """On fake tensors every function returns the real shape, without a group."""
    for index, real in enumerate(world(2).run(real_shapes)):
        with FakeTensorMode():
            x, w = torch.empty(2, 4, 4, 6, requires_grad=True), torch.empty(4, 4, 3, 3)
            assert shapes(x, w, Axis("rows", 2, index)) == real


def test_bounds_of_outputs() -> None:
    """Same-size convolutions keep the bounds; those that halve agree with the pooling and the shortcut next to them."""
    bounds = (0, 9, 17, 30)
    assert plan_slide(bounds, 3, 1, 1, 1).bounds == bounds == plan_slide(bounds, 5, 1, 4, 4, 2).bounds
    halves = {plan_slide(bounds, k, 2, p, p).bounds for k, p in ((3, 1), (1, 0), (2, 0), (7, 3))}
    assert halves == {(0, 5, 9, 15)}
    assert feasible_bounds((0, 9, 9, 9), 9) == (0, 7, 8, 9)  # nobody without rows
    assert feasible_bounds((0, 1, 1, 2), 2) == (0, 1, 1, 2)  # two rows for three ranks
