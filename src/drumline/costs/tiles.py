"""Spatial tiles: each rank has some rows and columns of every image, and asks its neighbours for the edges.

A convolution whose kernel is larger than its stride reads kernel - stride rows of its neighbours, and sends their
gradients back, unless the plan does without halos. Layers without convolutions (what follows a pool over the whole
image) are whole on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.errors import PlanError
from ..models.profile import Affine, Layer, Op
from ..models.shapes import Convolution, dims, shape_of
from .local import Kept, Local, Talk, Talks, each_layer, shared, times, undivided

STATISTICS = 4096.0
"""Bytes of a norm's statistics, about; they are small."""
GROUP_NORM = "native_group_norm"


def by_tiles(local: Local, tile: tuple[int, int], *, halo: bool = True) -> Local:
    """The part of the largest tile."""
    rows, columns = tile
    if rows * columns == 1:
        return local
    images = [s for x in local.profile.layers for op in x.ops if isinstance(s := shape_of(op), Convolution)]
    if not images:
        return undivided(local, f"tile={rows}x{columns}", "convolutions of images")
    first = images[0]
    if rows > first.rows or columns > first.columns:
        raise PlanError(
            f"tile={rows}x{columns} for images of {first.rows} x {first.columns}",
            rule="every tile has a row and a column",
            fix=f"tile={min(rows, first.rows)}x{min(columns, first.columns)}",
        )
    share = -(-first.rows // rows) * -(-first.columns // columns) / (first.rows * first.columns)
    width = local.profile.activation_bytes
    learns = False  # the images themselves need no gradient, so the first convolution's edges do not come back

    def change(layer: Layer, kept: Kept) -> tuple[Layer, Kept, Talks]:
        if not any(isinstance(shape_of(op), Convolution) for op in layer.ops):
            return layer, kept, ()
        nonlocal learns
        talks, learns = _edges(layer, tile, width, learns), True
        talks = talks if halo else tuple(t for t in talks if t.collective != "send")
        ops = tuple(_op(op, share, rows, columns) for op in layer.ops)
        own = Kept(*(times(a, share) for a in (kept.saved, kept.forward, kept.backward)))
        return replace(layer, ops=ops, output=times(layer.output, share)), own, talks

    return each_layer(local, change)


def _op(op: Op, share: float, rows: int, columns: int) -> Op:
    made, shape = shared(op, share), shape_of(op)
    if not isinstance(shape, Convolution):
        return made
    local = replace(shape, rows=-(-shape.rows // rows), columns=-(-shape.columns // columns))
    return replace(made, dims=dims(local))


def _edges(layer: Layer, tile: tuple[int, int], width: int, learns: bool) -> Talks:
    """The edges that a tile with neighbours on both sides sends; with two tiles there is one side."""
    found: list[Talk] = []
    rows, columns = tile
    for op in layer.ops:
        shape = shape_of(op)
        if isinstance(shape, Convolution):
            long = -(-shape.columns // columns) * shape.inputs * width * op.count
            high = -(-shape.rows // rows) * shape.inputs * width * op.count
            edges = _edge("rows", rows, shape.kernel_rows - shape.stride_rows, long)
            edges += _edge("columns", columns, shape.kernel_columns - shape.stride_columns, high)
            found += [e for e in edges if learns or e.phase == "forward"]
            learns = True
        elif op.name == GROUP_NORM:
            axes = [axis for axis, n in (("rows", rows), ("columns", columns)) if n > 1]
            found += [Talk(a, p, "all_reduce", Affine(STATISTICS), True) for a in axes for p in ("forward", "backward")]
    return tuple(found)


def _edge(axis: str, n: int, halo: int, size: int) -> list[Talk]:
    if n == 1 or halo < 1:
        return []
    lines = halo if n > 2 else -(-halo // 2)
    sent = Affine(0.0, float(lines * size))
    return [Talk(axis, "forward", "send", sent), Talk(axis, "backward", "send", sent)]
