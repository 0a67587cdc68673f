"""Timeline and memory of one step of a pipeline that does not drain, in which batches are in flight before and after.

Torch's profiler cannot be used: messages that begin under it and end after it corrupt its memory. So the timeline is
the engine's own record of the step; on a CPU, live tensors are counted operator by operator from the first step on.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from ...core.timeline import Span
from ...tracing.op_costs import tensors
from ..dry_run.live_memory import LiveMemory, storage_bytes
from ..engine import Engine


class FlightRecorder:
    """Records one step on one rank, when the pipeline is full."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._memory = LiveMemory("cpu") if engine.device.type == "cpu" else None
        self._entered = ExitStack()
        self.began = None
        """With batches in flight, ranks are in different steps."""
        self.spans: list[Span] = []
        self.peak_bytes = 0.0
        self.parts: dict[str, float] = {}
        self._gradients = 0.0

    @property
    def warm_up(self) -> int:
        """Steps until the pipeline is full."""
        return self._engine.plan.pp

    def begin(self) -> None:
        """Before the first step."""
        if self._memory is not None:
            self._entered.enter_context(self._memory)
            self._memory.include(self._resident())

    def run(self, batch: Any) -> None:
        """Run and record one engine step."""
        engine = self._engine
        if self._memory is not None:
            self._memory.include([*self._resident(), *(t for m in batch.micros for t in tensors((m.input, m.target)))])
            self._memory.start()
        else:
            torch.cuda.reset_peak_memory_stats()
        engine.gradients_ready = self._measure_gradients  # type: ignore[method-assign]  # this is what it is for
        try:
            engine.step(batch)
        finally:
            del engine.gradients_ready
            self._entered.close()
        peak = torch.cuda.max_memory_allocated() if self._memory is None else self._memory.peak
        self._memory = None
        self.peak_bytes = float(peak)
        kind = engine.device.type
        older = engine.in_flight.stages.versions.older() if engine.in_flight is not None else []
        weights = [*engine.model.parameters(), *engine.model.buffers(), *older]
        states = (t for t in engine.update_state() if t.dim() > 0)
        self.parts = {
            "parameters": float(storage_bytes(weights, kind)),
            "gradients": self._gradients,
            "optimizer": float(storage_bytes(states, kind)),
        }
        self.parts["activations"] = max(0.0, self.peak_bytes - sum(self.parts.values()))
        self.spans = engine.record.spans()

    def end(self) -> None:
        """Stop counting; after a run that failed, too."""
        self._entered.close()

    def _resident(self) -> list[Any]:
        engine = self._engine
        return [*engine.model.parameters(), *engine.model.buffers(), *engine.update_state()]

    def _measure_gradients(self) -> None:
        gradients = [g for _, g in self._engine.update.gradients()]
        self._gradients = float(storage_bytes(gradients, self._engine.device.type))
