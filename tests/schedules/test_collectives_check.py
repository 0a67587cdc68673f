"""The checker reports each kind of mistake with rank, round and chunk; properties of schedules."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable

import pytest

from drumline.core.errors import InputError, VerificationError
from drumline.schedules import (
    Schedule,
    Send,
    Traffic,
    binomial_broadcast,
    collective_schedule,
    dissemination_barrier,
    messages,
    prove,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from drumline.schedules.spec import even_ranges


def mutate(schedule: Schedule, change: Callable[[list[list[Send]]], object]) -> Schedule:
    """The schedule with other rounds."""
    rounds = [list(sends) for sends in schedule.rounds]
    change(rounds)
    return dataclasses.replace(schedule, rounds=tuple(map(tuple, rounds)))


def refused(schedule: Schedule) -> tuple[str, str]:
    """The error of the checker, and its place."""
    with pytest.raises(VerificationError) as caught:
        prove(schedule)
    assert caught.value.exit_code == 4
    return caught.value.what, caught.value.where


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8, 9, 33])
def test_rounds_and_bytes_match_theory(p: int) -> None:
    m = 12 * p
    assert ring_all_reduce(p).traffic(m) == (Traffic(2 * (p - 1), 2 * (p - 1), 2 * (p - 1) * 12),) * p
    assert ring_all_gather(p).traffic(m) == (Traffic(p - 1, p - 1, (p - 1) * 12),) * p
    assert ring_reduce_scatter(p).traffic(m) == (Traffic(p - 1, p - 1, (p - 1) * 12),) * p
    broadcast = binomial_broadcast(p, p - 1)
    assert broadcast.count_rounds() == (p - 1).bit_length()
    assert sum(t.messages for t in broadcast.traffic(m)) == p - 1


def test_a_lost_contribution_is_detected() -> None:
    broken = mutate(ring_all_reduce(4), lambda rounds: rounds[2].pop(1))
    what, where = refused(broken)
    assert what == "rank 0 ends without rank 0's contribution to chunk 2"
    assert where == "ring_all_reduce p=4: round 4, rank 0, chunk 2"


def test_a_contribution_added_twice_is_detected() -> None:
    broken = mutate(ring_all_reduce(4), lambda rounds: rounds[1].append(rounds[1][2]))
    what, where = refused(broken)
    assert what == "rank 3 adds rank 1's contribution to chunk 0 twice"
    assert where == "ring_all_reduce p=4: round 1, rank 3, chunk 0"


def test_reducing_instead_of_replacing_is_detected() -> None:
    def change(rounds: list[list[Send]]) -> None:
        rounds[3][0] = dataclasses.replace(rounds[3][0], reduce=True)

    what, where = refused(mutate(ring_all_reduce(4), change))
    assert what == "rank 1 adds rank 1's contribution to chunk 0 twice"
    assert where == "ring_all_reduce p=4: round 3, rank 1, chunk 0"


def test_replacing_instead_of_reducing_is_detected() -> None:
    def change(rounds: list[list[Send]]) -> None:
        rounds[0][0] = dataclasses.replace(rounds[0][0], reduce=False)

    what, _ = refused(mutate(ring_reduce_scatter(4), change))
    assert what == "rank 3 ends without rank 1's contribution to chunk 3"


def test_sending_a_missing_chunk_is_detected() -> None:
    broken = mutate(binomial_broadcast(8, root=3), lambda rounds: rounds[0].clear())
    what, where = refused(broken)
    assert what == "rank 4 sends chunk 0, which it does not have"
    assert where == "binomial_broadcast p=8: round 1, rank 4, chunk 0"


def test_a_rank_left_out_is_detected() -> None:
    broken = mutate(binomial_broadcast(6), lambda rounds: rounds[-1].pop())
    what, where = refused(broken)
    assert what == "rank 5 ends without chunk 0"
    assert where == "binomial_broadcast p=6: before any round, rank 5, chunk 0"


def test_reducing_into_a_missing_chunk_is_detected() -> None:
    def change(rounds: list[list[Send]]) -> None:
        rounds[0][0] = dataclasses.replace(rounds[0][0], reduce=True)

    what, where = refused(mutate(ring_all_gather(3), change))
    assert what == "rank 1 adds to chunk 0, which it does not have"
    assert where.endswith("round 0, rank 1, chunk 0")


def test_two_writes_in_one_round_are_detected() -> None:
    broken = mutate(ring_all_gather(3), lambda rounds: rounds[1].append(Send(1, 0, 1, False)))
    what, where = refused(mutate(broken, lambda rounds: rounds[1].append(Send(1, 0, 1, False))))
    assert what == "rank 0 receives chunk 1 twice in the same round"
    assert where.endswith("round 1, rank 0, chunk 1")


def test_a_round_reads_the_state_before_it() -> None:
    """Both rounds of a broadcast at once: rank 1 does not have the chunk when the round begins."""
    s = binomial_broadcast(4)
    merged = dataclasses.replace(s, rounds=(tuple(itertools.chain(*s.rounds)),))
    assert refused(merged)[0] == "rank 1 sends chunk 0, which it does not have"


@pytest.mark.parametrize(
    ("send", "what"),
    [
        (Send(0, 3, 0, True), "the send 0->3 +0 names rank 3 of 3"),
        (Send(-1, 0, 0, False), "the send -1->0 =0 names rank -1 of 3"),
        (Send(0, 1, 3, False), "the send 0->1 =3 names chunk 3 of 3"),
        (Send(2, 2, 1, False), "rank 2 sends chunk 1 to itself"),
    ],
)
def test_unknown_ranks_and_chunks_are_detected(send: Send, what: str) -> None:
    broken = mutate(ring_all_reduce(3), lambda rounds: rounds[1].insert(0, send))
    assert refused(broken)[0] == what


def test_surplus_contributions_are_detected() -> None:
    s = binomial_broadcast(2)
    everyone = dataclasses.replace(s.contract, before=lambda s, rank, chunk: True)
    broken = dataclasses.replace(s, contract=everyone, rounds=((Send(0, 1, 0, True),),))
    assert refused(broken)[0] == "rank 1 ends with rank 1's contribution to chunk 0"


def test_every_single_change_of_a_ring_is_detected() -> None:
    """Dropping, doubling, reversing or flipping any send breaks the proof."""
    schedule = ring_all_reduce(5)
    rounds = [list(sends) for sends in schedule.rounds]
    for k, i in itertools.product(range(len(rounds)), range(5)):
        send = rounds[k][i]
        flipped = dataclasses.replace(send, reduce=not send.reduce)
        turned = dataclasses.replace(send, src=send.dst, dst=send.src)
        for changed in ([], [send, send], [flipped], [turned]):
            copy = [list(sends) for sends in rounds]
            copy[k][i : i + 1] = changed
            with pytest.raises(VerificationError):
                prove(dataclasses.replace(schedule, rounds=tuple(map(tuple, copy))))


def test_order_of_operands_and_bits() -> None:
    """An exchange of sums gives equal bits on both ranks; three in different orders do not."""
    s = ring_all_reduce(2)
    pair = dataclasses.replace(s, chunks=1, rounds=((Send(0, 1, 0, True), Send(1, 0, 0, True)),))
    assert prove(pair).identical
    assert not prove(pair).in_rank_order  # rank 0 computed received 1 + own 0
    others = [Send(src, dst, 0, True) for dst in range(3) for src in range(3) if src != dst]
    direct = dataclasses.replace(ring_all_reduce(3), chunks=1, rounds=(tuple(others),))
    assert not prove(direct).identical
    chain = (Send(0, 1, 0, True),), (Send(1, 2, 0, True),), (Send(2, 0, 0, False), Send(2, 1, 0, False))
    assert prove(dataclasses.replace(direct, rounds=chain)).in_rank_order
    assert prove(dataclasses.replace(direct, rounds=chain, order="rank")).in_rank_order
    assert not prove(dataclasses.replace(direct, rounds=chain, order="local")).in_rank_order


def test_rank_order_covers_whole_ranges() -> None:
    """(0+1)+2 is in order, (0+2)+1 is not, although each addition puts the lower rank first."""
    pair = dataclasses.replace(ring_all_reduce(2), chunks=1, rounds=((Send(0, 1, 0, True), Send(1, 0, 0, True)),))
    assert prove(dataclasses.replace(pair, order="rank")).in_rank_order
    three = dataclasses.replace(ring_all_reduce(3), chunks=1, order="rank")
    back = (Send(0, 1, 0, False), Send(0, 2, 0, False))
    near = dataclasses.replace(three, rounds=((Send(1, 0, 0, True), Send(2, 0, 0, True)), back))
    far = dataclasses.replace(three, rounds=((Send(2, 0, 0, True), Send(1, 0, 0, True)), back))
    assert prove(near).in_rank_order
    assert not prove(far).in_rank_order
    assert (near.received_first(Send(0, 1, 0, True)), near.received_first(Send(1, 0, 0, True))) == (True, False)


def test_only_a_barrier_may_add_twice() -> None:
    barrier = dissemination_barrier(3)
    assert prove(barrier).rounds == 2
    summing = dataclasses.replace(barrier, contract=ring_all_reduce(3).contract)
    assert refused(summing)[0] == "rank 2 adds rank 2's contribution to chunk 0 twice"


def test_fan_in_counts_messages_not_chunks() -> None:
    sends = (Send(0, 2, 0, True), Send(0, 2, 1, True), Send(1, 2, 0, True), Send(2, 1, 0, True))
    assert dataclasses.replace(ring_all_reduce(3), rounds=(sends,)).fan_in == 2
    assert ring_all_reduce(5).fan_in == 1
    assert ring_all_reduce(1).fan_in == 0


def test_sends_of_one_round_and_pair_are_one_message() -> None:
    sends = (Send(0, 1, 0, True), Send(1, 0, 0, True), Send(0, 1, 1, True))
    assert {pair: len(parts) for pair, parts in messages(sends).items()} == {(0, 1): 2, (1, 0): 1}
    schedule = dataclasses.replace(ring_all_reduce(2), rounds=(sends,))
    assert schedule.traffic(7, itemsize=1) == (Traffic(1, 1, 7), Traffic(1, 1, 4))


@pytest.mark.parametrize(("total", "parts"), [(0, 3), (1, 4), (7, 3), (9, 3), (5, 8)])
def test_ranges_are_those_of_tensor_split(total: int, parts: int) -> None:
    torch = pytest.importorskip("torch")
    pieces = torch.tensor_split(torch.arange(total), parts)
    assert [stop - start for start, stop in even_ranges(total, parts)] == [len(piece) for piece in pieces]
    assert even_ranges(total, parts)[0][0] == 0
    assert even_ranges(total, parts)[-1][1] == total


def test_a_schedule_is_a_value() -> None:
    assert ring_all_reduce(4) == ring_all_reduce(4)
    assert ring_all_reduce(4) != ring_all_reduce(5)
    assert binomial_broadcast(4, 1) != binomial_broadcast(4, 2)
    assert hash(ring_all_reduce(4)) == hash(ring_all_reduce(4))
    assert pickle.loads(pickle.dumps(ring_all_reduce(4))) == ring_all_reduce(4)
    assert list(ring_all_reduce(3).rounds) == list(ring_all_reduce(3).rounds)


def test_str() -> None:
    assert str(ring_all_reduce(4)) == (
        "ring_all_reduce p=4: 6 rounds; a rank sends at most 6 messages, 3/2 m bytes (m bytes in 4 chunks)"
    )
    assert str(binomial_broadcast(2)) == (
        "binomial_broadcast p=2: 1 round; a rank sends at most 1 message, m bytes (m bytes in 1 chunk)"
    )
    assert str(ring_all_gather(1)).startswith("ring_all_gather p=1: 0 rounds; a rank sends at most 0 messages, 0 bytes")
    assert str(prove(ring_all_reduce(3))) == (
        "proved: ring_all_reduce p=3 (4 rounds, 12 sends, the same bits on all ranks)"
    )
    assert str(Traffic(1, 2, 3) + Traffic(1, 0, 0)) == "2 rounds, 2 messages, 3 bytes sent"


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"unknown algorithm 'rign' for all_reduce\n.*known: ring, halving.*\n.*mean 'ring'"
    ):
        collective_schedule("all_reduce", "rign", 4)
    with pytest.raises(InputError, match=r"unknown collective 'allreduce'(.|\n)*Did you mean 'all_reduce'\?"):
        collective_schedule("allreduce", "ring", 4)
    with pytest.raises(InputError, match=r"ring_all_reduce over 0 ranks\n.*at least one rank"):
        ring_all_reduce(0)
    with pytest.raises(InputError, match=r"root 4\n.*0 <= root < p = 4"):
        binomial_broadcast(4, 4)
    with pytest.raises(InputError, match=r"ring_all_reduce of 10 bytes\n.*a multiple of the 4 bytes"):
        ring_all_reduce(2).traffic(10, itemsize=4)
    with pytest.raises(InputError, match="at least one chunk"):
        dataclasses.replace(ring_all_reduce(2), chunks=0)
