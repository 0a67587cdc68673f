"""Prices plans of a transformer by the closed form that was fitted on published runs, in the place of `cost.Steps`.

Memory is what `Steps` counts, tensor by tensor. What the closed form has no price for (host memory, parts of layers,
stages by name) costs what it costs there, beside the same plan without it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...clusters import Cluster
from ...models.profile import Profile
from ...plans import Plan
from ..divided import Divided
from ..estimate import Estimate
from ..host import host_bytes, host_of
from ..memory import Memory
from ..step import Steps, largest_share, notes_of
from .chips import constants_for, machines_for, profile_for
from .counted import as_run
from .inputs import Array, Machines, Models
from .plans import Rows, known, layouts_of, rows_of
from .profiles import Profiles, load_profiles
from .quick import quick_bytes
from .step import StepTimes, step_times
from .transformer import transformer_of

PRECISIONS = ("bf16", "fp16")
"""What the published runs computed in, and the engine does too."""
TOGETHER = 64
"""Plans of a stream that are priced at once: somebody may not want to wait for all."""
_STEADY = ("1f1b", "interleaved", "zero-bubble")
"""Orders in which a rank's activations do not grow with the micro-batches."""
_SENT = ("tp", "cp", "ep", "pp", "dp")


def fitted_for(profile: Profile, cluster: Cluster, precision: str) -> FittedSteps | None:
    """The closed form for these, or None: another model, a chip without published runs, or machines that were measured.

    Where rates or collectives were measured, or runs corrected the predictions, that tells more than runs of others.
    """
    if precision not in PRECISIONS or cluster.measured or cluster.collective or cluster.corrections:
        return None
    if precision not in cluster.device.peak or cluster.device.kind != "cuda":
        return None
    model, profiles = transformer_of(profile), load_profiles()
    seen = profile_for(cluster, profiles)
    if model is None or seen is None or not seen.rows:
        return None
    return FittedSteps(profile, cluster, precision, model, profiles)


class FittedSteps:
    """Prices plans of one precision for a transformer on a cluster."""

    def __init__(self, profile: Profile, cluster: Cluster, precision: str, model: Models, profiles: Profiles) -> None:
        self._profile, self._cluster, self._precision = profile, cluster, precision
        self._model, self._profiles = model, profiles
        self._steps = Steps(profile, cluster, precision)
        self._short: dict[int, Steps] = {}
        self._machine = machines_for(cluster, precision)
        self._constants = as_run(constants_for(cluster, profiles), profile, model, cluster)

    @property
    def says(self) -> str:
        """Whose price it is, and how far off it was."""
        return (
            f"the closed form, fitted on {self._profiles.origin} (nine of ten within "
            f"{100 * self._profiles.error:.0f}%, each predicted without its source)"
        )

    @property
    def whole(self) -> bool:
        """Whether the memory of a whole space can be counted at once: the layers of a formula have known names."""
        return self._profile.origin == "formula"

    @property
    def model(self) -> Models:
        """The transformer, as one row."""
        return self._model

    @property
    def machine(self) -> Machines:
        """The devices and their links, as one row."""
        return self._machine

    def on_links_of(self, cluster: Cluster) -> FittedSteps:
        """The same for machines that differ in their links alone."""
        other = copy.copy(self)
        other._cluster, other._steps = cluster, self._steps.on_links_of(cluster)
        other._machine = machines_for(cluster, self._precision)
        return other

    def with_batches_of(self, samples: int) -> FittedSteps:
        """The same for another batch."""
        other = copy.copy(self)
        other._profile, other._steps = replace(self._profile, batch_size=samples), self._steps.with_batches_of(samples)
        return other

    @property
    def divided(self) -> Divided:
        """What knows the parts of plans that split the model."""
        return self._steps.divided

    def memory(self, plan: Plan) -> Memory:
        """The memory of a rank at the worst moment."""
        if plan.pp == 1 or plan.schedule not in _STEADY or plan.micro <= 2 * plan.pp:
            return self._steps.memory(plan)
        # from the second round on a rank holds what it held before, and as much as any other: fewer need to be played
        n, short = largest_share(self._profile.batch_size, plan), 2 * plan.pp
        batch = n * plan.shards * short
        if batch not in self._short:
            self._short[batch] = self._steps.with_batches_of(batch)
        found = self._short[batch].memory(replace(plan, dp=plan.shards, shard=0, micro=short))
        return replace(found, activations=found.activations + self._profile.input.at(n) * (plan.micro - short))

    def excess(self, plan: Plan) -> float:
        """Bytes that a plan needs beyond what there is."""
        return self.memory(plan).total - self._limit if plan.pp > 1 else self._steps.excess(plan)

    def fits(self, plan: Plan) -> bool:
        """Whether the memory suffices."""
        return self.excess(plan) <= 0

    @property
    def _limit(self) -> float:
        return max(0.0, self._cluster.device.memory - self._cluster.device.context)

    def times(self, rows: Rows) -> StepTimes:
        """Seconds of many plans at once."""
        one = np.zeros(len(rows.tp), dtype=np.intp)
        layouts = layouts_of(rows, self._profile.batch_size)
        return step_times(self._model.take(one), layouts, self._machine.take(one), self._constants)

    def quick_bytes(self, rows: Rows) -> Array:
        """Memory of many plans at once, within some percent of what `memory` counts."""
        layouts = layouts_of(rows, self._profile.batch_size)
        base = Plan(precision=self._precision)
        return quick_bytes(self._profile, self._model, rows, layouts, base, self.divided.local)

    def seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Of each plan."""
        if not plans:
            return []
        total = self.times(rows_of([known(p) for p in plans])).total
        return [float(s) + sum(self._beside(p).values()) for s, p in zip(total, plans, strict=True)]

    def estimate(self, plan: Plan) -> Estimate:
        """Time and memory of one step."""
        return next(self.estimates([plan]))

    def estimates(self, plans: Iterable[Plan]) -> Iterator[Estimate]:
        """The same of many, some at a time: their times are computed together."""
        left = iter(plans)
        while some := list(itertools.islice(left, TOGETHER)):
            times = self.times(rows_of([known(p) for p in some]))
            yield from (self._estimate(plan, times, i) for i, plan in enumerate(some))

    def _estimate(self, plan: Plan, times: StepTimes, i: int) -> Estimate:
        beside = self._beside(plan)
        parts = {k: max(0.0, v + beside.get(k, 0.0)) for k, v in parts_of(times, i).items()}
        if plan.pp == 1:
            del parts["bubble"]
        memory, device = self.memory(plan), self._cluster.device
        return Estimate(
            plan=str(plan),
            step_seconds=sum(parts.values()),
            parts=parts,
            memory_bytes=memory.total,
            memory_parts=memory.parts(),
            memory_limit=self._limit,
            hidden_seconds=float(times.hidden[i]),
            error=self._profiles.error,
            origin=self.origin,
            notes=self._notes(plan),
            host_bytes=host_bytes(self._profile, plan),
            host_limit=host_of(device).memory if plan.offload != "none" else 0.0,
        )

    @property
    def origin(self) -> str:
        """Where an estimate's numbers come from."""
        seen = profile_for(self._cluster, self._profiles)
        assert seen is not None
        return f"closed form, {seen.origin}; model: {self._profile.origin}"

    def _beside(self, plan: Plan) -> dict[str, float]:
        """Seconds by part that a plan takes beyond what the closed form knows of it."""
        plain = known(plan)
        if plain == plan:
            return {}
        mine, other = self._steps.estimate(plan).parts, self._steps.estimate(plain).parts
        return {k: mine.get(k, 0.0) - other.get(k, 0.0) for k in {**mine, **other}}

    def _notes(self, plan: Plan) -> tuple[str, ...]:
        notes = tuple(x for x in notes_of(plan, self._cluster) if not x.startswith("compile="))
        plain, table = known(plan).table(), plan.table()
        keys = [k for k, v in table.items() if plain.get(k) != v]
        more = f"{', '.join(keys)}: what that adds is counted from the data sheet, the closed form does not know it"
        return (*notes, more) if keys else notes


def parts_of(times: StepTimes, i: int) -> dict[str, float]:
    """One step's seconds by the parts of an `Estimate`."""
    own = {k: float(getattr(times, k)[i]) for k in ("forward", "backward", "recompute", "bubble")}
    sent = sum(float(getattr(times, k)[i]) for k in _SENT)
    return {**own, "communication": sent, "optimizer": float(times.optimizer[i]), "overhead": float(times.overhead[i])}
