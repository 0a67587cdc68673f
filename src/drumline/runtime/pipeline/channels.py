"""Messages under way between the ranks of a pipeline: receives are asked for early, sends are kept until they are done.

Where a backend has no tags, a pair of ranks needs a line of its own for each direction: on one line a send that waits
for its receive would stand in the way of the receive that the other rank waits for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ...comm import gloo_fallbacks
from ...comm.gloo_fallbacks import backend_of
from ...core.errors import GaveUp, PlanError
from .messages import Key, PipelineMessage

Follow = Callable[[str, Any, torch.Tensor], Any]
"""(name, work, tensor) -> what is waited for: a recorder sees the messages there."""


class PipelineChannels:
    """The lines of one rank to the others of its pipeline."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        back: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        follow: Follow | None = None,
    ) -> None:
        """`group` carries what goes to higher ranks, `back` what goes to lower ones: the same unless on nccl."""
        if back is None and backend_of(group) == "nccl":
            raise PlanError(
                "a pipeline on nccl with one process group",
                rule="nccl has no tags: each direction has its own group",
                fix="give `back`, a second group of the same ranks",
            )
        self.group, self.back, self.follow = group, back or group, follow
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.device = device or torch.device("cpu")
        self.bytes_sent = 0
        """Sent so far."""

    def send(self, tensor: torch.Tensor, dst: int, tag: int, name: str = "send") -> Any:
        """Begin to send a tensor of one run of memory; it must live until the work is done."""
        line = self.group if dst > self.rank else self.back
        self.bytes_sent += tensor.nbytes
        work = gloo_fallbacks.isend(tensor, group=line, dst=dst, tag=tag)
        return self.follow(name, work, tensor) if self.follow else work

    def receive(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        """Begin to receive into a tensor."""
        line = self.back if src > self.rank else self.group
        return gloo_fallbacks.irecv(tensor, group=line, src=src, tag=tag)


class StepMessages:
    """The messages of one step."""

    def __init__(self, wires: PipelineChannels, sequences: dict[tuple[int, int], list[PipelineMessage]]) -> None:
        self._wires, self._sequences = wires, sequences
        self._asked: Counter[int] = Counter()
        """Receives that are asked for, by sender."""
        self._arriving: dict[Key, tuple[Any, torch.Tensor]] = {}
        self._sent: dict[int, deque[tuple[PipelineMessage, Any, torch.Tensor]]] = {}

    def post_receive(self, message: PipelineMessage) -> None:
        """Ask for a message, and for those that its sender sends before it."""
        line = self._sequences[message.src, message.dst]
        for m in line[self._asked[message.src] : message.number + 1]:
            room = m.port.receive_buffer(self._wires.device)
            with _named(f"rank {self._wires.rank} of the pipeline cannot ask for {m}", m.src):
                self._arriving[m.key] = self._wires.receive(room, m.src, m.number), room
        self._asked[message.src] = max(self._asked[message.src], message.number + 1)

    def wait_for(self, message: PipelineMessage) -> torch.Tensor:
        """Wait for a message."""
        work, room = self._arriving.pop(message.key)
        with _named(f"rank {self._wires.rank} of the pipeline waited in vain for {message}", message.src):
            work.wait()
        self._confirm(message)
        return message.port.unpacked(room)

    def send(self, message: PipelineMessage, value: torch.Tensor) -> None:
        """Begin to send."""
        packed = message.port.packed(value)
        with _named(f"rank {self._wires.rank} of the pipeline cannot send {message}", message.dst):
            work = self._wires.send(packed, message.dst, message.number, str(message.key[0]))
        self._sent.setdefault(message.dst, deque()).append((message, work, packed))

    def _confirm(self, message: PipelineMessage) -> None:
        """A rank that sends has read all that its lane needed until then: those sends are done, and are let go."""
        sent = self._sent.get(message.src, deque())
        kept = []
        for m, work, packed in sent:
            if m.read_at <= message.sent_at:
                with _named(f"nobody took {m}", m.dst):
                    work.wait()
            else:
                kept.append((m, work, packed))
        sent.clear()
        sent.extend(kept)

    @property
    def unfinished_sends(self) -> Iterator[PipelineMessage]:
        """Sends that are not known to be done."""
        return (m for line in self._sent.values() for m, _, _ in line)

    def finish(self) -> None:
        """Wait until everything sent has been received."""
        assert not self._arriving, f"never read: {len(self._arriving)} messages"
        for line in self._sent.values():
            while line:
                message, work, _ = line[0]
                with _named(f"nobody took {message}", message.dst):
                    work.wait()
                line.popleft()


@contextmanager
def _named(what: str, peer: int) -> Iterator[None]:
    """Whom an error of the backend is about: a rank that has died is noticed wherever a message to it or from it is."""
    try:
        yield
    except RuntimeError as e:
        raise GaveUp(
            what,
            where=str(e).split("\n")[0],
            rule="every rank runs its lane to the end",
            fix=f"see what rank {peer} says",
        ) from e
