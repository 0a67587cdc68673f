"""Lists all messages of one step of a pipeline, from its order and its stages, alike on every rank.

Some backends have no tags: messages from one rank to another are matched by their order alone. So that order is fixed
here: the sender's lane produces them in this order, and the receiver posts its receives in the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ...partition.stage import Port, StagedGraph, StageInput
from ...schedules.pipeline import Action, Pipeline

Key = tuple[str | int, ...]
"""The content of a message: ("value", stage, output, micro-batch), ("grad", stage, output, micro-batch, reader) or
("leaf", name, micro-batch)."""


def value_key(source: StageInput, micro: int) -> Key:
    """An output of a stage."""
    return ("value", source.stage, source.output, micro)


def grad_key(source: StageInput, micro: int, reader: int) -> Key:
    """One reader's contribution to the gradient of an output."""
    return ("grad", source.stage, source.output, micro, reader)


def leaf_key(name: str, micro: int) -> Key:
    """A tensor of the micro-batch."""
    return ("leaf", name, micro)


@dataclass(frozen=True, slots=True)
class PipelineMessage:
    """One tensor from one rank to another."""

    key: Key
    port: Port
    src: int
    dst: int
    sent_at: int
    """Position in the sender's lane of the action that produces it."""
    read_at: int
    """Position in the receiver's lane of the first action that reads it."""
    number: int
    """Its index among the messages from this sender to this receiver."""

    def __str__(self) -> str:
        what = " ".join(map(str, self.key))
        return f"{what} from rank {self.src} to rank {self.dst}"


class MessageTables:
    """The messages of one step, by sender and receiver, and by action."""

    def __init__(
        self, order: Pipeline, cuts: Sequence[StagedGraph], *, batch_on: Literal["all", "first"] = "all"
    ) -> None:
        self.order, self.cuts, self.reads = order, cuts, batch_on
        self.stage_ranks = order.homes()
        self._at = {action: i for lane in order.lanes for i, action in enumerate(lane)}
        self.sequences: dict[tuple[int, int], list[PipelineMessage]] = {}
        """(sender, receiver) -> their messages, in order."""
        self._numbers: Counter[tuple[int, int]] = Counter()
        self.sends: list[list[list[PipelineMessage]]] = []
        """By rank and position: the messages that the action sends."""
        for rank, lane in enumerate(order.lanes):
            self.sends.append([list(self._sent(rank, i, action)) for i, action in enumerate(lane)])
        self.receives: list[list[list[PipelineMessage]]] = [[[] for _ in lane] for lane in order.lanes]
        """By rank and position: the messages that the action is the first to read."""
        for messages in (m for lane in self.sends for m in lane):
            for m in messages:
                self.sequences.setdefault((m.src, m.dst), []).append(m)
                self.receives[m.dst][m.read_at].append(m)

    def readers_on(self, port: Port, rank: int) -> list[int]:
        """The stages on a rank that read a port."""
        return [t for t in port.readers if self.stage_ranks[t] == rank]

    def _sent(self, rank: int, i: int, action: Action) -> Iterator[PipelineMessage]:
        cut = self.cuts[action.micro]
        if action.kind == "F":
            if self.reads == "first" and action.stage == 0:
                for name, port in cut.batch_inputs.items():
                    yield from self._to_readers(leaf_key(name, action.micro), port, rank, i, action.micro)
            for k, port in enumerate(cut.stages[action.stage].outputs):
                key = value_key(StageInput(action.stage, k), action.micro)
                yield from self._to_readers(key, port, rank, i, action.micro)
        elif action.kind == "B":
            for source in cut.stages[action.stage].inputs:
                if isinstance(source, StageInput) and self.stage_ranks[source.stage] != rank:
                    port = cut.stages[source.stage].outputs[source.output]
                    if port.grad:
                        key = grad_key(source, action.micro, action.stage)
                        read = self._at[Action("B", source.stage, action.micro)]
                        yield self._message(key, port, rank, self.stage_ranks[source.stage], i, read)

    def _to_readers(self, key: Key, port: Port, rank: int, i: int, micro: int) -> Iterator[PipelineMessage]:
        """One message to every other rank that reads it, however many of its stages do."""
        for dst in sorted({self.stage_ranks[t] for t in port.readers} - {rank}):
            read = min(self._at[Action("F", t, micro)] for t in self.readers_on(port, dst))
            yield self._message(key, port, rank, dst, i, read)

    def _message(self, key: Key, port: Port, src: int, dst: int, sent_at: int, read_at: int) -> PipelineMessage:
        """The next message from `src` to `dst`: a sender's messages are created in the order of its lane."""
        number = self._numbers[src, dst]
        self._numbers[src, dst] += 1
        return PipelineMessage(key, port, src, dst, sent_at, read_at, number)


def forward_only(order: Pipeline) -> Pipeline:
    """The same order without its backwards, for evaluation."""
    lanes = tuple(tuple(a for a in lane if a.kind == "F") for lane in order.lanes)
    return Pipeline(f"{order.name}, forward", order.stages, order.micros, lanes)
