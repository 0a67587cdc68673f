"""What each of the last steps did and when, on this rank: phases, and messages with their bytes.

A phase costs two readings of a clock and one append, so every step is recorded. On CUDA the readings are events of
the stream, resolved when somebody asks. The profiled step (probe.py) shows operators; these show any step.

Messages are seen where they are made: all calls of our own process groups (shm, mpi4py), DDP's buckets by a
communication hook, FSDP2's by its own two seams, and those of the engine. Not seen: what a user's module sends itself
over gloo or nccl, the all-reduce between replicas that FSDP2 does over these two, and on CUDA all that runs on streams
of nccl's own.
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

from ...core.timeline import Span, Timeline

KEEP = 64
"""Steps that are remembered."""

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


class Recorder:
    """The last steps of one rank."""

    def __init__(self, rank: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.device, self._group = rank, device, group
        self._cuda = device.type == "cuda"
        self._steps: deque[_Step] = deque()
        self._free: list[Any] = []
        """Events of steps that are forgotten: to make one takes longer than to record it."""
        self._stream: torch.cuda.Stream | None = None
        self._ours = group is not None and hasattr(group, "watch")
        """Whether the group tells of its calls itself."""

    # -- recording -----------------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """A step begins, if it has not begun with the wait for its data."""
        if not self._steps or self._steps[-1].ended:
            self._add(number)
        self._steps[-1].number = number
        if self._ours:
            self._group.watch = self.open  # type: ignore[union-attr]  # such a group has it

    def end(self) -> None:
        """The step has ended; what comes now belongs to none."""
        if self._steps:
            self._steps[-1].ended = True
        if self._ours:
            self._group.watch = None  # type: ignore[union-attr]  # such a group has it

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step."""
        if self._is_next(name):
            self.end()
            self._add(self._steps[-1].number + 1 if self._steps else 0)
        step = self._steps[-1]
        # a reading costs more on a GPU, and its phases follow one another: the end of one is the start of the next
        start = self._now() if not self._cuda else step.phases[-1][2] if step.phases else step.start
        try:
            yield
        finally:
            step.phases.append((name, start, self._now()))

    def _add(self, number: int) -> None:
        """A new step; the oldest is forgotten."""
        if len(self._steps) == KEEP:
            old = self._steps.popleft()
            if self._cuda:  # a phase begins with the event that the one before has ended with
                marks = [old.start, *(m for p in old.phases for m in p[1:]), *(m for x in old.messages for m in x[1:3])]
                self._free += {id(mark): mark for mark in marks}.values()
        if self._cuda:
            self._stream = torch.cuda.current_stream(self.device)  # to ask costs more than to record
        self._steps.append(_Step(number, self._now()))

    def _is_next(self, name: str) -> bool:
        """Whether a phase begins a step: loops of the user's own do not say when one ends."""
        if not self._steps or self._steps[-1].ended or name == "data":
            return True
        phases = self._steps[-1].phases
        return name == "forward" and bool(phases) and phases[-1][0] == "optimizer"

    @contextmanager
    def message(self, name: str, *tensors: torch.Tensor) -> Iterator[None]:
        """A message that the caller waits for, unless its group tells of it itself."""
        if self._ours or not self._steps:
            yield
            return
        start = self._now()
        yield
        self._note(name, start, _bytes(tensors))

    def open(self, name: str, size: float) -> Message:
        """A message begins; whoever sees its end calls `end()`."""
        return Message(self, name, size, self._now())

    def follow(self, name: str, work: Any, *tensors: torch.Tensor) -> Any:
        """A message under way: its end is seen by its future. Gives back what is to be waited for."""
        if self._ours or self._cuda or work is None or not self._steps:
            return work
        message = self.open(name, _bytes(tensors))
        try:
            future = work.get_future()
        except RuntimeError:  # some calls of gloo have none: the end of the wait is all that is seen
            return _Awaited(work, message)
        future.add_done_callback(lambda _: message.end())
        return work

    def _note(self, name: str, start: Mark, size: float) -> None:
        if self._steps:
            self._steps[-1].messages.append((name, start, self._now(), size))

    def _now(self) -> Mark:
        if not self._cuda:
            return time.perf_counter_ns()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    # -- showing -------------------------------------------------------------------------------------------------

    @property
    def numbers(self) -> tuple[int, ...]:
        """The steps that are remembered, oldest first."""
        return tuple(s.number for s in self._steps if s.ended)

    def spans(self, number: int | None = None) -> list[Span]:
        """The spans of a remembered step (the last one unless told), in seconds from its start."""
        step = self._find(number)
        if step is None:
            return []

        def span(lane: str, name: str, a: Mark, b: Mark, size: float) -> Span:
            return Span(self.rank, lane, name, self._seconds(step.start, a), self._seconds(step.start, b), size)

        phases = [span("data" if n == "data" else "compute", n, a, b, 0.0) for n, a, b in list(step.phases)]
        return phases + [span("communication", n, a, b, m) for n, a, b, m in list(step.messages)]

    def timeline(self, number: int | None = None) -> Timeline:
        """One remembered step on this rank."""
        step = self._find(number)
        return Timeline("measured", tuple(self.spans(number)), notes=(f"step {step.number}",) if step else ())

    def clock(self, number: int | None = None) -> dict[str, float]:
        """Seconds by phase of a remembered step: the last one unless told."""
        found: dict[str, float] = {}
        step = self._find(number)
        for name, a, b in list(step.phases) if step else []:
            found[name] = found.get(name, 0.0) + self._seconds(a, b)
        return found

    def own(self, number: int | None = None) -> dict[str, float]:
        """Seconds by phase without the wait for other ranks, as far as messages are seen.

        In a step that ranks take together they all end at the same time; who is slow shows in the time before the
        others are waited for. A message that lasts until its phase ends is taken as such a wait, from its start.
        """
        spans = self.spans(number)
        messages = [(s.start, s.end) for s in spans if s.lane == "communication"]
        found: dict[str, float] = {}
        for s in spans:
            if s.lane == "communication" or s.name == "communication":
                continue
            seconds = s.end - s.start
            start, end = max((x for x in messages if s.start <= x[0] <= s.end), default=(s.end, s.end))
            waited = s.end - start if end >= s.end - 0.05 * seconds else 0.0
            found[s.name] = found.get(s.name, 0.0) + seconds - waited
        return found

    def _find(self, number: int | None) -> _Step | None:
        if number is None:
            return self._steps[-1] if self._steps else None
        return next((s for s in reversed(self._steps) if s.number == number), None)

    def _seconds(self, start: Mark, end: Mark) -> float:
        if not self._cuda:
            return float(end - start) * 1e-9
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    # -- where torch's engines send ------------------------------------------------------------------------------

    def watch_buckets(self, ddp: nn.Module, group: dist.ProcessGroup) -> bool:
        """Have DDP tell of its buckets, where its group does not. Then they are summed, and not divided."""
        if self._ours or self._cuda:
            return False

        def add_up(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            message = self.open("all_reduce", float(buffer.nbytes))
            work = dist.all_reduce(buffer, group=group, async_op=True)

            def done(future: torch.futures.Future[Any]) -> torch.Tensor:
                future.value()  # raises what went wrong
                message.end()
                return buffer

            assert work is not None
            reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
            return reduced

        add_up.__annotations__.clear()  # DDP looks at them, and these are text
        ddp.register_comm_hook(None, add_up)  # type: ignore[operator]  # a method of DDP
        return True

    def watch_shards(self, module: nn.Module) -> None:
        """Have FSDP2 tell of its messages, where its group does not."""
        if self._ours or self._cuda:
            return
        from .fsdp_messages import watch

        watch(self, module)


class Message:
    """A message under way."""

    __slots__ = ("_name", "_recorder", "_size", "_start")

    def __init__(self, recorder: Recorder, name: str, size: float, start: Mark) -> None:
        self._recorder, self._name, self._size, self._start = recorder, name, size, start

    def end(self) -> None:
        """It has arrived."""
        self._recorder._note(self._name, self._start, self._size)


class _Awaited:
    """A call whose end is when it has been waited for."""

    def __init__(self, work: dist.Work, message: Message) -> None:
        self._work, self._message = work, message

    def wait(self, *arguments: Any) -> Any:
        """Wait, and tell."""
        done = self._work.wait(*arguments)
        self._message.end()
        return done


def _bytes(tensors: Sequence[torch.Tensor]) -> float:
    return float(sum(t.nbytes for t in tensors))


Opener = Callable[[str, float], Message]
"""What a process group of ours calls when a call begins."""
