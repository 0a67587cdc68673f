"""Optimal trees of LogP and LogGP: textbook numbers, comparison with all trees, and replay message by message."""

from __future__ import annotations

from functools import cache

import pytest

from drumline.core.errors import InputError
from drumline.schedules import chain_broadcast, flat_broadcast, ring_all_reduce
from drumline.theory.logp import LogGP, LogP, logp_seconds
from drumline.theory.logp_trees import Summation, broadcast_tree, optimal_broadcast_seconds, summation_tree


def test_the_textbook_broadcast() -> None:
    tree = broadcast_tree(LogP(L=6, o=2, g=4, P=8))
    assert [arrival.arrived for arrival in tree] == [10, 14, 18, 20, 22, 24, 24]
    assert [arrival.parent for arrival in tree] == [0, 0, 0, 1, 0, 1, 2]
    assert optimal_broadcast_seconds(LogP(6, 2, 4, 8)) == 24


def test_the_textbook_summation() -> None:
    tree = summation_tree(LogP(L=5, o=2, g=4, P=8), 28)
    assert tree.values == 79
    assert sorted((adder.values for adder in tree.adders), reverse=True) == [17, 13, 12, 11, 9, 7, 5, 5]
    assert tree.adders[0].children == (5, 3, 2, 1)  # the last to be received has had the most time
    assert [adder.done for adder in tree.adders[:4]] == [28, 18, 14, 10]


def played(tree: Summation, machine: LogP) -> None:
    """Each child has sent its sum when its parent starts to receive it; parents add own values in between."""
    for adder in tree.adders:
        begun = adder.done - 1 - machine.o  # the last thing is to receive, and to add what came
        for child in reversed(adder.children):
            assert tree.adders[child].done + machine.o + machine.L == begun
            begun -= max(machine.g, machine.o + 1)
        assert len(adder.children) * (machine.o + 1) + adder.values - 1 == adder.done
        assert adder.values >= 1


@pytest.mark.parametrize("machine", [LogP(5, 2, 4, 8), LogP(1, 0, 1, 8), LogP(3, 1, 1, 16), LogP(0, 1, 3, 4)])
@pytest.mark.parametrize("time", [0, 1, 5, 9, 17, 28, 40])
def test_a_summation_can_be_replayed(machine: LogP, time: int) -> None:
    played(summation_tree(machine, time), machine)


@pytest.mark.parametrize(("latency", "overhead", "gap"), [(5, 2, 4), (1, 0, 1), (2, 1, 1), (3, 1, 5)])
def test_no_tree_sums_more(latency: int, overhead: int, gap: int) -> None:
    """Against every way to distribute P - 1 processors to children, each as late as possible."""
    late, apart = latency + 2 * overhead + 1, max(gap, overhead + 1)

    @cache
    def most(time: int, p: int) -> int:
        """The most values by `time` with p processors."""
        return max(time + 1, best_children(time, time - late, p - 1))

    @cache
    def best_children(time: int, deadline: int, p: int) -> int:
        """With children from `deadline` backwards, at least one; p processors are left for them."""
        best = -1
        for count in range(1, p + 1) if deadline >= 0 else ():
            child = most(deadline, count) - (overhead + 1)
            rest = max(time + 1, best_children(time, deadline - apart, p - count))
            best = max(best, child + rest)
        return best

    for p in (1, 2, 3, 5, 8):
        for time in (0, 3, 8, 14, 20):
            assert summation_tree(LogP(latency, overhead, gap, p), time).values == most(time, p)


def test_a_long_message_in_loggp() -> None:
    machine = LogGP(L=6, o=2, g=4, G=0.5, P=8)
    assert machine.message_seconds(1) == 2 + 6 + 2
    assert machine.message_seconds(101) == 2 + 100 * 0.5 + 6 + 2
    assert logp_seconds(chain_broadcast(3), 101, machine) == 2 * 60
    # the root's second message waits for the bytes of the first, and for the gap
    assert logp_seconds(flat_broadcast(3), 101, machine) == (50 + 4) + 60
    assert logp_seconds(ring_all_reduce(4), 4 * 101, machine) == 6 * 60


def test_short_messages_are_the_same_in_both_models() -> None:
    one, other = LogP(6, 2, 4, 8, word=1), LogGP(6, 2, 4, 0.25, 8)
    assert broadcast_tree(one) == broadcast_tree(other)
    assert summation_tree(one, 28) == summation_tree(other, 28)


def test_long_messages_have_another_optimal_tree() -> None:
    """The longer the message, the later the second send: the tree becomes binomial."""
    machine = LogGP(6, 2, 4, 1, 8)
    short, long = broadcast_tree(machine, 1), broadcast_tree(machine, 10_000)
    assert [a.parent for a in short] != [a.parent for a in long]
    assert optimal_broadcast_seconds(machine, 10_000) == pytest.approx(3 * 10_009, rel=1e-3)


def test_invalid_times_are_refused() -> None:
    with pytest.raises(InputError, match="summation until -1"):
        summation_tree(LogP(1, 1, 1, 2), -1)
    with pytest.raises(InputError, match="LogGP with L=1, o=1, g=1, G=-1"):
        LogGP(1, 1, 1, -1, 2)
    assert summation_tree(LogP(1, 1, 1, 1), 9).values == 10
    assert broadcast_tree(LogP(1, 1, 1, 1)) == ()
