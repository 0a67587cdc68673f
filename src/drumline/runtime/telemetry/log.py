"""The log of a run: turns what a rank reports of a step into a record with rates and drift, and into a line of text."""

from __future__ import annotations

import statistics
import textwrap
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...core.units import format_bytes, format_count, format_seconds
from ...costs.estimate import mfu_text, peak_of
from ...reports.prediction_error import short_time_words
from ...reports.step_records import StepRecord
from .recent import RecentStaleness, RecentWaits

if TYPE_CHECKING:
    from ...clusters import Cluster
    from ...costs import Estimate
    from ...models import Profile
    from ...plans import Plan

WINDOW = 20
"""Steps whose median is compared with the prediction and gives the remaining time."""
_SLOW = 1 / 0.75
"""A rank is slow if its own work takes longer than the fastest rank's by this factor."""
_NOTABLE = 1.01
"""Below this factor the slowest rank is as fast as the others."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run that are known before its first step."""

    steps: int
    ranks: int
    predicted: float | None = None
    """Predicted seconds per step."""
    work: float = 0.0
    """FLOPs per step that do not depend on the batch size."""
    work_per_sample: float = 0.0
    peak: float | None = None
    """Dense peak FLOP/s of one device in the plan's precision."""
    memory_limit: float | None = None
    """Bytes available to one rank."""

    @classmethod
    def of(cls, steps: int, plan: Plan, profile: Profile, cluster: Cluster, estimate: Estimate) -> RunFacts:
        """Build from the values that the run was planned with."""
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


class StepLog:
    """Makes step records from what the first rank reports."""

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self.predicted = facts.predicted
        """Updated if the machine is faster or slower now than when it was measured."""
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._warm = False
        """The first step loads kernels and allocates memory: it counts only until there is a second one."""
        self._memory = 0.0
        self._slowest: tuple[int, str, float] | None = None
        self._network: float | None = None
        self._staleness = RecentStaleness(WINDOW)
        self._waits = RecentWaits(WINDOW)

    def record(self, report: dict[str, Any]) -> StepRecord:
        """The record of one step, from the first rank's report."""
        f, seconds, samples = self.facts, report["seconds"], report["samples"]
        if not report.get("probed") or not self._seconds:  # the profiler slows its step
            if len(self._seconds) == 1 and not self._warm:
                self._seconds.clear()
                self._warm = True
            self._seconds.append(seconds)
        typical = statistics.median(self._seconds)
        self._memory = max(self._memory, report["memory_bytes"])
        self._slowest = report.get("slowest") or self._slowest
        self._network = report.get("network_share", self._network)
        tokens, data = report.get("tokens", 0), report.get("data_seconds", 0.0)
        rank, phase, factor = self._slowest or (None, "", None)
        stale, waited = tuple(report.get("staleness", ())), tuple(report.get("wait_seconds", ()))
        self._waits.add(report["step"], waited, seconds + data, report.get("elapsed"))
        whole = seconds + data
        tflops = (f.work + f.work_per_sample * samples) / f.ranks / whole if f.work_per_sample and seconds else None
        return StepRecord(
            report["step"],
            report["loss"],
            report["grad_norm"],
            seconds,
            samples,
            memory_bytes=self._memory,
            memory_share=self._memory / f.memory_limit if f.memory_limit and self._memory else None,
            samples_per_second=samples / whole / f.ranks if seconds else 0.0,
            tokens_per_second=tokens / whole / f.ranks if tokens and seconds else None,
            tflops=tflops / 1e12 if tflops else None,
            mfu=tflops / f.peak if tflops and f.peak else None,
            predicted_seconds=self.predicted,
            drift=typical / self.predicted - 1 if self.predicted else None,
            eta_seconds=max(0, f.steps - report["step"] - 1) * (typical + data),
            data_share=data / (data + seconds) if data + seconds else 0.0,
            slowest_rank=rank,
            slowest_phase=phase,
            slowest_factor=factor,
            skipped=report.get("skipped", 0),
            checkpoint_age=report.get("checkpoint_age"),
            note=report.get("note", ""),
            staleness=stale,
            wait_seconds=tuple(round(w, 6) for w in waited),
            worker=report.get("worker"),
            dropped=report.get("dropped", 0),
            elapsed=report.get("elapsed"),
            mean_staleness=self._staleness.add(stale),
            wait_share=self._waits.share,
            longest_wait_rank=self._waits.longest_rank,
            longest_wait_share=self._waits.longest_share,
            network_share=self._network,
        )


def step_fields(r: StepRecord, steps: int) -> list[str]:
    """The fields of a log line, most important first."""
    fields = [f"step {r.step + 1}/{steps}", f"loss {r.loss:.4f}", f"grad {r.grad_norm:.3f}"]
    predicted = f" (predicted {format_seconds(r.predicted_seconds)}" if r.predicted_seconds else ""
    recent = f", recent steps {short_time_words(1 / (1 + r.drift) - 1)}" if r.drift is not None else ""
    fields.append(format_seconds(r.seconds) + (f"{predicted}{recent})" if predicted else ""))
    fields.append(f"all ranks: {', '.join(_rates_of_all_ranks(r))}")
    if r.memory_bytes:
        share = f" ({100 * r.memory_share:.0f}%)" if r.memory_share is not None else ""
        fields.append(format_bytes(r.memory_bytes) + share)
    if r.tflops is not None:
        fields.append(f"per device: {format_count(r.tflops * 1e12, 'FLOP/s')}, {mfu_text(r.mfu)}")
    else:
        fields.append(mfu_text(r.mfu))
    fields += [f"eta {format_seconds(r.eta_seconds)}", f"data {100 * r.data_share:.0f}%"]
    if r.slowest_rank is not None and r.slowest_factor is not None and r.slowest_factor >= _NOTABLE:
        slow = "slow" if r.slowest_factor > _SLOW else "slowest"
        fields.append(f"{slow} rank {r.slowest_rank} ({r.slowest_phase} {r.slowest_factor:.2f}x)")
    if r.network_share is not None:
        fields.append(f"network {_share(r.network_share)}")
    if r.wait_share is not None:
        rank = r.longest_wait_rank
        longest = "" if rank is None else f" (rank {rank} {_share(r.longest_wait_share)})"
        fields.append(f"wait {_share(r.wait_share)}{longest}")
    if r.mean_staleness is not None:
        fields.append(f"stale {r.mean_staleness:.1f}")
    if r.worker is not None:
        fields.append(f"worker {r.worker}")
    if r.dropped:
        fields.append(f"dropped {r.dropped}")
    if r.skipped:
        fields.append(f"skipped {r.skipped}")
    if r.checkpoint_age is not None:
        fields.append(f"checkpoint {format_seconds(r.checkpoint_age)} ago")
    return fields


def _rates_of_all_ranks(r: StepRecord) -> list[str]:
    """Tokens and samples per second, with the wait for data; the record has them per device."""
    samples = r.samples / r.seconds * (1 - r.data_share) if r.seconds else 0.0
    words = [f"{samples:.{0 if samples >= 10 else 2}f} samples/s"]
    if r.tokens_per_second is not None and r.samples_per_second:
        tokens = r.tokens_per_second * samples / r.samples_per_second
        words.insert(0, f"{tokens:.{0 if tokens >= 10 else 2}f} tokens/s")
    return words


def _share(share: float | None) -> str:
    return "N/A" if share is None else f"{100 * share:.0f}%"


def wrap_fields(fields: Iterable[str], width: int) -> str:
    """Wrap fields to a width; later lines are indented. Only fields that are too long are broken."""
    lines: list[str] = []
    parts = (part for field in fields for part in (textwrap.wrap(field, max(8, width - 2)) or [""]))
    for field in parts:
        if lines and len(lines[-1]) + 2 + len(field) <= width:
            lines[-1] += "  " + field
        else:
            lines.append(field if not lines else "  " + field)
    return "\n".join(lines)


def fit_fields(fields: Iterable[str], width: int) -> str:
    """As many fields as fit into one line."""
    line = ""
    for field in fields:
        longer = f"{line}  {field}" if line else field
        if len(longer) > width:
            break
        line = longer
    return line
