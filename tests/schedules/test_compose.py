"""Segmented, reordered, embedded and parallel schedules are proved for every algorithm."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import pytest

from drumline.core.errors import InputError, VerificationError
from drumline.schedules import (
    ALGORITHMS,
    Send,
    chain_broadcast,
    collective_schedule,
    double_tree_all_reduce,
    prove,
    reordered,
    ring_all_gather,
    ring_all_reduce,
    segmented,
)
from drumline.schedules.compose import embedded, in_parallel

NAMES = [(c, a) for c, algorithms in ALGORITHMS.items() for a in algorithms]
ORDERS = {2: (1, 0), 4: (2, 0, 3, 1), 5: (3, 1, 4, 0, 2), 8: (5, 2, 7, 0, 1, 6, 3, 4)}


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_segments_of_every_schedule_are_proved(collective: str, algorithm: str, n: int) -> None:
    for p in (1, 2, 3, 4, 7, 8, 13):
        whole = collective_schedule(collective, algorithm, p, root=p // 2, per_node=max(1, p // 2))
        parts = segmented(whole, n)
        before, after = prove(whole), prove(parts)
        assert after.sends == n * before.sends
        assert after.rounds == (before.rounds + n - 1 if before.rounds else 0)
        assert (after.identical, after.in_rank_order) == (before.identical, before.in_rank_order)
        for elements in (0, 1, 5, 97, 840):
            cut = parts.ranges(elements)
            # The parts of a chunk lie one behind the other in it.
            for chunk, (start, stop) in enumerate(whole.ranges(elements)):
                run = cut[chunk * n : chunk * n + n]
                assert (run[0][0], run[-1][1]) == (start, stop)
                assert all(a[1] == b[0] for a, b in itertools.pairwise(run))
            assert sum(t.bytes for t in parts.traffic(elements)) == sum(t.bytes for t in whole.traffic(elements))


def test_a_chain_in_segments_is_a_pipeline() -> None:
    rounds = list(segmented(chain_broadcast(4), 3).rounds)
    assert [sorted(map(str, sends)) for sends in rounds] == [
        ["0->1 =0"],
        ["0->1 =1", "1->2 =0"],
        ["0->1 =2", "1->2 =1", "2->3 =0"],
        ["1->2 =2", "2->3 =1"],
        ["2->3 =2"],
    ]


def test_one_segment_is_the_schedule_itself() -> None:
    schedule = ring_all_reduce(4)
    assert segmented(schedule, 1) is schedule
    twice = segmented(segmented(schedule, 2), 3)
    assert (twice.name, twice.chunks) == ("ring_all_reduce/2/3", 24)
    assert prove(twice).identical


def test_a_segmented_schedule_is_a_value() -> None:
    schedule = segmented(double_tree_all_reduce(5), 4)
    assert schedule == segmented(double_tree_all_reduce(5), 4) != segmented(double_tree_all_reduce(5), 3)
    assert hash(schedule) == hash(segmented(double_tree_all_reduce(5), 4))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert list(schedule.rounds) == list(schedule.rounds)


def test_a_lost_segment_is_detected() -> None:
    parts = segmented(chain_broadcast(4), 3)
    rounds = list(parts.rounds)
    rounds[2] = tuple(s for s in rounds[2] if s.chunk != 1)
    with pytest.raises(VerificationError, match="rank 2 sends chunk 1, which it does not have"):
        prove(dataclasses.replace(parts, rounds=tuple(rounds)))


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
@pytest.mark.parametrize("p", ORDERS)
def test_reordered_schedules_are_proved(collective: str, algorithm: str, p: int) -> None:
    schedule = collective_schedule(collective, algorithm, p, root=p - 1)
    if schedule.contract.chunk_names == "line":
        with pytest.raises(InputError, match=r"in another order\n.*ranks keep their places"):
            reordered(schedule, ORDERS[p])
        return
    for base in (schedule, segmented(schedule, 3)):
        other = reordered(base, ORDERS[p])
        before, after = prove(base), prove(other)
        assert (after.rounds, after.sends) == (before.rounds, before.sends)
        assert other.root == (ORDERS[p][p - 1] if base.contract.rooted else 0)
        m = 24 * base.chunks
        moved = [other.traffic(m)[r] for r in ORDERS[p]]
        assert tuple(moved) == base.traffic(m)


def test_a_ring_follows_the_given_order() -> None:
    sends = next(iter(reordered(ring_all_gather(4), (2, 0, 3, 1)).rounds))
    assert sends == (Send(2, 0, 2, False), Send(0, 3, 0, False), Send(3, 1, 3, False), Send(1, 2, 1, False))
    assert reordered(ring_all_gather(4), (0, 1, 2, 3)) == ring_all_gather(4)
    schedule = reordered(ring_all_gather(4), (2, 0, 3, 1))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(schedule) == hash(reordered(ring_all_gather(4), [2, 0, 3, 1]))


def test_parallel_and_embedded_schedules() -> None:
    left = embedded([[Send(0, 1, 0, True)], [Send(1, 0, 0, False)]], (4, 5), lambda c: (c, c + 1))
    right = [[Send(0, 1, 7, False)]]
    assert list(in_parallel([left, right])) == [
        [Send(4, 5, 0, True), Send(4, 5, 1, True), Send(0, 1, 7, False)],
        [Send(5, 4, 0, False), Send(5, 4, 1, False)],
    ]


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(InputError, match=r"ring_all_reduce in 0 segments\n.*at least one"):
        segmented(ring_all_reduce(4), 0)
    with pytest.raises(InputError, match=r"in the order 0, 1, 1, 2\n.*each of the ranks 0 to 3 once"):
        reordered(ring_all_reduce(4), (0, 1, 1, 2))
