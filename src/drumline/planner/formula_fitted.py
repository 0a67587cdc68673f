"""The words of `formula` where the fitted closed form prices a step: what each part adds up, with its numbers."""

from __future__ import annotations

from ..core.units import format_bytes, format_count, format_rate, format_seconds
from ..costs import Estimate
from ..costs.fitted import FittedSteps
from ..costs.fitted.plans import known, layouts_of, rows_of
from ..costs.fitted.stages import stages
from ..models.profile import Profile
from ..plans import Plan


class FittedWords:
    """The words of each part of one plan's step."""

    def __init__(self, profile: Profile, plan: Plan, e: Estimate, steps: FittedSteps) -> None:
        self._profile, self._plan, self._e, self._steps = profile, plan, e, steps
        rows = rows_of([known(plan)])
        self._layout = layouts_of(rows, profile.batch_size)
        self._times = steps.times(rows)
        held = stages(steps.model, self._layout)
        self._layers = int(held.inner[0] if plan.pp > 2 else held.first[0])
        self._weights = float(held.weights_per_rank[0])

    def of(self, part: str) -> str:
        """Of one part of the step."""
        plan, m = self._plan, self._plan.micro
        if part in ("forward", "backward"):
            return self._work(part)
        sent = self._e.parts["communication"]
        words = {
            "recompute": f"{m} micro-batches x the forward of what was not kept (recompute={plan.recompute})",
            "bubble": f"the other {plan.pp - 1} stages once, as far as {plan.schedule} in {plan.virtual} parts waits",
            "communication": f"what is waited for of messages: {format_seconds(sent)} of "
            f"{format_seconds(sent + self._e.hidden_seconds)}",
            "optimizer": f"{format_count(self._updated)} numbers, at {format_rate(self._rate)} of memory",
            "overhead": "between two steps, and what ranks wait for the slowest node",
        }
        return words.get(part, "")

    def sent(self) -> list[tuple[str, str, float]]:
        """(name, words, seconds) of the messages that the step waits for, by axis; they add up to communication."""
        plan, m = self._plan, self._plan.micro
        model, n = self._steps.model, float(self._layout.slice[0])
        wide = 2.0 * n * float(model.sequence[0]) / plan.cp * float(model.hidden[0])
        rings = 12 if plan.recompute == "full" else 8
        words = {
            "tp": f"{m} x {self._layers} layers x {rings} halves of an all-reduce of {format_bytes(wide)} over "
            f"{plan.tp} ranks",
            "cp": f"{m} x {self._layers} layers x keys and values round {plan.cp} ranks, less what attention hides",
            "pp": f"{m} x {2 * plan.virtual} messages of {format_bytes(wide / plan.tp)} between neighbours",
            "dp": f"{format_count(self._weights)} gradients of a rank x 4 bytes over {plan.dp} replicas"
            f"{', parameters gathered' if plan.zero else ''}, less what hides",
        }
        return [(k, w, v) for k, w in words.items() if (v := float(getattr(self._times, k)[0]))]

    def _work(self, phase: str) -> str:
        plan = self._plan
        took = self._e.parts[phase]
        work = self._profile.flops(phase).at(self._profile.batch_size) / plan.ranks
        return (
            f"{plan.micro} x {self._layers} layers of a stage, products + attention + passes of n = "
            f"{int(self._layout.slice[0])} samples: work {format_count(work, 'FLOP')} a rank at "
            f"{format_count(work / took, 'FLOP/s')}"
        )

    @property
    def _updated(self) -> float:
        return self._weights / (self._plan.shards if self._plan.zero else 1)

    @property
    def _rate(self) -> float:
        return float(self._steps.machine.bandwidth[0])
