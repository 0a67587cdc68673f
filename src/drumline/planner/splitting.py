"""Candidates that split the model: features inside a node first, stages over the rest, tokens of long sequences, tiles
of images; what devices are left over are replicas. Small generators that read like their constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..clusters import Cluster
from ..core.errors import PlanError
from ..costs import Steps
from ..costs.tensor import tokens_of
from ..models.profile import Profile
from ..models.shapes import Convolution, shape_of
from ..plans.combinations import refusal
from ..plans.plan import Plan

if TYPE_CHECKING:
    from .prices import Prices

LONG = 4096
"""Tokens that a rank keeps at least, where tokens are divided."""
SMALLEST_TILE = 32
"""Rows, and columns, that a tile has at least."""
LEAST_DEEP = 8
"""A pipeline has up to so many ranks, or as many as there are nodes."""
ROUNDS = (1, 2, 4, 8)
"""Micro-batches of a pipeline, in multiples of its ranks: with more, its bubble hardly shrinks."""
MOST_ACTIONS = 8192
"""Micro-batches times ranks of a pipeline: what takes more is not played."""
FEW = 4
"""Up to so many micro-batches a rank, orders with smaller bubbles are looked at as well."""


def splits(
    profile: Profile, cluster: Cluster, base: Plan, fits: Callable[[Plan], bool] | None = None, *, sparing: bool = False
) -> Iterator[Plan]:
    """Every plan that splits the model over as many devices as it can, and can be priced.

    Layers are computed again where a plan does not fit without that, or, `sparing` memory, with every plan.
    """
    steps = Steps(profile, cluster, base.precision)
    fits = fits or steps.fits
    again = any(x.composite for x in profile.layers)
    for shape in shapes(profile, cluster, base):
        if not can_be_cut(shape, steps):
            continue
        for zero in _levels(shape):
            for plan in _in_micro_batches(replace(shape, zero=zero), profile):
                if refusal(plan):
                    continue
                yield plan
                smaller = replace(plan, recompute="full")
                if again and not refusal(smaller) and (sparing or not fits(plan)):
                    yield smaller


def shapes(profile: Profile, cluster: Cluster, base: Plan) -> Iterator[Plan]:
    """Meshes that fill the devices, or leave as few idle as they can. Ranks that share a layer share a node."""
    devices, node = cluster.devices, min(cluster.devices, cluster.node.devices)
    tokens = tokens_of(profile)
    for tile in _tiles(profile, node):
        for tp in parts(node) if tile == (1, 1) else (1,):
            for cp in powers(min(node // tp, tokens // LONG)) if tile == (1, 1) else (1,):
                inner = tp * cp * tile[0] * tile[1]
                if devices > node and node % inner:
                    continue  # some group would lie across two nodes
                deepest = min(devices // inner, _layers(profile), max(LEAST_DEEP, devices // node))
                for pp in powers(deepest) if tile == (1, 1) else (1,):
                    dp = min(devices // (inner * pp), profile.batch_size)
                    if inner * pp > 1:
                        yield replace(base, dp=dp, tp=tp, cp=cp, pp=pp, tile=tile)


def parts(node: int) -> list[int]:
    """Over how many devices of a node features can lie: powers of two, and what divides the node."""
    return [n for n in range(1, node + 1) if n & (n - 1) == 0 or node % n == 0]


def powers(most: int) -> Iterator[int]:
    n = 1
    while n <= max(1, most):
        yield n
        n *= 2


def _tiles(profile: Profile, node: int) -> Iterator[tuple[int, int]]:
    """Of images that are large enough: rows first."""
    yield 1, 1
    first = next((s for x in profile.layers for op in x.ops if isinstance(s := shape_of(op), Convolution)), None)
    if first is None:
        return
    for rows in powers(min(node, first.rows // SMALLEST_TILE)):
        for columns in (rows // 2, rows):
            if 1 < rows * columns <= node and columns >= 1 and first.columns // columns >= SMALLEST_TILE:
                yield rows, columns


def _layers(profile: Profile) -> int:
    return sum(x.repeats for x in profile.layers if x.parameters)


def _levels(shape: Plan) -> tuple[int, ...]:
    """What replicas can share: a pipeline keeps its gradients whole."""
    if shape.dp == 1:
        return (0,)
    return (0, 1) if shape.pp > 1 else (0, 1, 2)


def _in_micro_batches(plan: Plan, profile: Profile) -> Iterator[Plan]:
    most = profile.batch_size // plan.dp
    if plan.pp == 1:
        yield from (replace(plan, micro=m) for m in powers(most))
        return
    counts = {plan.pp * k for k in ROUNDS if plan.pp * k <= most}
    for micro in sorted(m for m in counts | {max(powers(most))} if m * plan.pp <= MOST_ACTIONS):
        yield replace(plan, micro=micro)
        if micro <= FEW * plan.pp:
            yield replace(plan, micro=micro, schedule="zero-bubble")
            if micro % plan.pp == 0 and 2 * plan.pp <= _layers(profile):
                yield replace(plan, micro=micro, schedule="interleaved", virtual=2)


def can_be_cut(shape: Plan, steps: Prices) -> bool:
    """Whether the model has what the plan divides: heads that tp divides, tokens, images."""
    try:
        steps.divided.local(shape)
    except PlanError:
        return False
    return True
