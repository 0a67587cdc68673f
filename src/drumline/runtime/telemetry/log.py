"""The log of a run: what a rank tells of a step becomes a record with rates and drift, and a line for a person."""

from __future__ import annotations

import statistics
import textwrap
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...core.units import format_bytes, format_count, format_percent, format_seconds
from ...reports.steps import StepRecord

if TYPE_CHECKING:
    from ...clusters import Cluster
    from ...costs import Estimate
    from ...models import Profile
    from ...plans import Plan

WINDOW = 20
"""Steps whose median is compared with the prediction, and gives the time to go."""
_SLOW = 1 / 0.75
"""A rank is called slow when its own work takes that many times as long as the fastest rank's."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run before its first step."""

    steps: int
    ranks: int
    predicted: float | None = None
    """Seconds a step."""
    work: float = 0.0
    """Operations of the model a step that do not depend on its samples."""
    work_per_sample: float = 0.0
    peak: float | None = None
    """Operations a second of one device, dense, in the precision of the plan."""
    memory_limit: float | None = None
    """Bytes that one rank may use."""

    @classmethod
    def of(cls, steps: int, plan: Plan, profile: Profile, cluster: Cluster, estimate: Estimate) -> Facts:
        """From the values that a run is planned with."""
        work = profile.flops()
        return cls(
            steps,
            plan.ranks,
            estimate.step_seconds,
            work.fixed,
            work.per_sample,
            peak_of(cluster, plan.precision),
            estimate.memory_limit,
        )


def peak_of(cluster: Cluster, precision: str) -> float | None:
    """The dense peak of a device in a precision; None where the cluster does not say it, rather than a guess."""
    return cluster.device.peak.get("bf16" if precision == "bf16-pure" else precision)


class Log:
    """Makes records of what the ranks tell."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.predicted = facts.predicted
        """Changes when the machine turns out to be faster or slower than when it was measured."""
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._warm = False
        """The first step loads kernels and makes memory: it counts until there is another."""
        self._memory = 0.0
        self._slowest: tuple[int, str, float] | None = None

    def record(self, told: dict[str, Any]) -> StepRecord:
        """One step, from what the first rank told of it."""
        f, seconds, samples = self.facts, told["seconds"], told["samples"]
        if not told.get("probed") or not self._seconds:  # the profiler slows the step that it looks at
            if len(self._seconds) == 1 and not self._warm:
                self._seconds.clear()
                self._warm = True
            self._seconds.append(seconds)
        usual = statistics.median(self._seconds)
        self._memory = max(self._memory, told["memory_bytes"])
        self._slowest = told.get("slowest") or self._slowest
        tokens, data = told.get("tokens", 0), told.get("data_seconds", 0.0)
        rank, phase, factor = self._slowest or (None, "", None)
        tflops = (f.work + f.work_per_sample * samples) / f.ranks / seconds if f.work_per_sample and seconds else None
        return StepRecord(
            told["step"],
            told["loss"],
            told["grad_norm"],
            seconds,
            samples,
            memory_bytes=self._memory,
            memory_share=self._memory / f.memory_limit if f.memory_limit and self._memory else None,
            samples_per_second=samples / seconds / f.ranks if seconds else 0.0,
            tokens_per_second=tokens / seconds / f.ranks if tokens and seconds else None,
            tflops=tflops / 1e12 if tflops else None,
            mfu=tflops / f.peak if tflops and f.peak else None,
            predicted_seconds=self.predicted,
            drift=usual / self.predicted - 1 if self.predicted else None,
            eta_seconds=max(0, f.steps - told["step"] - 1) * (usual + data),
            data_share=data / (data + seconds) if data + seconds else 0.0,
            slowest_rank=rank,
            slowest_phase=phase,
            slowest_factor=factor,
            skipped=told.get("skipped", 0),
            checkpoint_age=told.get("checkpoint_age"),
            note=told.get("note", ""),
        )


def words(r: StepRecord, steps: int) -> list[str]:
    """The fields of a line for a person, the more important ones first."""
    found = [f"step {r.step + 1}/{steps}", f"loss {r.loss:.4f}", f"grad {r.grad_norm:.3f}"]
    predicted = f" (predicted {format_seconds(r.predicted_seconds)}" if r.predicted_seconds else ""
    drift = f", drift {format_percent(r.drift)})" if r.drift is not None else ")" if predicted else ""
    found.append(format_seconds(r.seconds) + predicted + drift)
    if r.tokens_per_second is not None:
        found.append(f"{r.tokens_per_second:.0f} tokens/s")
    found.append(f"{r.samples_per_second:.{0 if r.samples_per_second >= 10 else 2}f} samples/s")
    if r.memory_bytes:
        share = f" ({100 * r.memory_share:.0f}%)" if r.memory_share is not None else ""
        found.append(format_bytes(r.memory_bytes) + share)
    if r.tflops is not None:
        found.append(format_count(r.tflops * 1e12, "FLOP/s"))
    found.append(f"mfu {100 * r.mfu:.1f}%" if r.mfu is not None else "mfu N/A")
    found += [f"eta {format_seconds(r.eta_seconds)}", f"data {100 * r.data_share:.0f}%"]
    if r.slowest_rank is not None and r.slowest_factor is not None:
        slow = "slow" if r.slowest_factor > _SLOW else "slowest"
        found.append(f"{slow} rank {r.slowest_rank} ({r.slowest_phase} {r.slowest_factor:.2f}x)")
    if r.skipped:
        found.append(f"skipped {r.skipped}")
    if r.checkpoint_age is not None:
        found.append(f"checkpoint {format_seconds(r.checkpoint_age)} ago")
    return found


def fold(fields: Iterable[str], width: int) -> str:
    """The fields in as few lines as the width allows; later lines are indented. Only what is too long is broken."""
    lines: list[str] = []
    short = (part for field in fields for part in (textwrap.wrap(field, max(8, width - 2)) or [""]))
    for field in short:
        if lines and len(lines[-1]) + 2 + len(field) <= width:
            lines[-1] += "  " + field
        else:
            lines.append(field if not lines else "  " + field)
    return "\n".join(lines)


def fit(fields: Iterable[str], width: int) -> str:
    """As many of the fields as stand in one line."""
    line = ""
    for field in fields:
        longer = f"{line}  {field}" if line else field
        if len(longer) > width:
            break
        line = longer
    return line
