"""Runs one step under torch's profiler: the measured timeline, and the peak of live memory with its known parts.

All other steps run without it, so the measured step time does not include its cost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ...torchkit.ddp import bucket_bytes

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs to stderr

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ...comm.hosts import host_id
from ...core.timeline import Span
from ...tracing.layers import layers_of
from ...tracing.op_costs import tensors
from ..engine import Engine

_PHASES = ("communication", "optimizer")


class StepProfiler:
    """Timeline and memory of one step on one rank."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.seconds = 0.0
        self.began: tuple[str, float] | None = None
        """The host and its clock when the step began."""
        self.spans: list[Span] = []
        self.peak_bytes = 0.0
        self.parts: dict[str, float] = {}
        self._marks: list[tuple[str, float]] = []
        self._gradients = 0.0

    warm_up = 2
    """Steps before the one that is profiled: they load kernels and allocate memory."""

    def begin(self) -> None:
        """Before the first step."""

    def end(self) -> None:
        """After the last step."""

    def run(self, batch: Any) -> None:
        """Run one engine step under the profiler."""
        engine = self._engine
        cuda = engine.device.type == "cuda"
        resident = self._resident_bytes(batch)
        self._marks.clear()  # of a step that did not end, because a server was gone
        hooks = self._hook_layers()
        engine.gradients_ready = self._measure_gradients  # type: ignore[method-assign]  # this is what it is for
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        try:
            with profile(activities=activities, profile_memory=not cuda, acc_events=True) as profiler:
                start = time.perf_counter()
                with torch.profiler.record_function("drumline:step"):
                    engine.step(batch)
                self.began = host_id(), start
                self.seconds = time.perf_counter() - start
        finally:
            for hook in hooks:
                hook.remove()
            del engine.gradients_ready
        peak = torch.cuda.max_memory_allocated() if cuda else resident["all"] + _allocated(profiler)
        self.peak_bytes = float(peak)
        self.parts = {
            "parameters": resident["parameters"],
            "gradients": self._gradients,
            "optimizer": resident["optimizer"],
        }
        self.parts["activations"] = max(0.0, self.peak_bytes - sum(self.parts.values()))
        self._build_spans(start, profiler)

    # -- memory

    def _resident_bytes(self, batch: Any) -> dict[str, float]:
        """Bytes allocated before the step: from the tensors themselves, and from DDP for its buckets."""
        engine = self._engine
        kind = engine.device.type
        weights = [p.device_value if p.device_value is not None else p.value for p in [*engine.pieces, *engine.frozen]]
        parameters = _bytes(t for t in weights if t.device.type == kind) + _bytes(engine.model.buffers())
        states = (t for t in engine.update_state() if t.dim() > 0)
        optimizer = _bytes(t for t in states if t.device.type == kind)
        inputs = _bytes(t for m in getattr(batch, "micros", ()) for t in tensors((m.input, m.target)))
        buckets = _bytes(engine.strategy.gradient_buffers())
        if isinstance(engine.module, nn.parallel.DistributedDataParallel):
            buckets = float(sum(bucket_bytes(engine.module)))
        return {
            "parameters": parameters,
            "optimizer": optimizer,
            "all": parameters + optimizer + inputs + buckets,
        }

    def _measure_gradients(self) -> None:
        engine = self._engine
        kind = engine.device.type
        self._gradients = _bytes(g for _, g in engine.update.gradients() if g.device.type == kind)

    # -- time

    def _hook_layers(self) -> list[Any]:
        hooks: list[Any] = []
        for spec in layers_of(self._engine.model):
            hooks.append(spec.module.register_forward_pre_hook(self._begin_hook(spec.name)))
            hooks.append(spec.module.register_forward_hook(self._end_hook(spec.name)))
        return hooks

    def _begin_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._marks.append((f"forward {name}", time.perf_counter()))

        return hook

    def _end_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._marks.append(("", time.perf_counter()))
            nodes = [t.grad_fn for t in tensors(output) if t.grad_fn is not None]
            if nodes:  # its backward begins when the gradient of its output is ready
                nodes[0].register_prehook(lambda g: self._marks.append((f"backward {name}", time.perf_counter())))

        return hook

    def _build_spans(self, start: float, profiler: Any) -> None:
        """Layers by our own clock, phases and messages by the profiler's, relative to the start of the step."""
        rank = self._engine.rank
        events = profiler.events()
        step = next(e for e in events if e.name == "drumline:step")
        ranges: list[tuple[str, float, float]] = []
        for e in events:
            begin = (e.time_range.start - step.time_range.start) * 1e-6
            end = (e.time_range.end - step.time_range.start) * 1e-6
            if e.name.startswith("drumline:") and e.name != "drumline:step":
                ranges.append((e.name.removeprefix("drumline:"), begin, end))
            elif e.name.startswith(("gloo:", "nccl:", "shm:", "mpi4py:", "ncclDevKernel")):
                self.spans.append(Span(rank, "communication", e.name.partition(":")[2] or e.name, begin, end))
        marks = sorted((t - start, name) for name, t in self._marks)
        for phase, begin, end in ranges:
            inside = [(t, name) for t, name in marks if begin <= t <= end] if phase in ("forward", "backward") else []
            points = [(begin, phase if phase in _PHASES else f"{phase} (model)"), *inside, (end, "")]
            for (a, name), (b, _) in pairwise(points):
                if b - a > 1e-6:
                    self.spans.append(Span(rank, "compute", name or f"{phase} (model)", a, b))


def _allocated(profiler: Any) -> float:
    """Peak bytes allocated during the step beyond the resident ones, from the profiler's allocator events."""
    most = 0.0
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == "[memory]":
            most = max(most, float(event.extra_fields.total_allocated))
    return most


def _bytes(given: Any) -> float:
    """Bytes of the distinct storages behind tensors."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in given if t.numel()}
    return float(sum(sizes.values()))
