"""Messages between the ranks of a pipeline: receives are posted early, sent tensors are kept until they have arrived.

Where a backend has no tags, each direction between two ranks needs a channel of its own: on a shared one, a send that
waits for its receive would block the receive that the other rank waits for.
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
from ...comm.peer_errors import says_peer_is_gone
from ...core.errors import GaveUp, PlanError
from .messages import Key, PipelineMessage

Follow = Callable[[str, Any, torch.Tensor], Any]
"""(name, work, tensor) -> the work to wait for: a recorder observes the messages here."""


class PipelineChannels:
    """One rank's channels to the other ranks of its pipeline."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        back: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        follow: Follow | None = None,
    ) -> None:
        """`group` carries messages to higher ranks, `back` to lower ones: the same group unless on nccl."""
        if back is None and backend_of(group) == "nccl":
            raise PlanError(
                "a pipeline on nccl with one process group",
                rule="nccl has no tags: each direction has its own group",
                fix="pass `back`, a second group of the same ranks",
            )
        self.group, self.back, self.follow = group, back or group, follow
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.device = device or torch.device("cpu")
        self.bytes_sent = 0
        """Total so far."""

    def send(self, tensor: torch.Tensor, dst: int, tag: int, name: str = "send") -> Any:
        """Start sending a contiguous tensor; it must live until the work is done."""
        channel = self.group if dst > self.rank else self.back
        self.bytes_sent += tensor.nbytes
        work = gloo_fallbacks.isend(tensor, group=channel, dst=dst, tag=tag)
        return self.follow(name, work, tensor) if self.follow else work

    def receive(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        """Start receiving into a tensor."""
        channel = self.back if src > self.rank else self.group
        return gloo_fallbacks.irecv(tensor, group=channel, src=src, tag=tag)


class StepMessages:
    """The messages of one step."""

    def __init__(self, channels: PipelineChannels, sequences: dict[tuple[int, int], list[PipelineMessage]]) -> None:
        self._channels, self._sequences = channels, sequences
        self._posted: Counter[int] = Counter()
        """Number of posted receives, by sender."""
        self._arriving: dict[Key, tuple[Any, torch.Tensor]] = {}
        self._sent: dict[int, deque[tuple[PipelineMessage, Any, torch.Tensor]]] = {}

    def post_receive(self, message: PipelineMessage) -> None:
        """Post the receive of a message, and of those that its sender sends before it."""
        sequence = self._sequences[message.src, message.dst]
        for m in sequence[self._posted[message.src] : message.number + 1]:
            buffer = m.port.receive_buffer(self._channels.device)
            with naming_peer(f"rank {self._channels.rank} of the pipeline cannot receive {m}", m.src):
                self._arriving[m.key] = self._channels.receive(buffer, m.src, m.number), buffer
        self._posted[message.src] = max(self._posted[message.src], message.number + 1)

    def wait_for(self, message: PipelineMessage) -> torch.Tensor:
        """Wait for a message."""
        work, buffer = self._arriving.pop(message.key)
        with naming_peer(f"rank {self._channels.rank} of the pipeline did not receive {message}", message.src):
            work.wait()
        self._confirm(message)
        return message.port.unpack(buffer)

    def send(self, message: PipelineMessage, value: torch.Tensor) -> None:
        """Start sending."""
        packed = message.port.pack(value)
        with naming_peer(f"rank {self._channels.rank} of the pipeline cannot send {message}", message.dst):
            work = self._channels.send(packed, message.dst, message.number, str(message.key[0]))
        self._sent.setdefault(message.dst, deque()).append((message, work, packed))

    def _confirm(self, message: PipelineMessage) -> None:
        """Release sends that must have arrived: a rank that sends has read all that its lane needed before."""
        sent = self._sent.get(message.src, deque())
        kept = []
        for m, work, packed in sent:
            if m.read_at <= message.sent_at:
                with naming_peer(f"no rank received {m}", m.dst):
                    work.wait()
            else:
                kept.append((m, work, packed))
        sent.clear()
        sent.extend(kept)

    @property
    def unfinished_sends(self) -> Iterator[PipelineMessage]:
        """Sends that are not known to have arrived."""
        return (m for sends in self._sent.values() for m, _, _ in sends)

    def finish(self) -> None:
        """Wait until everything sent has been received."""
        assert not self._arriving, f"never read: {len(self._arriving)} messages"
        for sends in self._sent.values():
            while sends:
                message, work, _ = sends[0]
                with naming_peer(f"no rank received {message}", message.dst):
                    work.wait()
                sends.popleft()


@contextmanager
def naming_peer(what: str, peer: int) -> Iterator[None]:
    """Name the peer in an error of the backend: a dead rank shows wherever a message to or from it is.

    Errors of this rank itself, such as a lack of memory, are its own.
    """
    try:
        yield
    except RuntimeError as e:
        if not says_peer_is_gone(e):
            raise
        raise GaveUp(
            what,
            where=str(e).split("\n")[0],
            rule="every rank runs its lane to the end",
            fix=f"see what rank {peer} says",
        ) from e
