"""Memory of a rank over the time of a step, by pipeline stage: the cost model's bytes at the layout's times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..clusters import Cluster
from ..costs.layer_time import LayerTime, largest_micro_batch
from ..costs.memory import memory_moments
from ..costs.operator_model import OperatorCostModel
from ..costs.optimizer_update import effective_plan
from ..costs.pipeline_memory import memory_during_actions
from ..models.profile import Profile
from ..plans import Plan
from .lanes import Row
from .step import StepLayout


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of tensors on a rank of one pipeline stage: `bytes[i]` from `times[i]` until the next time."""

    stage: int
    times: tuple[float, ...]
    """Seconds from the start of the step; the last is its end."""
    bytes: tuple[float, ...]

    @property
    def peak(self) -> float:
        """The most at any time."""
        return max(self.bytes, default=0.0)


def memory_curves(
    model: OperatorCostModel, profile: Profile, plan: Plan, cluster: Cluster, layout: StepLayout
) -> tuple[StageMemory, ...]:
    """One curve for every stage. The highest peak is the memory that the cost model predicts for the plan."""
    plan, part = effective_plan(plan, cluster), model.rank_model(plan).profile
    n, more = largest_micro_batch(profile.batch_size, plan), cluster.device.workspace
    end = max((end for own in layout.rows for _, _, _, end, _ in own), default=0.0)
    if plan.pp == 1:
        totals = [m.total for m in memory_moments(part, plan, n, device=cluster.device.kind)]
        points = [list(_of_layers(layout, _by_repeat(part, totals), totals[-1]))]
    else:
        cost = model.pipeline(plan)
        ranks = memory_during_actions(part, plan, n, cost.order, cost.stages, cost.homes)
        points = _of_actions(layout, ranks)
    return tuple(
        StageMemory(
            stage,
            tuple(layout.stretch * t for t in (*(t for t, _ in own), end)),
            tuple(more + x for x in (*(x for _, x in own), own[-1][1])),
        )
        for stage, own in enumerate(points)
    )


_Repeats = tuple[list[float], list[float]]
"""Bytes during the forward and the backward of every layer, repeats one by one, in the order of the forward."""


def _by_repeat(profile: Profile, totals: list[float]) -> _Repeats:
    """Between the last repeats of two layers, memory grows evenly with each repeat."""
    forward, backward = [], []
    for i, x in enumerate(profile.layers):
        during, back = totals[2 * i], totals[2 * i + 1]
        before, behind = (
            (totals[2 * i - 2], totals[2 * i - 1]) if i else (min(totals[-1], during), min(totals[-1], back))
        )
        for k in range(1, x.repeats + 1):
            forward.append(before + (during - before) * k / x.repeats)
            backward.append(behind + (back - behind) * k / x.repeats)
    return forward, backward


def _of_layers(layout: StepLayout, bytes: _Repeats, update: float) -> Iterator[tuple[float, float]]:
    """(time, bytes) of a step without a pipeline: where a layer's forward or backward begins, and at the update."""
    layers: list[LayerTime] = list(layout.step.layers)
    forward = [x for t, x in zip(layers, bytes[0], strict=True) if t.forward > 0]
    backward = [x for t, x in zip(reversed(layers), reversed(bytes[1]), strict=True) if t.backward > 0]
    expected = iter(layout.step.plan.micro * [*forward, *backward])
    for row in _computing(layout.rows[0]):
        _, name, start, _, _ = row
        if name.startswith(("forward ", "backward ")):
            yield start, next(expected)
        elif name.startswith("optimizer"):
            yield start, update


def _of_actions(layout: StepLayout, ranks: list[tuple[list[float], float]]) -> list[list[tuple[float, float]]]:
    """The same of every pipeline rank, where an action begins."""
    cost = layout.step.pipeline
    assert cost is not None
    by_action = [
        dict(zip(lane, during, strict=True)) for lane, (during, _) in zip(cost.order.lanes, ranks, strict=True)
    ]
    points: list[list[tuple[float, float]]] = [[] for _ in ranks]
    for timed in (layout.passes or cost.times()).actions:
        points[timed.rank].append((timed.start, by_action[timed.rank][timed.action]))
    for own, rows, (_, update) in zip(points, layout.rows, ranks, strict=True):
        own += [(row[2], update) for row in _computing(rows) if row[1].startswith("optimizer")]
        own.sort(key=lambda point: point[0])
    return points


def _computing(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row[0] == "compute"]
