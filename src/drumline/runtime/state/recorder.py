"""Records what each of the last steps did and when, on this rank: phases, and messages with their bytes.

A phase costs two clock readings and one append, so every step is recorded. On CUDA the readings are events of the
stream, resolved on request. The profiled step (training/step_profiler.py) shows operators; this shows any step.

Messages are recorded where they are made: all calls of our own process groups (shm, mpi4py), DDP's buckets by a
communication hook, FSDP2's by its two custom-communication hooks, and those of the engine. Not recorded: what a user's
module sends itself over gloo or nccl, the all-reduce between replicas that FSDP2 does over these two, and on CUDA
everything that runs on nccl's own streams.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ...core.timeline import Span, Timeline

KEEP = 64
"""Number of recent steps kept."""
EXACT_BUCKET_INTERVAL = 3
"""Steps from one that records the exact ends of DDP's buckets over gloo to the next. In the others a bucket ends at the
rank's next call: a callback at its end takes 50 us of a processor, more than all other recording of a step."""

Mark = Any
"""A moment: nanoseconds of the host's clock, or a CUDA event."""


@dataclass(slots=True)
class _Step:
    number: int
    start: Mark
    phases: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    messages: list[tuple[str, Mark, Mark, float]] = field(default_factory=list)
    """Name, start, end, bytes: appended by whichever thread ends a message."""
    blocked: list[tuple[Mark, Mark]] = field(default_factory=list)
    """When the thread that computes did nothing but wait for a message."""
    ended: bool = False
    timed: bool = True
    """Whether the ends of all messages are exact."""


class StepRecorder:
    """The last steps of one rank."""

    def __init__(self, rank: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.device, self._group = rank, device, group
        self._cuda = device.type == "cuda"
        self._steps: deque[_Step] = deque()
        self._free_events: list[Any] = []
        """Events of dropped steps: creating one takes longer than recording it."""
        self._stream: torch.cuda.Stream | None = None
        self.group_reports = group is not None and hasattr(group, "watch")
        """Whether the group reports its calls itself."""
        self._bucket_group: Any = None
        """The group that reports DDP's buckets, if there is one."""

    # -- recording -----------------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Begin a step, unless it has begun with the wait for its data."""
        if not self._steps or self._steps[-1].ended:
            self._add(number)
        self._steps[-1].number = number
        if self._bucket_group is not None:
            self._bucket_group.watch_buckets = BucketWatch(self._steps[-1])
        if self.group_reports:
            self._group.watch = self.start_message  # type: ignore[union-attr]  # such a group has it

    def end(self) -> None:
        """End the step; what follows belongs to no step."""
        if self._steps:
            self._steps[-1].ended = True
        if self.group_reports:
            self._group.watch = None  # type: ignore[union-attr]  # such a group has it
        if self._bucket_group is not None:
            self._bucket_group.watch_buckets = None

    def phase(self, name: str) -> OpenPhase:
        """Record one phase of the step: `with recorder.phase(name)`."""
        return OpenPhase(self, name)

    def _begin_phase(self, name: str) -> tuple[_Step, Mark]:
        """The step of a phase, and its start."""
        if self._starts_step(name):
            self.end()
            self._add(self._steps[-1].number + 1 if self._steps else 0)
        step = self._steps[-1]
        # a reading costs more on a GPU, and its phases are contiguous: the end of one is the start of the next
        return step, self._now() if not self._cuda else step.phases[-1][2] if step.phases else step.start

    def _add(self, number: int) -> None:
        """Add a step and drop the oldest."""
        if len(self._steps) == KEEP:
            old = self._steps.popleft()
            if self._cuda:  # a phase starts with the event that ended the previous one
                marks = [old.start, *(m for p in old.phases for m in p[1:]), *(m for x in old.messages for m in x[1:3])]
                marks += [m for pair in old.blocked for m in pair]
                self._free_events += {id(mark): mark for mark in marks}.values()
        if self._cuda:
            self._stream = torch.cuda.current_stream(self.device)  # looking it up costs more than recording
        self._steps.append(_Step(number, self._now()))
        if self._bucket_group is not None:
            self._bucket_group.watch_buckets = BucketWatch(self._steps[-1])

    def _starts_step(self, name: str) -> bool:
        """Whether a phase begins a new step: users' own loops do not mark the end of one."""
        if not self._steps or self._steps[-1].ended or name == "data":
            return True
        phases = self._steps[-1].phases
        return name == "forward" and bool(phases) and phases[-1][0] == "optimizer"

    def message(self, name: str, *tensors: torch.Tensor) -> AbstractContextManager[None]:
        """Record a blocking message, unless its group reports it itself."""
        if self.group_reports or not self._steps:
            return nullcontext()
        return self.start_message(name, _bytes(tensors))

    def start_message(self, name: str, size: float) -> OpenMessage:
        """Start a message; call `end()` on the result when it completes."""
        return OpenMessage(self, name, size, self._now(), self._steps[-1] if self._steps else None)

    @property
    def needs_hooks(self) -> bool:
        """Whether hooks record the messages of torch's own engines: on CPUs, where the group does not report."""
        return not (self.group_reports or self._cuda)

    def watch_buckets_of(self, group: Any) -> None:
        """Record DDP's buckets as a group reports them, step by step."""
        self._bucket_group = group

    def track(self, name: str, work: Any, *tensors: torch.Tensor, unreported: bool = False) -> Any:
        """Record an asynchronous message until its future completes. Returns the work to wait on.

        `unreported`: the message is outside of the group, which does not report it.
        """
        if (self.group_reports and not unreported) or self._cuda or work is None or not self._steps:
            return work
        message = self.start_message(name, _bytes(tensors))
        try:
            future = work.get_future()
        except RuntimeError:  # some gloo calls have no future: record the end of the wait instead
            return _AwaitedWork(work, message)
        future.add_done_callback(lambda _: message.end())
        return work

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

    def is_timed(self, number: int) -> bool:
        """Whether the ends of all messages of a step are exact; the same on all ranks."""
        step = self._step(number)
        return step is not None and step.timed

    def spans(self, number: int | None = None) -> list[Span]:
        """The spans of a step (default: the last one with exact messages), in seconds from its start."""
        return self._spans(self._step(number, timed=True))

    def timeline(self, number: int | None = None) -> Timeline:
        """The timeline of one step on this rank (default: the last one with exact messages)."""
        step = self._step(number, timed=True)
        return Timeline("measured", tuple(self._spans(step)), notes=(f"step {step.number}",) if step else ())

    def _spans(self, step: _Step | None) -> list[Span]:
        if step is None:
            return []

        def span(lane: str, name: str, a: Mark, b: Mark, size: float) -> Span:
            return Span(self.rank, lane, name, self._seconds(step.start, a), self._seconds(step.start, b), size)

        phases = [span("data" if n == "data" else "compute", n, a, b, 0.0) for n, a, b in list(step.phases)]
        return phases + [span("communication", n, a, b, m) for n, a, b, m in list(step.messages)]

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
        spans = self._spans(self._step(number))
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

    def blocked_spans(self, number: int | None = None) -> list[tuple[float, float]]:
        """When a step only waited for a message, as far as that is recorded, in seconds from its start."""
        step = self._step(number)
        pairs = list(step.blocked) if step else []
        return [(self._seconds(step.start, a), self._seconds(step.start, b)) for a, b in pairs] if step else []

    def gap_before(self, number: int) -> float:
        """Seconds between the last phase of the step before and the start of a step; 0 for the oldest step kept."""
        for before, step in pairwise(list(self._steps)):
            if step.number == number:
                return max(0.0, self._seconds(before.phases[-1][2], step.start)) if before.phases else 0.0
        return 0.0

    def _step(self, number: int | None, *, timed: bool = False) -> _Step | None:
        """A step by its number, or the last one; with `timed`, the last one with exact messages."""
        if number is not None:
            return next((s for s in reversed(self._steps) if s.number == number), None)
        return next((s for s in reversed(self._steps) if s.timed or not timed), None)

    def _seconds(self, start: Mark, end: Mark) -> float:
        if not self._cuda:
            return float(end - start) * 1e-9
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


class OpenPhase:
    """A phase under way. Not a generator, which takes three times as long to enter and leave."""

    __slots__ = ("_name", "_recorder", "_start", "_step")

    def __init__(self, recorder: StepRecorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        self._step, self._start = self._recorder._begin_phase(self._name)

    def __exit__(self, *error: object) -> None:
        self._step.phases.append((self._name, self._start, self._recorder._now()))


class OpenMessage:
    """A message under way."""

    __slots__ = ("_name", "_recorder", "_size", "_start", "_step", "_thread")

    def __init__(self, recorder: StepRecorder, name: str, size: float, start: Mark, step: _Step | None) -> None:
        self._recorder, self._name, self._size, self._start, self._step = recorder, name, size, start, step
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        """A thread is blocked by it."""

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._arrived(self._start)

    def end(self) -> None:
        """Record its arrival, in the step in which it was started.

        The thread that started it was blocked if it ends it as well.
        """
        self._arrived(self._start if threading.get_ident() == self._thread else None)

    def now(self) -> Mark:
        """This moment, by the clock of the recorder."""
        return self._recorder._now()

    def end_wait(self, waited_from: Mark) -> None:
        """Record its arrival; a thread was blocked since `waited_from`."""
        self._arrived(waited_from)

    def _arrived(self, blocked_from: Mark | None) -> None:
        if self._step is None:
            return
        end = self._recorder._now()
        self._step.messages.append((self._name, self._start, end, self._size))
        if blocked_from is not None:
            self._step.blocked.append((blocked_from, end))


class BucketWatch:
    """Records DDP's buckets of one step, in a group that reports them."""

    __slots__ = ("_step", "exact")

    def __init__(self, step: _Step) -> None:
        self._step = step
        self.exact = step.timed = step.number % EXACT_BUCKET_INTERVAL == 0
        """Whether the moment of their end matters."""

    def add(self, name: str, size: float, start: int, _: object = None) -> None:
        """Add a message that began at `start`, by `time.perf_counter_ns`, and has ended. A future may call this."""
        self._step.messages.append((name, start, time.perf_counter_ns(), size))


class _AwaitedWork:
    """Work whose message ends when it has been waited for."""

    def __init__(self, work: dist.Work, message: OpenMessage) -> None:
        self._work, self._message = work, message

    def wait(self, *arguments: Any) -> Any:
        """Wait, then end the message."""
        start = self._message.now()
        done = self._work.wait(*arguments)
        self._message.end_wait(start)
        return done


def _bytes(tensors: Sequence[torch.Tensor]) -> float:
    return float(sum(t.nbytes for t in tensors))
