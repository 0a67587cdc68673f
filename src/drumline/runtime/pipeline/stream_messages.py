"""Messages of a pipeline that does not drain: batches follow each other, so there is no list of all messages.

Rank s has stage s. Values go to higher ranks with a forward, gradients to lower ones with a backward, both in the order
of the micro-batches. So the messages from one rank to another have one order, which both ends count.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...partition.stage import Port, StagedGraph, StageInput
from ...schedules.pipeline import Action
from .channels import PipelineChannels, naming_peer
from .messages import Key, grad_key, value_key


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """One tensor from one rank to another."""

    key: Key
    port: Port
    src: int
    dst: int

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.key))} from rank {self.src} to rank {self.dst}"


def messages_to(action: Action, cut: StagedGraph) -> Iterator[StreamMessage]:
    """The messages that an action waits for, those of each sender in the order in which it sends them."""
    s, micro = action.stage, action.micro
    if action.kind == "F":
        wanted = {(x.stage, x.output) for x in cut.stages[s].inputs if isinstance(x, StageInput)}
        for source in (StageInput(*pair) for pair in sorted(wanted)):
            port = cut.stages[source.stage].outputs[source.output]
            yield StreamMessage(value_key(source, micro), port, source.stage, s)
    elif action.kind == "B":
        for reader in cut.stages[s + 1 :]:
            yield from (m for m in messages_from(Action("B", reader.index, micro), cut) if m.dst == s)


def messages_from(action: Action, cut: StagedGraph) -> Iterator[StreamMessage]:
    """The messages that an action sends."""
    s, micro = action.stage, action.micro
    if action.kind == "F":
        for k, port in enumerate(cut.stages[s].outputs):
            for dst in sorted(set(port.readers)):
                yield StreamMessage(value_key(StageInput(s, k), micro), port, s, dst)
    elif action.kind == "B":
        for source in cut.stages[s].inputs:
            if isinstance(source, StageInput):
                port = cut.stages[source.stage].outputs[source.output]
                if port.grad:
                    yield StreamMessage(grad_key(source, micro, s), port, s, source.stage)


class StreamMessages:
    """One rank's messages, from an empty pipeline until it is empty again."""

    def __init__(self, channels: PipelineChannels) -> None:
        self._channels = channels
        self._numbers: Counter[tuple[int, int]] = Counter()
        """(sender, receiver) -> messages so far: the tag of the next."""
        self._arriving: dict[Key, tuple[StreamMessage, Any, torch.Tensor]] = {}
        self._sent: dict[int, deque[tuple[int, StreamMessage, Any, torch.Tensor]]] = {}
        """By receiver: micro-batch, message, the work to wait for, and the tensor, which must live until then."""

    def post_receive(self, message: StreamMessage) -> None:
        """Post the receive of a message, after those of all earlier ones from the same rank."""
        if message.key in self._arriving:
            return
        buffer = message.port.receive_buffer(self._channels.device)
        with naming_peer(f"rank {self._channels.rank} of the pipeline cannot receive {message}", message.src):
            work = self._channels.receive(buffer, message.src, self._number(message))
        self._arriving[message.key] = message, work, buffer

    def wait_for(self, message: StreamMessage) -> torch.Tensor:
        """Wait for a message."""
        _, work, buffer = self._arriving.pop(message.key)
        with naming_peer(f"rank {self._channels.rank} of the pipeline did not receive {message}", message.src):
            work.wait()
        return message.port.unpack(buffer)

    def send(self, message: StreamMessage, value: torch.Tensor, micro: int) -> None:
        """Start sending a result of a micro-batch."""
        packed = message.port.pack(value)
        with naming_peer(f"rank {self._channels.rank} of the pipeline cannot send {message}", message.dst):
            work = self._channels.send(packed, message.dst, self._number(message), str(message.key[0]))
        self._sent.setdefault(message.dst, deque()).append((micro, message, work, packed))

    def confirm(self, dst: int, micro: int) -> None:
        """Release what was sent to a rank of the micro-batches up to this one, which it is known to have read."""
        sent = self._sent.get(dst, deque())
        while sent and sent[0][0] <= micro:
            _, message, work, _ = sent[0]
            with naming_peer(f"no rank received {message}", message.dst):
                work.wait()
            sent.popleft()

    def confirm_all(self, micro: int) -> None:
        """The same for all ranks."""
        for dst in self._sent:
            self.confirm(dst, micro)

    @property
    def unconfirmed(self) -> int:
        """Sends that are not known to have arrived."""
        return sum(map(len, self._sent.values()))

    def finish(self) -> None:
        """The pipeline is empty: wait until everything sent has been received, and restart the counts."""
        assert not self._arriving, f"never read: {len(self._arriving)} messages"
        for sent in self._sent.values():
            if sent:
                self.confirm(sent[-1][1].dst, sent[-1][0])
        self._numbers.clear()

    def _number(self, message: StreamMessage) -> int:
        pair = message.src, message.dst
        self._numbers[pair] += 1
        return self._numbers[pair] - 1
