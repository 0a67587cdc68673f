"""The search space: every layout of a model on a cluster that the engine runs, from one definition.

A `Layout` is a plain tuple. It becomes a `Plan` for cost models that price plans one by one, and a row of `PlanColumns`
for those that score the whole space at once. For the latter the space is exhaustive; for the former it is coarse:
powers of two, and few schedules. Which choices combine is decided by plans/combinations.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ..clusters import Cluster
from ..core.errors import PlanError
from ..costs import cost_model
from ..costs.model import CostModel
from ..costs.rank_model import tokens_of
from ..models.op_shapes import ConvolutionShape, shape_of
from ..models.profile import Layer, Profile
from ..plans import Plan
from ..plans.combinations import TESTED_VALUES, refusal
from .memory_saving import fewest_savings, most_savings

MIN_TOKENS = 4096
"""Tokens per rank at least, where context parallelism divides them."""
MIN_TILE = 32
"""Rows, and columns, of a tile at least."""
MIN_DEPTH_LIMIT = 8
"""Coarse: pipelines have up to 8 ranks, or as many as there are nodes."""
ROUNDS = (1, 2, 4, 8)
"""Coarse: micro-batches of a pipeline, in multiples of its ranks; with more, the bubble hardly shrinks."""
MAX_ACTIONS = 8192
"""Coarse: micro-batches times ranks of a pipeline at most; its schedule is played action by action."""
FEW_ROUNDS = 4
"""Coarse: up to this many micro-batches per rank, schedules with smaller bubbles are candidates too."""
CAPTURED_OPTIMIZERS = ("Adam", "AdamW", "SGD")
"""Optimizers whose update can be captured."""
LEAST_GRAPH_GAIN = 0.95
"""`graph=true` is a candidate if it takes at most this share of the step's time: a captured step has fixed shapes, and
costs a capture."""


class Layout(NamedTuple):
    """How ranks are arranged and what they share; keys as in `Plan`."""

    dp: int
    shard: int
    """0: all replicas."""
    zero: int
    tp: int
    cp: int
    pp: int
    virtual: int
    schedule: str
    """`none` without a pipeline."""
    micro: int
    recompute: str
    tile: tuple[int, int] = (1, 1)

    @property
    def splits_model(self) -> bool:
        """Whether ranks have different parts of the model, or of a sample."""
        return self.tp * self.cp * self.pp > 1 or self.tile != (1, 1)

    def plan(self, base: Plan) -> Plan:
        """The plan with this layout; keys that a layout does not have are those of `base`."""
        keys = self._asdict()
        if self.pp == 1:
            keys["schedule"] = base.schedule
        return replace(base, **keys)


class SearchSpace:
    """Layouts of a model on a cluster. Most replicas come first: a search that is stopped has seen the best ones."""

    def __init__(
        self, profile: Profile, cluster: Cluster, base: Plan, model: CostModel, *, exhaustive: bool = False
    ) -> None:
        self._profile, self._cluster, self._base, self._model = profile, cluster, base, model
        self._exhaustive = exhaustive
        self._devices, self._node = cluster.devices, min(cluster.devices, cluster.node.devices)
        # stages are cut between blocks; the coarse space does not know which layers are blocks
        self._layers = sum(x.repeats for x in profile.layers if (_is_block(x) if exhaustive else x.parameters))
        self._allowed: dict[tuple[object, ...], list[str]] = {}

    def layouts(self) -> Iterator[Layout]:
        """Every layout: replicas first, then split models."""
        yield from self.replicated()
        yield from self.split()

    def replicated(self) -> Iterator[Layout]:
        """Whole models, sharded or not."""
        for dp in replicas(self._profile, self._devices):
            for zero, shard in shardings(dp, self._cluster):
                for micro in self._micro_batches(self._profile.batch_size // dp, 1):
                    layout = Layout(dp, shard, zero, 1, 1, 1, 1, "none", micro, "none")
                    for recompute in self._allowed_recomputations(layout):
                        yield Layout(dp, shard, zero, 1, 1, 1, 1, "none", micro, recompute)

    def split(self) -> Iterator[Layout]:
        """Models whose ranks share layers, tokens, images or stages. Not mixtures: a captured graph has no routing."""
        if any(x.experts for x in self._profile.layers):
            return
        for dp, tp, cp, pp, tile in self.meshes():
            first = "1f1b" if pp > 1 else "none"
            for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                if not self._allowed_recomputations(Layout(dp, 0, zero, tp, cp, pp, 1, first, 1, "none", tile)):
                    continue
                for micro in self._micro_batches(self._profile.batch_size // dp, pp):
                    for schedule, virtual in self._schedules(pp, micro):
                        layout = Layout(dp, 0, zero, tp, cp, pp, virtual, schedule, micro, "none", tile)
                        for recompute in self._allowed_recomputations(layout):
                            yield Layout(dp, 0, zero, tp, cp, pp, virtual, schedule, micro, recompute, tile)

    def meshes(self) -> Iterator[tuple[int, int, int, int, tuple[int, int]]]:
        """(dp, tp, cp, pp, tile) that use as many devices as they can. Ranks that share a layer share a node."""
        tokens = tokens_of(self._profile)
        for tile in self._tiles():
            whole = tile == (1, 1)
            for tp in tensor_sizes(self._node) if whole else (1,):
                for cp in powers(min(self._node // tp, tokens // MIN_TOKENS)) if whole else (1,):
                    inner = tp * cp * tile[0] * tile[1]
                    if self._devices > self._node and self._node % inner:
                        continue  # some group would span two nodes
                    if not self._divides(replace(self._base, tp=tp, cp=cp, tile=tile)):
                        continue
                    for pp in self._depths(self._devices // inner) if whole else (1,):
                        if inner * pp > 1:
                            for dp in self._replicas_of(self._devices // (inner * pp)):
                                yield dp, tp, cp, pp, tile

    def _allowed_recomputations(self, layout: Layout) -> list[str]:
        """Kinds of recomputation with which the engine runs a layout, none for a layout that it refuses.

        Layouts that differ in sizes alone are alike.
        """
        _, shard, zero, tp, cp, pp, virtual, schedule, micro, _, tile = layout
        key = (shard > 0, zero, tp > 1, cp > 1, pp > 1, virtual > 1, schedule, micro > 1, tile)
        if key not in self._allowed:
            kinds = recomputations(self._profile)
            self._allowed[key] = [k for k in kinds if not refusal(layout._replace(recompute=k).plan(self._base))]
        return self._allowed[key]

    def _divides(self, plan: Plan) -> bool:
        """Whether the model has what the plan divides: heads, tokens, images."""
        try:
            self._model.rank_model(plan)
        except PlanError:
            return False
        return True

    def _depths(self, most: int) -> Iterable[int]:
        """Pipeline ranks."""
        most = min(most, self._layers)
        if self._exhaustive:
            return range(1, most + 1)
        return powers(min(most, max(MIN_DEPTH_LIMIT, self._devices // self._node)))

    def _replicas_of(self, most: int) -> Iterable[int]:
        """Replicas that use the devices; exhaustive: also the next fewer that divide the batch evenly."""
        batch = self._profile.batch_size
        most = min(most, batch)
        if not self._exhaustive:
            return (most,)
        return dict.fromkeys((most, next(n for n in range(most, 0, -1) if batch % n == 0)))

    def _micro_batches(self, most: int, pp: int) -> Iterable[int]:
        """Micro-batches, as long as every rank has a sample in each."""
        if self._exhaustive:
            sizes = multiples_of_powers(most)
            whole = {most // size for size in sizes if most % size == 0}  # micro-batches of equal sizes
            return sorted({*sizes, *whole, *(pp * k for k in multiples_of_powers(most // pp) if pp > 1)})
        if pp == 1:
            return powers(most)
        counts = {pp * k for k in ROUNDS if pp * k <= most} | {max(powers(most))}
        return sorted(m for m in counts if m * pp <= MAX_ACTIONS)

    def _schedules(self, pp: int, micro: int) -> Iterator[tuple[str, int]]:
        """(schedule, stages per rank). Interleaved stages need rounds of as many micro-batches as there are ranks."""
        if pp == 1:
            yield "none", 1
            return
        yield "1f1b", 1
        if self._exhaustive:
            yield "gpipe", 1
        if self._exhaustive or micro <= FEW_ROUNDS * pp:
            yield "zero-bubble", 1
            if micro % pp == 0:
                yield from (("interleaved", v) for v in self._virtual_stages(pp))

    def _virtual_stages(self, pp: int) -> list[int]:
        if self._exhaustive:
            # the ends may have one layer less, as they have the embedding and the head
            return [v for v in range(2, self._layers // pp + 1) if self._layers % (pp * v) in (0, pp * v - 2)]
        return [2] if 2 * pp <= self._layers else []

    def _tiles(self) -> Iterator[tuple[int, int]]:
        """Tiles of images that are large enough; rows first."""
        yield 1, 1
        convolutions = (
            s for x in self._profile.layers for op in x.ops if isinstance(s := shape_of(op), ConvolutionShape)
        )
        first = next(convolutions, None)
        if first is None:
            return
        for rows in powers(min(self._node, first.rows // MIN_TILE)):
            for columns in (rows // 2, rows):
                if 1 < rows * columns <= self._node and columns >= 1 and first.columns // columns >= MIN_TILE:
                    yield rows, columns


def candidates(
    profile: Profile, cluster: Cluster, base: Plan, model: CostModel | None = None, *, save_memory: bool = False
) -> Iterator[Plan]:
    """Every plan of the coarse space; keys that are not searched are those of `base`.

    Options that save memory and only cost time (offload, chunk, recomputation of split models) are candidates where a
    plan does not fit without them, so the fastest plan is not lost. With `save_memory` they are always candidates.
    """
    model = model or cost_model(profile, cluster, base.precision)
    space = SearchSpace(profile, cluster, base, model)
    for layout in space.replicated():
        plan = layout.plan(base)
        yield plan
        yield from captured(plan, profile, cluster, model)
        yield from with_expert_parallelism(plan, profile)
        if save_memory:
            yield from most_savings(plan, cluster)
        elif not model.fits(plan):
            yield from fewest_savings(plan, cluster, model.fits)
    yield from split_candidates(space, base, model.fits, save_memory=save_memory)


def with_expert_parallelism(plan: Plan, profile: Profile) -> Iterator[Plan]:
    """The plan with every `ep` that divides its replicas and the experts of each mixture."""
    counts = {x.experts.count for x in profile.layers if x.experts}
    for ep in powers(min(counts, default=1)):
        if ep == 1 or plan.dp % ep or (plan.shard and plan.shard % ep) or any(count % ep for count in counts):
            continue
        sharded = replace(plan, ep=ep)
        if not refusal(sharded):
            yield sharded


def captured(plan: Plan, profile: Profile, cluster: Cluster, model: CostModel) -> Iterator[Plan]:
    """The plan with `graph=true`, where its step can be captured and its GPU waits for the host without it."""
    graph = replace(plan, graph=True)
    if cluster.device.kind != "cuda" or plan.graph or refusal(graph) or profile.optimizer not in CAPTURED_OPTIMIZERS:
        return
    if profile.batch_size % plan.micro == 0 and model.fits(plan):
        plain, replayed = model.seconds([plan, graph])
        if replayed < LEAST_GRAPH_GAIN * plain:
            yield graph


def split_candidates(
    space: SearchSpace, base: Plan, fits: Callable[[Plan], bool], *, save_memory: bool = False
) -> Iterator[Plan]:
    """Plans that split the model; with recomputation only where they do not fit without it, or `save_memory`."""
    for layout in space.split():
        plan = layout.plan(base)
        if plan.recompute == "none" or save_memory or not fits(replace(plan, recompute="none")):
            yield plan


def replicas(profile: Profile, devices: int) -> Iterator[int]:
    """Numbers of replicas: up to 16 devices any, above only divisors of the devices; never more than samples."""
    for dp in range(devices, 0, -1):
        if dp <= profile.batch_size and (devices <= 16 or devices % dp == 0):
            yield dp


def shardings(dp: int, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(zero, shard): one copy over all replicas (shard=0), or over a node or a power of two of neighbours."""
    yield 0, 0
    if dp == 1:
        return  # nothing to shard over
    for zero in (1, 2, 3):
        yield zero, 0
        for shard in range(2, dp):
            if dp % shard == 0 and (shard & (shard - 1) == 0 or shard == cluster.node.devices):
                yield zero, shard


def recomputations(profile: Profile) -> Iterator[str]:
    """Kinds of recomputation; only `none` where the model has no blocks to recompute."""
    for kind in TESTED_VALUES["recompute"]:
        if kind == "none" or any(x.composite for x in profile.layers):
            yield str(kind)


def tensor_sizes(node: int) -> list[int]:
    """Tensor-parallel sizes in a node: powers of two, and divisors of the node."""
    return [n for n in range(1, node + 1) if n & (n - 1) == 0 or node % n == 0]


def powers(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to `most`, at least 1."""
    n = 1
    while n <= max(1, most):
        yield n
        n *= 2


def multiples_of_powers(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: powers of two, and three times them."""
    return sorted(k << i for k in (1, 3) for i in range(most.bit_length()) if k << i <= most)


def _is_block(layer: Layer) -> bool:
    return any(op.kind == "attention" for op in layer.ops)
