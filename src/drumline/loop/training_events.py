"""Events that the ranks of a training report: steps to the log, the sinks and the screen, and the speed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .training import RankReports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.errors import RankFailed
    from ..plans import Plan
    from ..reports import StepRecord
    from ..runtime.telemetry.log import StepLog
    from ..runtime.telemetry.sinks import Sink
    from .forecast import Forecast
    from .train import TrainObserver


class GradientCounts:
    """Gradients of workers by outcome, over all parameter servers of a run."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self._seen = {"dropped": 0, "lost": 0}
        self._server = ""
        """The process that counts."""

    def add(self, record: StepRecord, event: dict[str, Any], undone: Sequence[StepRecord]) -> None:
        """Count one more update; `undone` are those that a server that failed had made, and that are made again."""
        self.totals = self.totals or dict.fromkeys(("applied", "dropped", "lost", "repeated"), 0)
        if event["server"] != self._server:  # a new server counts from 0
            self._server, self._seen = event["server"], dict.fromkeys(self._seen, 0)
        self.totals["applied"] += len(record.staleness) - sum(len(r.staleness) for r in undone)
        self.totals["repeated"] += len(undone)
        for key, before in self._seen.items():
            self.totals[key] += event[key] - before
            self._seen[key] = event[key]


class TrainingEvents:
    """Receives the events of the ranks. After a restart, steps that run again replace their earlier records."""

    def __init__(
        self,
        forecast: Forecast,
        steps: int,
        sinks: Sequence[Sink],
        observer: TrainObserver,
        *,
        earlier: Sequence[StepRecord] = (),
    ) -> None:
        self._forecast, self._steps, self._sinks = forecast, steps, sinks
        self.observer = observer
        self.records: list[StepRecord] = []
        self.steps_done = 0
        """The most steps that were done in any attempt."""
        self.faults: list[str] = []
        """The faults that were survived."""
        self.gradients = GradientCounts()
        self._speed: float | None = None
        self._clock = _RunClock(next((r.elapsed for r in reversed(earlier) if r.elapsed is not None), 0.0))
        self._log = self._new_log(forecast.plan)

    def begin(self, plan: Plan) -> None:
        """An attempt begins, under the plan of the run or, while ranks are lost, under a smaller one."""
        self._clock.new_attempt()
        self._log = self._new_log(plan)

    def _new_log(self, plan: Plan) -> StepLog:
        from ..costs import estimate
        from ..runtime.telemetry.log import RunFacts, StepLog

        f = self._forecast
        predicted = f.estimate if plan == f.plan else estimate(f.profile, plan, f.cluster)
        if self._speed is not None:
            predicted = predicted.at_speed(self._speed)
        return StepLog(RunFacts.of(self._steps, plan, f.profile, f.cluster, predicted))

    def __call__(self, rank: int, event: dict[str, Any]) -> None:
        """One event of a rank."""
        if "message" in event:
            self.observer.note(event["message"])
        elif (speed := self._forecast.speed_of(event)) is not None:
            self._speed = speed
            self._log.predicted = self._log.predicted / speed if self._log.predicted else None
            self.observer.note(_speed_note(event, speed, self._log.predicted))
        else:
            self._step(event)

    def _step(self, event: dict[str, Any]) -> None:
        record = self._log.record({**event, "elapsed": self._clock.at(event.get("elapsed"))})
        undone = []
        while self.records and self.records[-1].step >= record.step:
            undone.append(self.records.pop())
        if "lost" in event:
            self.gradients.add(record, event, undone)
        self.records.append(record)
        self.steps_done = max(self.steps_done, record.step + 1)
        for sink in self._sinks:
            sink.write(record)
        self.observer.step(record, profiled=event["probed"])

    def explain(self, error: RankFailed) -> RankFailed:
        """Add predicted and used memory to an error for lack of memory."""
        if error.kind != "memory":
            return error
        from ..core.units import format_bytes

        e = self._forecast.estimate
        used = max((r.memory_bytes for r in self.records), default=0.0)
        error.rule = f"predicted {format_bytes(e.memory_bytes)} a rank of {format_bytes(e.memory_limit)}"
        error.rule += f"; live tensors reached {format_bytes(used)}" if used else "; no step was measured"
        error.fix = "a smaller batch, micro=N, recompute=full or zero=3: drumline plan JOB lists what fits"
        return error

    def reports(self, results: list[dict[str, Any]]) -> RankReports:
        """All reports of the ranks."""
        return RankReports(self.records, results, self._speed, tuple(self.faults), self.gradients.totals)

    def close(self) -> None:
        """The ranks have ended."""
        self.observer.close()
        for sink in self._sinks:
            sink.close()


class _RunClock:
    """Seconds since the first step of a run began, through its restarts; a resumed run goes on from `before`."""

    def __init__(self, before: float) -> None:
        self._before = before
        self._start: float | None = None
        """When the first step of the first attempt began."""
        self._lost: float | None = None
        """Seconds from then until the first step of this attempt; None until it has reported one."""

    def new_attempt(self) -> None:
        """The ranks are started again, and count from 0 again."""
        self._lost = None

    def at(self, seconds: float | None) -> float:
        """The time of a report that came `seconds` after the first step of its attempt, or now."""
        now = time.monotonic()
        if self._start is None:
            self._start = now - (seconds or 0.0)
        if seconds is None:
            return self._before + now - self._start
        if self._lost is None:
            self._lost = now - seconds - self._start
        return self._before + self._lost + seconds


def _speed_note(event: dict[str, Any], speed: float, predicted: float | None) -> str:
    from ..core.units import format_seconds

    now = f"; predicted {format_seconds(predicted)} a step" if predicted else ""
    if "pace" in event:
        return f"the GPU's host now takes {event['pace']:.2f} times as long as when it was measured{now}"
    return f"the machine now runs at {speed:.2f} of its measured speed{now}"
