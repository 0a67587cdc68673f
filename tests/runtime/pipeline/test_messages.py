"""The messages of a step: their order between each pair of ranks, and when sends are known to have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pipeline_functions as on
import pytest
import torch

from drumline.core.errors import GaveUp
from drumline.runtime.pipeline.channels import StepMessages
from drumline.runtime.pipeline.messages import MessageTables, PipelineMessage, forward_only
from drumline.schedules.pipeline import Pipeline, one_f_one_b, pipeline_order


def tables(order: Pipeline, name: str = "skip", reads: Any = "all") -> MessageTables:
    made = on.even_cut(on.captured(name, 3), order.stages)
    return MessageTables(order, [made] * order.micros, batch_on=reads)


@pytest.mark.parametrize(
    ("order", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)]
)
def test_sender_and_receiver_agree_on_the_order(order: str, virtual: int) -> None:
    made = tables(pipeline_order(order, 3, 4, virtual), reads="first")
    listed = 0
    for (src, dst), messages in made.sequences.items():
        assert src != dst and [m.number for m in messages] == list(range(len(messages)))
        assert [m.sent_at for m in messages] == sorted(m.sent_at for m in messages)
        assert len({m.key for m in messages}) == len(messages)
        listed += len(messages)
        for m in messages:
            assert m in made.sends[src][m.sent_at] and m in made.receives[dst][m.read_at]
    assert listed == sum(len(ms) for lane in made.receives for ms in lane)
    assert {m.key[0] for ms in made.sequences.values() for m in ms} == {"value", "grad", "leaf"}


def test_forward_only_has_no_gradient_messages() -> None:
    made = tables(forward_only(one_f_one_b(2, 2)))
    assert {m.key[0] for ms in made.sequences.values() for m in ms} == {"value"} and (1, 0) not in made.sequences


class Work:
    def __init__(self, error: Exception | None = None) -> None:
        self.waited, self.error = False, error

    def wait(self) -> None:
        if self.error:
            raise self.error
        self.waited = True


class FakeWires:
    """Records its calls."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self.asked: list[tuple[int, int]] = []
        self.works: list[Work] = []
        self.broken: Exception | None = None

    def send(self, tensor: torch.Tensor, dst: int, tag: int, name: str) -> Work:
        self.works.append(Work(self.broken))
        return self.works[-1]

    def receive(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        self.asked.append((src, tag))
        return Work(self.broken)


def exchange(made: MessageTables, rank: int) -> tuple[StepMessages, FakeWires]:
    wires = FakeWires(rank)
    return StepMessages(wires, made.sequences), wires  # type: ignore[arg-type]


def messages(made: MessageTables, rank: int, kind: str) -> Sequence[PipelineMessage]:
    return [m for ms in made.sends[rank] for m in ms if m.key[0] == kind]


def test_receives_are_posted_in_sender_order() -> None:
    made = tables(on.gpipe(2, 3))
    line = made.sequences[0, 1]
    ours, wires = exchange(made, 1)
    ours.post_receive(line[2])  # and so those before it
    ours.post_receive(line[1])
    ours.post_receive(line[3])
    assert wires.asked == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_send_is_released_when_its_receiver_has_read_it() -> None:
    made = tables(one_f_one_b(2, 4), "mlp")
    ours, wires = exchange(made, 0)
    values, grads = made.sequences[0, 1], made.sequences[1, 0]
    for m in values[:2]:
        ours.send(m, torch.zeros(m.port.shape, dtype=m.port.dtype))
    ours.post_receive(grads[0])
    assert len(list(ours.unfinished_sends)) == 2
    ours.wait_for(grads[0])  # the other rank has run F0 and B0, and not F1
    assert [m.key for m in ours.unfinished_sends] == [values[1].key] and [w.waited for w in wires.works] == [
        True,
        False,
    ]
    ours.finish()
    assert wires.works[1].waited and not list(ours.unfinished_sends)


def test_missing_message_is_named() -> None:
    made = tables(one_f_one_b(2, 2), "mlp")
    ours, wires = exchange(made, 0)
    wires.broken = RuntimeError("connection closed\nfar away")
    ours.post_receive(made.sequences[1, 0][0])
    with pytest.raises(GaveUp) as caught:
        ours.wait_for(made.sequences[1, 0][0])
    assert caught.value.where == "connection closed" and "grad 0 0 0 1 from rank 1 to rank 0" in caught.value.what
    first = made.sequences[0, 1][0]
    ours.send(first, torch.zeros(first.port.shape, dtype=first.port.dtype))
    with pytest.raises(GaveUp, match="no rank received value 0 0 0 from rank 0 to rank 1"):
        ours.finish()


def test_dead_peer_is_named_when_a_message_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend may raise when a message is started, before any wait."""

    def refused(*_: object) -> None:
        raise RuntimeError("Connection reset by peer\nfar away")

    made = tables(one_f_one_b(2, 2), "mlp")
    ours, wires = exchange(made, 0)
    first, answer = made.sequences[0, 1][0], made.sequences[1, 0][0]
    monkeypatch.setattr(wires, "send", refused)
    monkeypatch.setattr(wires, "receive", refused)
    with pytest.raises(GaveUp, match="rank 0 of the pipeline cannot send value 0 0 0 from rank 0 to rank 1") as caught:
        ours.send(first, torch.zeros(first.port.shape, dtype=first.port.dtype))
    assert caught.value.where == "Connection reset by peer" and caught.value.fix == "see what rank 1 says"
    with pytest.raises(GaveUp, match="cannot receive grad 0 0 0 1 from rank 1 to rank 0"):
        ours.post_receive(answer)


def test_an_error_of_this_rank_is_its_own() -> None:
    made = tables(one_f_one_b(2, 2), "mlp")
    ours, wires = exchange(made, 0)
    wires.broken = RuntimeError("can't allocate memory")
    ours.post_receive(made.sequences[1, 0][0])
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        ours.wait_for(made.sequences[1, 0][0])
