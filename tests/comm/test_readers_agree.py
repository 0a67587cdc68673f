"""The standing test: what a schedule costs when it runs, when it is priced and when it is replayed is the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drumline.cluster import Link
from drumline.comm import Communicator, Transport, run_threads
from drumline.cost.collectives import CLOSED_FORMS, price
from drumline.schedule import ALGORITHMS, Schedule, Send, Traffic, collective_schedule, prove, ring_all_reduce
from drumline.simulate import replay
from drumline.timeline import Timeline

NAMES = [(c, a) for c, algorithms in ALGORITHMS.items() for a in algorithms]
SIZES = (0, 1, 5, 64, 2520, 4099)
ITEMSIZE = 4
LINK = Link(2.5e-6, 3.1e9)


def ran(schedule: Schedule, sizes: tuple[int, ...]) -> list[tuple[Traffic, ...]]:
    """By size, then by rank: what was sent while running over threads."""

    def body(transport: Transport) -> list[Traffic]:
        torch.set_num_threads(1)
        comm = Communicator(transport)
        return [comm.run(schedule, torch.ones(n, dtype=torch.float32)) for n in sizes]

    return list(zip(*run_threads(body, schedule.p), strict=True))


def replayed(timeline: Timeline, p: int) -> tuple[Traffic, ...]:
    """By rank: what the spans of a replay say. Their names are `round k: src->dst`."""
    total = [Traffic()] * p
    rounds: list[set[str]] = [set() for _ in range(p)]
    for span in timeline.spans:
        k, _, pair = span.name.partition(": ")
        src, dst = map(int, pair.split("->"))
        assert src == span.rank
        total[src] += Traffic(messages=1, bytes=int(span.bytes))
        rounds[src].add(k)
        rounds[dst].add(k)
    return tuple(t + Traffic(rounds=len(seen)) for t, seen in zip(total, rounds, strict=True))


@pytest.mark.parametrize("p", range(1, 10))
@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_run_price_and_replay_agree(collective: str, algorithm: str, p: int) -> None:
    schedule = collective_schedule(collective, algorithm, p, root=p - 1)
    prove(schedule)
    for size, counted in zip(SIZES, ran(schedule, SIZES), strict=True):
        m = ITEMSIZE * size
        timeline = replay(schedule, m, LINK, itemsize=ITEMSIZE)
        assert counted == schedule.traffic(m, itemsize=ITEMSIZE)
        assert counted == replayed(timeline, p)
        priced = price(schedule, m, LINK, itemsize=ITEMSIZE)
        assert timeline.seconds == pytest.approx(priced, rel=1e-12, abs=0)
        closed = CLOSED_FORMS[collective, algorithm](p, m, LINK)
        if size % schedule.chunks == 0:
            assert priced == pytest.approx(closed, rel=1e-12, abs=0)
        else:
            assert priced > closed  # the longest chunk of an uneven division decides


def test_several_chunks_in_one_message() -> None:
    """Recursive halving and doubling over four ranks, by hand: messages of two chunks, then of one, and back."""
    half = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    down = tuple(Send(r, r ^ 2, c, True) for r in range(4) for c in half[r ^ 2])
    last = tuple(Send(r, r ^ 1, r ^ 1, True) for r in range(4))
    back = tuple(Send(r, r ^ 1, r, False) for r in range(4))
    up = tuple(Send(r, r ^ 2, c, False) for r in range(4) for c in half[r])
    schedule = dataclasses.replace(ring_all_reduce(4), name="halving", rounds=(down, last, back, up))
    prove(schedule)
    for size, counted in zip((0, 3, 4, 10), ran(schedule, (0, 3, 4, 10)), strict=True):
        timeline = replay(schedule, 4 * size, LINK, itemsize=4)
        assert counted == schedule.traffic(4 * size, itemsize=4) == replayed(timeline, 4)

    def body(transport: Transport) -> list[float]:
        tensor = torch.arange(10.0) + transport.rank
        Communicator(transport).run(schedule, tensor)
        return tensor.tolist()

    assert run_threads(body, 4) == [[4.0 * i + 6 for i in range(10)]] * 4


def test_a_chunk_sent_and_written_in_one_round_is_sent_as_it_was() -> None:
    """Two ranks swap the same chunk: each must send what it held before the round."""
    swap = (Send(0, 1, 0, False), Send(1, 0, 0, False))
    schedule = dataclasses.replace(ring_all_reduce(2), chunks=1, rounds=(swap, swap, swap))

    def body(transport: Transport) -> int:
        tensor = torch.tensor([transport.rank])
        Communicator(transport).run(schedule, tensor)
        return int(tensor.item())

    assert run_threads(body, 2) == [1, 0]


def test_the_order_of_operands_is_the_stated_one() -> None:
    """Subtraction tells: received - local, or local - received."""
    schedule = dataclasses.replace(ring_all_reduce(2), chunks=1, rounds=((Send(0, 1, 0, True),),))

    def difference(order: str) -> float:
        def body(transport: Transport) -> float:
            tensor = torch.tensor([10.0 if transport.rank == 0 else 3.0])
            comm = Communicator(transport)
            comm._execute(dataclasses.replace(schedule, order=order), [tensor], torch.sub)
            return tensor.item()

        return run_threads(body, 2)[1]

    assert (difference("received"), difference("local")) == (7.0, -7.0)
