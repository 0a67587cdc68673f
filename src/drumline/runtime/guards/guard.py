"""Guards of a run: non-finite numbers never reach the weights, and diverging replicas are detected.

Detecting a bad step is free: all ranks agree on loss and gradient norm anyway, and one bad number anywhere makes
both bad everywhere. Only then the ranks look for its origin.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ...core.errors import GaveUp, InputError, PlanError, StoppedByGuard, nearest
from ...datasets.stream import RankBatch
from ...plans import Plan
from ..core.agreement import raise_together
from ..core.engine_core import EngineCore
from .nonfinite import LOSS_ALONE, NonFiniteReport, diagnose
from .replicas import replica_mismatches

POLICIES = ("stop", "skip")


@dataclass(frozen=True, slots=True)
class Guards:
    """The guards of a run, and what they do."""

    nonfinite: str = "stop"
    """On a non-finite loss or gradient: `stop` the run, or `skip` the step. The weights stay unchanged."""
    patience: int = 5
    """Maximum number of consecutive skipped steps; one more stops the run."""
    vote: int = 0
    """Steps between comparisons of the replicas; 0 for none."""
    spike: float = 8.0
    """A loss this many standard deviations above the recent mean is reported as a spike; 0 for never."""

    def __post_init__(self) -> None:
        if self.nonfinite not in POLICIES:
            raise InputError(
                f"nonfinite={self.nonfinite}",
                rule=f"nonfinite is {' or '.join(POLICIES)}",
                fix=nearest(str(self.nonfinite), POLICIES),
            )
        for key, least in (("patience", 1), ("vote", 0)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{key}={value}", rule=f"{key} is a whole number of at least {least}")
        if not 0 <= self.spike < math.inf:
            raise InputError(f"spike={self.spike}", rule="spike is a number of at least 0")


class StepGuard:
    """The guards of one engine, with their state."""

    def __init__(self, guards: Guards, plan: Plan) -> None:
        if guards.nonfinite == "skip" and plan.compress == "powersgd":
            raise PlanError(
                "nonfinite=skip with compress=powersgd",
                where=f"plan {plan}",
                rule="PowerSGD's error feedback adds a bad gradient to all later ones: no later step would be finite",
                fix="nonfinite=stop, or compress=fp16",
            )
        if plan.keeps_batches_in_flight and (guards.nonfinite == "skip" or guards.vote):
            what = "nonfinite=skip" if guards.nonfinite == "skip" else f"vote={guards.vote}"
            raise PlanError(
                f"{what} with schedule={plan.schedule}",
                where=f"plan {plan}",
                rule="when a step ends, later ones are in flight: it cannot be undone, and ranks are at different ones",
                fix="nonfinite=stop and vote=0, or schedule=1f1b",
            )
        self.guards = guards
        self.skipped: list[NonFiniteReport] = []
        """Every skipped step, and why."""
        self.part_names: list[str] = []
        """Names of the parts of a split model on all ranks, once they were gathered."""
        self._skipped_in_a_row = 0
        self._stopped: StoppedByGuard | None = None
        """Error that stops this replica, stored until all ranks meet."""
        self._compared = 0
        """The step of the last comparison of replicas that step alone."""
        self._spikes = SpikeDetector(guards.spike)

    def is_finite(self, loss: float, norm: float) -> bool:
        """Whether a step may be applied; all ranks have both numbers and so the same answer."""
        if math.isfinite(loss) and math.isfinite(norm):
            self._skipped_in_a_row = 0
            return True
        return False

    def handle_nonfinite(self, engine: EngineCore, batch: RankBatch, loss: float, norm: float) -> NonFiniteReport:
        """Diagnose a non-finite step, then stop the run or let the step be skipped. Called on all ranks.

        A replica that steps alone is the only one to know: it skips the step, and the run stops where all ranks meet.
        """
        report = diagnose(engine, batch, loss, norm)
        self._skipped_in_a_row += 1
        if self.guards.nonfinite == "skip" and self._skipped_in_a_row <= self.guards.patience:
            self.skipped.append(report)
            return report
        alone = engine.strategy.steps_alone
        kept = "its replica did not apply this step" if alone else "the weights are those before this step"
        rule = f"the loss and the gradients must be finite; {kept}"
        fix = "--on-nonfinite skip, or Guards(nonfinite='skip'), skips such steps"
        if math.isnan(loss) and LOSS_ALONE in report.where:
            fix = f"if its targets may all be ignored (ignore_index), return (sum, weight) from the loss; {fix}"
        if self.guards.nonfinite == "skip":
            rule = f"at most patience={self.guards.patience} steps in a row are skipped"
            fix = "a lower learning rate, gradient clipping, or removing the samples named"
        error = StoppedByGuard(report.what, where=report.where, rule=rule, fix=fix)
        if not alone:
            raise error
        self._stopped = self._stopped or error  # the others do not know yet
        self.skipped.append(report)
        return report

    def at_meeting(self, engine: EngineCore) -> None:
        """Raise on all ranks what stops one of them, and compare replicas that were averaged, if that is due.

        Called where ranks that step alone meet. An error in a replica's weights before an average is in all of them
        afterwards: what differs then was not averaged, such as a frozen parameter, or changed after the average.
        """
        error, self._stopped = self._stopped, None
        raise_together(engine, error)
        if self.guards.vote and engine.strategy.replicas_equal and engine.position - self._compared >= self.guards.vote:
            self._compared = engine.position
            self._raise_mismatches(engine)

    def spike(self, loss: float) -> str:
        """A note on a finite loss far above the recent ones; usually empty."""
        return self._spikes.add(loss)

    def compares(self, steps: int) -> bool:
        """Whether the replicas are compared before the update after `steps` steps."""
        return bool(self.guards.vote) and (steps + 1) % self.guards.vote == 0

    def compare(self, engine: EngineCore) -> None:
        """Compare the replicas if it is due. Called on all ranks before the update, which would spread an error.

        Under zero=1 and 2 every update sends each element from the rank that updates it to all others, which repairs
        their copies: only vote=1 sees every error.
        """
        if self.compares(engine.steps) and not engine.strategy.steps_alone:
            self._raise_mismatches(engine)

    def _raise_mismatches(self, engine: EngineCore) -> None:
        mismatches = replica_mismatches(engine, self.part_names)
        if mismatches:
            more = f"; and {len(mismatches) - 4} more" if len(mismatches) > 4 else ""
            raise GaveUp(
                f"the replicas differ at step {engine.position}",
                where="; ".join(map(str, mismatches[:4])) + more,
                rule=f"replicas are equal bit for bit; they are compared every {self.guards.vote} steps",
                fix="resume from an older checkpoint, without that rank's device",
            )


class SpikeDetector:
    """Detects a loss far above the recent ones."""

    WINDOW, LEAST = 64, 16

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._recent: deque[float] = deque(maxlen=self.WINDOW)

    def add(self, loss: float) -> str:
        """Add a loss; a note if it is a spike, otherwise empty."""
        note = ""
        if self._limit and len(self._recent) >= self.LEAST and math.isfinite(loss):
            # plain floats: `statistics` computes with fractions, while a GPU waits
            mean = sum(self._recent) / len(self._recent)
            # a minimum spread: in a nearly constant loss not every small change is a spike
            least = 0.02 * abs(mean)
            if loss - mean > self._limit * least:  # nearly always it is not
                far = self._far(loss, mean, least)
                if far > self._limit:
                    note = f"loss spike: {loss:.4g} is {far:.1f} standard deviations above the last {len(self._recent)}"
        if math.isfinite(loss):
            self._recent.append(loss)
        return note

    def _far(self, loss: float, mean: float, least: float) -> float:
        """Standard deviations between a loss and the mean of the recent ones; one is at least `least`."""
        spread = math.sqrt(sum((x - mean) ** 2 for x in self._recent) / len(self._recent))
        deviation = max(spread, least)
        return (loss - mean) / deviation if deviation else 0.0
