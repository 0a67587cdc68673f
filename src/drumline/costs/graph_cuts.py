"""Cuts of a model's data flow by a plan: the values that pipeline stages send, and the messages inside layers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from ..clusters import Cluster
from ..models.affine import Affine
from ..models.data_flow import DataFlow
from ..models.profile import Profile
from ..plans import Plan
from ..theory.roofline import STORED_BYTES
from .layer_time import largest_micro_batch
from .model_split import PIPELINE_NOTES
from .operator_model import OperatorCostModel
from .rank_model import LayerMessage
from .stages import Stage, layer_names


@dataclass(frozen=True, slots=True)
class StageTraffic:
    """Values that one stage computes and another reads, in the forward of a micro-batch."""

    src: int
    dst: int
    values: int
    bytes: float
    """In the precision of the plan. Their gradients come back in the backward."""

    @property
    def skips(self) -> bool:
        """Whether stages lie between the two."""
        return self.dst > self.src + 1


@dataclass(frozen=True, slots=True)
class GraphCuts:
    """The cuts of a plan."""

    plan: Plan
    samples: float
    """Samples of a micro-batch on one rank; all bytes are for these."""
    starts: tuple[int, ...]
    """The first operator of each stage."""
    transfers: tuple[StageTraffic, ...]
    messages: dict[str, tuple[tuple[LayerMessage, float], ...]]
    """By layer: the collectives of the ranks that share it, each with its bytes."""
    notes: tuple[str, ...] = ()

    def stage(self, operator: int) -> int:
        """The stage of an operator."""
        return sum(operator >= start for start in self.starts) - 1


def graph_cuts(profile: Profile, flow: DataFlow, plan: Plan, cluster: Cluster) -> GraphCuts:
    """Cut the data flow as the cost model cuts the layers, and count what crosses."""
    model = OperatorCostModel(profile, cluster, plan.precision)
    n = largest_micro_batch(profile.batch_size, plan)
    scale = STORED_BYTES[plan.precision] / profile.activation_bytes
    starts = _starts(flow, model.pipeline(plan).stages) if plan.pp > 1 else (0,)
    rank = model.rank_model(plan)
    messages: dict[str, tuple[tuple[LayerMessage, float], ...]] = {}
    repeated = [own for x, own in zip(rank.profile.layers, rank.messages, strict=True) for _ in range(x.repeats)]
    for name, own in zip(layer_names(rank.profile.layers), repeated, strict=True):
        if own:
            messages[name] = tuple((m, m.size(n, plan.precision, profile)) for m in own)
    notes = (*rank.notes, *(PIPELINE_NOTES[:1] if plan.pp > 1 and not plan.begins else ()))
    if len(set(starts)) < len(starts):
        notes = (*notes, "pp: the cost model divides a single operator over stages; the graph shows it in one of them")
    if not plan.splits_model:
        notes = (f"{plan} cuts nothing: every rank runs the whole graph on its own samples",)
    return GraphCuts(plan, n, starts, _transfers(flow, starts, n, scale), messages, notes)


def _starts(flow: DataFlow, stages: tuple[Stage, ...]) -> tuple[int, ...]:
    """The first operator of each stage: where its first layer, or its share of that layer, begins."""
    starts = [0]
    for before, stage in pairwise(stages):
        name = stage[0].name
        numbers = [i for i, op in enumerate(flow.operators) if op.layer == name and i >= starts[-1]]
        if not numbers:  # a layer without operators of its own
            starts.append(starts[-1])
            continue
        done = sum(x.share for x in before if x.layer == stage[0].layer and x.name == name)
        starts.append(_inside(flow, numbers, done) if done else numbers[0])
    return tuple(starts)


def _inside(flow: DataFlow, numbers: list[int], share: float) -> int:
    """The first operator with parameters after a share of a layer's work."""
    whole = sum((flow.operators[i].flops for i in numbers), Affine()).at(1)
    done = 0.0
    for i in numbers:
        if done >= share * whole * (1 - 1e-9) and flow.operators[i].parameters:
            return i
        done += flow.operators[i].flops.at(1)
    return numbers[-1]


def _transfers(flow: DataFlow, starts: tuple[int, ...], n: float, scale: float) -> tuple[StageTraffic, ...]:
    """Each value is sent once to each stage that reads it; what does not depend on the batch is recomputed there."""
    if len(starts) == 1:
        return ()
    constant = _constant(flow)
    stages = [sum(i >= start for start in starts) - 1 for i in range(len(flow.operators))]
    sizes: dict[tuple[int, int], list[float]] = defaultdict(list)
    for i, value in enumerate(flow.values):
        if value.writer < 0 or constant[value.writer]:
            continue  # every stage loads what it needs of the batch
        src = stages[value.writer]
        for dst in sorted({stages[read.reader] for read in flow.readers[i]} - {src}):
            sizes[src, dst].append(scale * value.bytes.at(n))
    return tuple(StageTraffic(src, dst, len(own), sum(own)) for (src, dst), own in sorted(sizes.items()))


def _constant(flow: DataFlow) -> list[bool]:
    """By operator: whether its results do not depend on the batch, such as positions and masks."""
    constant: list[bool] = []
    for own in flow.read_by:
        writers = [flow.values[value].writer for value, _ in own]
        constant.append(all(writer >= 0 and constant[writer] for writer in writers))
    return constant
