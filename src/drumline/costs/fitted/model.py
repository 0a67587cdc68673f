"""`FittedCostModel`: prices plans of a transformer with constants fitted on published runs.

Memory is that of the operator model. Keys that the fit does not cover (offload, chunk, split by name) cost the
difference that the operator model sees between the plan with and without them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...clusters import Cluster, StepTimeDistribution
from ...models.profile import Profile
from ...plans import Plan
from ...plans.sync_caveats import most_delay
from ...theory.order_statistics import expected_largest
from ..asynchronous import price_workers, workers_estimate
from ..estimate import Estimate
from ..layer_time import largest_micro_batch
from ..memory import PeakMemory
from ..model import CostModel, TimeTerm, plan_notes
from ..operator_model import OperatorCostModel
from ..optimizer_update import host_bytes, host_memory
from ..plan_columns import Array, PlanColumns, PlanScores
from ..rank_model import RankModel
from ..straggling import WAITED_FOR, of_stages, with_stragglers
from ..worker_times import TaskCompute, WorkerTimes, worker_times
from .approximate_memory import approximate_bytes
from .approximate_stragglers import approximate_slowdown
from .constants_file import FittedConstants, load_constants
from .contention import layout_contention
from .devices import adapt_to_engine, constants_for, device_constants_for, machine_for
from .engine_layouts import covered_part, engine_layouts
from .formula import time_terms
from .inputs import LayoutColumns, ModelColumns
from .step import StepTimes, step_times
from .transformer import transformer_of

PRECISIONS = ("bf16", "fp16")
"""Precisions of the published runs that the engine runs as well."""
BATCHED = 64
"""Plans of an iterator that are priced together; few enough to stop early."""
_BOUNDED = ("1f1b", "interleaved", "zero-bubble")
"""Schedules whose activations do not grow with the number of micro-batches."""
_COMMUNICATION = ("tp", "cp", "ep", "pp", "dp")


def fitted_model(profile: Profile, cluster: Cluster, precision: str) -> FittedCostModel | None:
    """The fitted model for a profile on a cluster, or None where the operator model knows more.

    That is: for other models, for chips without published runs, and where rates, collectives or runs were measured.
    """
    if precision not in PRECISIONS or cluster.measured or cluster.collective or cluster.corrections:
        return None
    if precision not in cluster.device.peak or cluster.device.kind != "cuda":
        return None
    model, fitted = transformer_of(profile), load_constants()
    device = device_constants_for(cluster, fitted)
    if model is None or device is None or not device.rows:
        return None
    return FittedCostModel(profile, cluster, precision, model, fitted)


class FittedCostModel(CostModel):
    """Prices plans of one precision for a transformer on a cluster."""

    def __init__(
        self, profile: Profile, cluster: Cluster, precision: str, model: ModelColumns, fitted: FittedConstants
    ) -> None:
        self._profile, self._cluster, self._precision = profile, cluster, precision
        self._model, self._fitted = model, fitted
        self._operators = OperatorCostModel(profile, _even(cluster), precision)
        self._shorter: dict[int, OperatorCostModel] = {}
        self._machine = machine_for(cluster, precision)
        self._constants = adapt_to_engine(constants_for(cluster, fitted), profile, model, cluster)

    @property
    def source(self) -> str:
        """The published runs, and the error on them."""
        return (
            f"the cost model fitted on {self._fitted.origin} (90% within {100 * self._fitted.error:.0f}%, "
            "each with its source left out)"
        )

    @property
    def error(self) -> float:
        """Of nine in ten published times, each with its source left out."""
        return self._fitted.error

    @property
    def scores_whole_space(self) -> bool:
        """Whether the layers have the names of the zoo, by which memory is counted for all plans at once."""
        return self._profile.origin == "formula"

    def on_links_of(self, cluster: Cluster) -> FittedCostModel:
        """The same model for a cluster that differs in its links alone."""
        other = copy.copy(self)
        other._cluster, other._operators = cluster, self._operators.on_links_of(_even(cluster))
        other._machine = machine_for(cluster, self._precision)
        return other

    def with_batch_size(self, samples: int) -> FittedCostModel:
        """The same model for another batch size."""
        other = copy.copy(self)
        other._profile = replace(self._profile, batch_size=samples)
        other._operators = self._operators.with_batch_size(samples)
        return other

    def rank_model(self, plan: Plan) -> RankModel:
        """The part of the model on one rank."""
        return self._operators.rank_model(plan)

    def memory(self, plan: Plan) -> PeakMemory:
        """Peak memory of the fullest rank."""
        if plan.pp == 1 or plan.schedule not in _BOUNDED or plan.micro <= 2 * plan.pp:
            return self._operators.memory(plan)
        # from the second round of micro-batches on the activations are the same, so two rounds are enough to play
        n, micro = largest_micro_batch(self._profile.batch_size, plan), 2 * plan.pp
        batch = n * plan.shards * micro
        if batch not in self._shorter:
            self._shorter[batch] = self._operators.with_batch_size(batch)
        memory = self._shorter[batch].memory(replace(plan, dp=plan.shards, shard=0, micro=micro))
        return replace(memory, activations=memory.activations + self._profile.input.at(n) * (plan.micro - micro))

    def excess(self, plan: Plan) -> float:
        """Bytes that a plan needs beyond the memory of the device or its host."""
        return self.memory(plan).total - self._memory_limit if plan.pp > 1 else self._operators.excess(plan)

    @property
    def _memory_limit(self) -> float:
        return max(0.0, self._cluster.device.memory - self._cluster.device.context)

    def _layouts(self, plans: PlanColumns) -> LayoutColumns:
        return engine_layouts(plans, self._profile.batch_size, float(self._model.sequence[0]))

    def times(self, plans: PlanColumns) -> StepTimes:
        """Seconds of many plans at once, by part."""
        rows = np.zeros(len(plans.tp), dtype=np.intp)
        layouts = self._layouts(plans)
        contention = layout_contention(layouts, self._cluster)
        return step_times(self._model.take(rows), layouts, self._machine.take(rows), self._constants, contention)

    def score(self, plans: PlanColumns) -> PlanScores:
        """Step time of many plans at once, and their memory to within a few percent."""
        layouts, base = (
            engine_layouts(plans, self._profile.batch_size, float(self._model.sequence[0])),
            Plan(precision=self._precision),
        )
        sizes = approximate_bytes(self._profile, self._model, plans, layouts, base, self.rank_model)
        return PlanScores(self._total(self.times(plans), plans), sizes)

    def _total(self, times: StepTimes, plans: PlanColumns) -> Array:
        """Step time of many plans, with about the time for which ranks wait for the slowest."""
        spread = self._cluster.step_times
        if not spread:
            return times.total
        more = np.zeros(len(plans.tp))
        shapes, rows = np.unique(np.stack((plans.ranks, plans.pp)).astype(int), axis=1, return_inverse=True)
        for i, (ranks, pp) in enumerate(shapes.T):
            own = np.flatnonzero(rows.reshape(-1) == i)
            factors = spread.factors(int(ranks))
            stages = [expected_largest(x, spread.jitter) for x in of_stages(factors, int(pp))]
            everyone = expected_largest(factors, spread.jitter)
            more[own] = approximate_slowdown(stages, everyone, plans.micro[own]) - 1.0
        return np.asarray(times.total + more * sum(getattr(times, name) for name in WAITED_FOR), dtype=np.float64)

    def seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Step time of each plan."""
        if not plans:
            return []
        if self._cluster.step_times:
            return [e.step_seconds for e in self.estimates(plans)]
        times = self.times(PlanColumns.from_plans([covered_part(p) for p in plans]))
        rows = zip(times.total, times.bubble, plans, strict=True)
        return [
            float(s) + sum(self._uncovered(p, float(bubble)).values())
            if p.sync == "allreduce"
            else price_workers(p, self.worker_times(p), self._cluster).step_seconds
            for s, bubble, p in rows
        ]

    def worker_times(self, plan: Plan) -> WorkerTimes:
        """One worker's task: the compute of a replica with as many samples."""
        samples = self._profile.batch_size * plan.dp // plan.slices
        times = self.with_batch_size(samples).times(PlanColumns.from_plans([covered_part(plan)]))
        parts = parts_of(times, 0)
        compute = TaskCompute(*(parts[k] for k in ("forward", "backward", "recompute", "overhead", "optimizer")))
        return worker_times(self._profile, plan, self._cluster, compute)

    def estimate(self, plan: Plan) -> Estimate:
        """Time and memory of one step."""
        return next(self.estimates([plan]))

    def estimates(self, plans: Iterable[Plan]) -> Iterator[Estimate]:
        """Estimates of many plans; the times of BATCHED plans are computed together."""
        left = iter(plans)
        while batch := list(itertools.islice(left, BATCHED)):
            times = self.times(PlanColumns.from_plans([covered_part(p) for p in batch]))
            yield from (self._estimate(plan, times, i) for i, plan in enumerate(batch))

    def _estimate(self, plan: Plan, times: StepTimes, i: int) -> Estimate:
        if plan.sync != "allreduce":
            price = price_workers(plan, self.worker_times(plan), self._cluster)
            origin, error, memory = self._origin, self._fitted.error, self.memory(plan)
            return workers_estimate(plan, price, self._profile, self._cluster, memory, error=error, origin=origin)
        uncovered = self._uncovered(plan, float(times.bubble[i]))
        parts = {k: max(0.0, v + uncovered.get(k, 0.0)) for k, v in parts_of(times, i).items()}
        if plan.pp == 1:
            del parts["bubble"]
        memory, device = self.memory(plan), self._cluster.device
        even = Estimate(
            plan=str(plan),
            step_seconds=sum(parts.values()),
            parts=parts,
            memory_bytes=memory.total,
            memory_parts=memory.parts(),
            memory_limit=self._memory_limit,
            hidden_seconds=float(times.hidden[i]),
            error=self._fitted.error,
            origin=self._origin,
            notes=self._notes(plan),
            staleness=float(most_delay(plan)),
            host_bytes=host_bytes(self._profile, plan),
            host_limit=host_memory(device).memory if plan.offload != "none" else 0.0,
        )
        spread = self._cluster.step_times
        return with_stragglers(even, self._operators.step(plan), spread) if spread else even

    @property
    def _origin(self) -> str:
        """Origin of the numbers of an estimate."""
        device = device_constants_for(self._cluster, self._fitted)
        assert device is not None
        return f"closed form, {device.origin}; model: {self._profile.origin}"

    def _uncovered(self, plan: Plan, bubble: float) -> dict[str, float]:
        """Seconds by part of the keys that the fit does not cover; `bubble` is that of the covered part."""
        covered = covered_part(plan)
        if covered == plan:
            return {}
        mine, other = self._operators.estimate(plan).parts, self._operators.estimate(covered).parts
        parts = {k: mine.get(k, 0.0) - other.get(k, 0.0) for k in {**mine, **other}}
        if plan.keeps_batches_in_flight:  # it has no bubble but that of unequal stages and slow messages
            parts["bubble"] = mine["bubble"] - bubble
        return parts

    def _notes(self, plan: Plan) -> tuple[str, ...]:
        notes = tuple(x for x in plan_notes(plan, self._cluster) if not x.startswith("compile="))
        covered, table = covered_part(plan).table(), plan.table()
        keys = [k for k, v in table.items() if covered.get(k) != v]
        extra = f"{', '.join(keys)}: not covered by the fitted model, priced from the data sheet"
        return (*notes, extra) if keys else notes

    def time_terms(self, plan: Plan, estimate: Estimate) -> list[TimeTerm] | None:
        """The formula of each part of an estimate of this model; None for an estimate of another model."""
        if estimate.origin != self._origin:
            return None
        columns = PlanColumns.from_plans([covered_part(plan)])
        return time_terms(
            self._profile,
            plan,
            estimate,
            model=self._model,
            layout=self._layouts(columns),
            times=self.times(columns),
            bandwidth=float(self._machine.bandwidth[0]),
        )


def _even(cluster: Cluster) -> Cluster:
    return replace(cluster, step_times=StepTimeDistribution())


def parts_of(times: StepTimes, i: int) -> dict[str, float]:
    """Seconds of one step by the parts of an `Estimate`."""
    own = {k: float(getattr(times, k)[i]) for k in ("forward", "backward", "recompute", "bubble")}
    sent = sum(float(getattr(times, k)[i]) for k in _COMMUNICATION)
    return {**own, "communication": sent, "optimizer": float(times.optimizer[i]), "overhead": float(times.overhead[i])}
