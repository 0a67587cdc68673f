"""Records what each of the last steps did and when, on this rank: phases, and messages with their bytes.

A phase costs two clock readings and one append, so every step is recorded. On CUDA the readings are events of the
stream, resolved on request. The profiled step (training/step_profiler.py) shows operators; this shows any step.

Messages are recorded where they are made: all calls of our own process groups (shm, mpi4py), DDP's buckets by a
communication hook, FSDP2's by its two custom-communication hooks, and those of the engine. Not recorded: what a user's
module sends itself over gloo or nccl, the all-reduce between replicas that FSDP2 does over these two, and on CUDA
everything that runs on nccl's own streams.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...comm.gloo_fallbacks import reduce_scatter
from ...comm.tensor_identity import naming_calls
from ...core.timeline import Span, Timeline

KEEP = 64
"""Number of recent steps kept."""

Mark = Any
"""A moment: nanoseconds of the host's clock, or a CUDA event."""


@dataclass(slots=True)
class _Step:
    number: int
    start: Mark
    phases: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    messages: list[tuple[str, Mark, Mark, float]] = field(default_factory=list)
    """Name, start, end, bytes: appended by whichever thread ends a message."""
    ended: bool = False


class StepRecorder:
    """The last steps of one rank."""

    def __init__(self, rank: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.device, self._group = rank, device, group
        self._cuda = device.type == "cuda"
        self._steps: deque[_Step] = deque()
        self._free_events: list[Any] = []
        """Events of dropped steps: creating one takes longer than recording it."""
        self._stream: torch.cuda.Stream | None = None
        self._group_reports = group is not None and hasattr(group, "watch")
        """Whether the group reports its calls itself."""

    # -- recording -----------------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Begin a step, unless it has begun with the wait for its data."""
        if not self._steps or self._steps[-1].ended:
            self._add(number)
        self._steps[-1].number = number
        if self._group_reports:
            self._group.watch = self.start_message  # type: ignore[union-attr]  # such a group has it

    def end(self) -> None:
        """End the step; what follows belongs to no step."""
        if self._steps:
            self._steps[-1].ended = True
        if self._group_reports:
            self._group.watch = None  # type: ignore[union-attr]  # such a group has it

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record one phase of the step."""
        if self._starts_step(name):
            self.end()
            self._add(self._steps[-1].number + 1 if self._steps else 0)
        step = self._steps[-1]
        # a reading costs more on a GPU, and its phases are contiguous: the end of one is the start of the next
        start = self._now() if not self._cuda else step.phases[-1][2] if step.phases else step.start
        try:
            yield
        finally:
            step.phases.append((name, start, self._now()))

    def _add(self, number: int) -> None:
        """Add a step and drop the oldest."""
        if len(self._steps) == KEEP:
            old = self._steps.popleft()
            if self._cuda:  # a phase starts with the event that ended the previous one
                marks = [old.start, *(m for p in old.phases for m in p[1:]), *(m for x in old.messages for m in x[1:3])]
                self._free_events += {id(mark): mark for mark in marks}.values()
        if self._cuda:
            self._stream = torch.cuda.current_stream(self.device)  # looking it up costs more than recording
        self._steps.append(_Step(number, self._now()))

    def _starts_step(self, name: str) -> bool:
        """Whether a phase begins a new step: users' own loops do not mark the end of one."""
        if not self._steps or self._steps[-1].ended or name == "data":
            return True
        phases = self._steps[-1].phases
        return name == "forward" and bool(phases) and phases[-1][0] == "optimizer"

    @contextmanager
    def message(self, name: str, *tensors: torch.Tensor) -> Iterator[None]:
        """Record a blocking message, unless its group reports it itself."""
        if self._group_reports or not self._steps:
            yield
            return
        start = self._now()
        yield
        self._note(name, start, _bytes(tensors))

    def start_message(self, name: str, size: float) -> OpenMessage:
        """Start a message; call `end()` on the result when it completes."""
        return OpenMessage(self, name, size, self._now())

    def track(self, name: str, work: Any, *tensors: torch.Tensor, unreported: bool = False) -> Any:
        """Record an asynchronous message until its future completes. Returns the work to wait on.

        `unreported`: the message is outside of the group, which does not report it.
        """
        if (self._group_reports and not unreported) or self._cuda or work is None or not self._steps:
            return work
        message = self.start_message(name, _bytes(tensors))
        try:
            future = work.get_future()
        except RuntimeError:  # some gloo calls have no future: record the end of the wait instead
            return _AwaitedWork(work, message)
        future.add_done_callback(lambda _: message.end())
        return work

    def _note(self, name: str, start: Mark, size: float) -> None:
        if self._steps:
            self._steps[-1].messages.append((name, start, self._now(), size))

    def _now(self) -> Mark:
        if not self._cuda:
            return time.perf_counter_ns()
        event = self._free_events.pop() if self._free_events else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the completed steps kept, oldest first."""
        return tuple(s.number for s in self._steps if s.ended)

    def spans(self, number: int | None = None) -> list[Span]:
        """The spans of a step (default: the last), in seconds from its start."""
        step = self._step(number)
        if step is None:
            return []

        def span(lane: str, name: str, a: Mark, b: Mark, size: float) -> Span:
            return Span(self.rank, lane, name, self._seconds(step.start, a), self._seconds(step.start, b), size)

        phases = [span("data" if n == "data" else "compute", n, a, b, 0.0) for n, a, b in list(step.phases)]
        return phases + [span("communication", n, a, b, m) for n, a, b, m in list(step.messages)]

    def timeline(self, number: int | None = None) -> Timeline:
        """The timeline of one step on this rank."""
        step = self._step(number)
        return Timeline("measured", tuple(self.spans(number)), notes=(f"step {step.number}",) if step else ())

    def phase_seconds(self, number: int | None = None) -> dict[str, float]:
        """Seconds by phase of a step (default: the last)."""
        seconds: dict[str, float] = {}
        step = self._step(number)
        for name, a, b in list(step.phases) if step else []:
            seconds[name] = seconds.get(name, 0.0) + self._seconds(a, b)
        return seconds

    def own_seconds(self, number: int | None = None) -> dict[str, float]:
        """Seconds by phase without the wait for other ranks, as far as messages are recorded.

        In a synchronous step all ranks end at the same time; a slow rank shows in the time before it waits for the
        others. A message that lasts until its phase ends counts as such a wait, from its start.
        """
        spans = self.spans(number)
        messages = [(s.start, s.end) for s in spans if s.lane == "communication"]
        own: dict[str, float] = {}
        for s in spans:
            if s.lane == "communication" or s.name == "communication":
                continue
            seconds = s.end - s.start
            start, end = max((x for x in messages if s.start <= x[0] <= s.end), default=(s.end, s.end))
            waited = s.end - start if end >= s.end - 0.05 * seconds else 0.0
            own[s.name] = own.get(s.name, 0.0) + seconds - waited
        return own

    def _step(self, number: int | None) -> _Step | None:
        if number is None:
            return self._steps[-1] if self._steps else None
        return next((s for s in reversed(self._steps) if s.number == number), None)

    def _seconds(self, start: Mark, end: Mark) -> float:
        if not self._cuda:
            return float(end - start) * 1e-9
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    # -- messages of torch's own engines -------------------------------------------------------------------------

    def record_ddp(self, ddp: nn.Module, group: dist.ProcessGroup) -> bool:
        """Record DDP's buckets, where its group does not report. Buckets are then summed, not averaged."""
        if self._group_reports or self._cuda:
            return False

        def sum_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            message = self.start_message("all_reduce", float(buffer.nbytes))
            with naming_calls(f"bucket {bucket.index()}"):
                work = dist.all_reduce(buffer, group=group, async_op=True)

            def done(future: torch.futures.Future[Any]) -> torch.Tensor:
                future.value()  # raises on failure
                message.end()
                return buffer

            assert work is not None
            reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
            return reduced

        sum_bucket.__annotations__.clear()  # DDP inspects them, and these are strings
        ddp.register_comm_hook(None, sum_bucket)  # type: ignore[operator]  # a method of DDP
        return True

    def record_fsdp(self, model: nn.Module) -> None:
        """Record the messages of every FSDP2 unit of a model, where its group does not report."""
        if self._group_reports or self._cuda:
            return
        from torch.distributed.fsdp import FSDPModule

        gather, scatter = _RecordedGather(self), _RecordedScatter(self)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # it has what FSDP2 calls
                module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]  # the same


class OpenMessage:
    """A message under way."""

    __slots__ = ("_name", "_recorder", "_size", "_start")

    def __init__(self, recorder: StepRecorder, name: str, size: float, start: Mark) -> None:
        self._recorder, self._name, self._size, self._start = recorder, name, size, start

    def end(self) -> None:
        """Record its arrival."""
        self._recorder._note(self._name, self._start, self._size)


class _AwaitedWork:
    """Work whose message ends when it has been waited for."""

    def __init__(self, work: dist.Work, message: OpenMessage) -> None:
        self._work, self._message = work, message

    def wait(self, *arguments: Any) -> Any:
        """Wait, then end the message."""
        done = self._work.wait(*arguments)
        self._message.end()
        return done


_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer torch releases renamed it."""


class _RecordedCollective:
    """Base of the two custom collectives: allocates plain memory and records the message."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _run(self, name: str, whole: torch.Tensor, send: Callable[[], Any], *, async_op: bool) -> Any:
        if not async_op:
            with self._recorder.message(name, whole):
                return send()
        return self._recorder.track(name, send(), whole)


class _RecordedGather(_RecordedCollective):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        def send() -> Any:
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)

        return self._run("all_gather", output_tensor, send, async_op=async_op)  # type: ignore[no-any-return]


class _RecordedScatter(_RecordedCollective):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        def send() -> Any:
            return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

        return self._run("reduce_scatter", input_tensor, send, async_op=async_op)  # type: ignore[no-any-return]


def _bytes(tensors: Sequence[torch.Tensor]) -> float:
    return float(sum(t.nbytes for t in tensors))
