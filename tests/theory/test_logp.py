"""LogP: messages, the optimal broadcast, any schedule; and work and depth."""

from __future__ import annotations

import math
from functools import cache

import pytest

from drumline.clusters import Link, LogPTimes
from drumline.core.errors import InputError
from drumline.schedules import (
    ALGORITHMS,
    binomial_broadcast,
    chain_broadcast,
    collective_schedule,
    flat_broadcast,
    logp_broadcast,
    pairwise_all_to_all,
    ring_all_reduce,
)
from drumline.theory.logp import LogGP, LogP, logp_seconds
from drumline.theory.logp_trees import optimal_broadcast_seconds
from drumline.theory.work_depth import ScheduleDepth, schedule_depth

MACHINES = [(6, 2, 4), (1, 0, 1), (10, 1, 1), (0, 3, 1), (4, 1, 5), (0, 0, 1), (7, 2, 0)]


def test_a_message() -> None:
    machine = LogP(6, 2, 4, 8)
    assert machine.message_seconds(0) == machine.message_seconds(8) == 2 + 6 + 2
    assert machine.message_seconds(9) == 10 + 4
    assert LogP(6, 5, 4, 8).message_seconds(24) == 5 + 2 * 5 + 6 + 5  # the overhead is longer than the gap


def test_the_textbook_broadcast_takes_24_cycles() -> None:
    machine = LogP(6, 2, 4, 8)
    assert optimal_broadcast_seconds(machine) == 24
    assert logp_seconds(logp_broadcast(8), 8, machine) == 24
    assert logp_seconds(binomial_broadcast(8), 8, machine) == 30
    assert logp_seconds(chain_broadcast(8), 8, machine) == 7 * 10
    assert logp_seconds(flat_broadcast(8), 8, machine) == 6 * 4 + 10


@pytest.mark.parametrize(("latency", "overhead", "gap"), MACHINES)
def test_the_logp_schedule_is_optimal(latency: int, overhead: int, gap: int) -> None:
    for p in range(1, 33):
        machine = LogP(latency, overhead, gap, p)
        tree = logp_broadcast(p, p // 3, latency=latency, overhead=overhead, gap=gap)
        best = optimal_broadcast_seconds(machine)
        assert logp_seconds(tree, 1, machine) == best
        for algorithm in ALGORITHMS["broadcast"]:
            assert best <= logp_seconds(collective_schedule("broadcast", algorithm, p), 1, machine)


@pytest.mark.parametrize(("latency", "overhead", "gap"), MACHINES)
def test_no_tree_is_faster(latency: int, overhead: int, gap: int) -> None:
    """Against all trees of up to nine processors, by trying every size of the first subtree."""
    machine = LogP(latency, overhead, gap, 9)

    # The root is done when its last message is there: the step behind it does not count.
    @cache
    def best(n: int) -> float:
        ways = (
            max(machine.message_seconds(1) + best(k), machine.step + best(n - k) if n - k > 1 else 0.0)
            for k in range(1, n)
        )
        return min(ways, default=0.0)

    for n in range(1, 10):
        assert optimal_broadcast_seconds(LogP(latency, overhead, gap, n)) == best(n)


def test_a_ring_in_logp() -> None:
    """Each of the 2(p-1) rounds takes one message: nothing overlaps here."""
    machine = LogP(6, 2, 4, 4)
    assert logp_seconds(ring_all_reduce(4), 4 * 8, machine) == 6 * 10


def test_a_processor_receives_one_message_at_a_time() -> None:
    machine = LogP(6, 2, 4, 5)
    gather = collective_schedule("gather", "flat", 5)
    assert logp_seconds(gather, 5 * 8, machine) == 10 + 3 * 4


def test_work_and_depth() -> None:
    assert schedule_depth(ring_all_reduce(4), 40) == ScheduleDepth(6, 60, 4 * 60)
    assert schedule_depth(flat_broadcast(4), 40) == ScheduleDepth(1, 40, 120)
    assert schedule_depth(chain_broadcast(4), 40) == ScheduleDepth(3, 120, 120)
    # Blocks of a pairwise exchange do not need each other, though it takes three rounds.
    assert schedule_depth(pairwise_all_to_all(4), 40) == ScheduleDepth(1, 10, 120)
    assert schedule_depth(pairwise_all_to_all(4), 40).parallelism == 12
    assert schedule_depth(ring_all_reduce(1), 40).parallelism == 0
    assert str(schedule_depth(flat_broadcast(4), 40)) == "depth 1 messages, 40 bytes; work 120 bytes"


@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_depth_and_work_bound_every_schedule(p: int) -> None:
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            schedule = collective_schedule(collective, algorithm, p)
            m = 10 * schedule.chunks
            depth = schedule_depth(schedule, m)
            assert depth.rounds <= schedule.count_rounds()
            assert depth.work == sum(t.bytes for t in schedule.traffic(m))
            assert depth.bytes <= depth.work
            if p > 1 and schedule.contract.rooted and "flat" not in algorithm:
                assert 1 <= depth.rounds <= p - 1 + (p - 1).bit_length()


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(InputError, match=r"L=-1(.|\n)*not negative"):
        LogP(-1, 1, 1, 2)
    with pytest.raises(InputError, match="finite"):
        LogP(1, math.inf, 1, 2)
    with pytest.raises(InputError, match=r"P=0(.|\n)*at least 1"):
        LogP(1, 1, 1, 0)
    with pytest.raises(InputError, match=r"over 4 ranks\n.*P = 3"):
        logp_seconds(ring_all_reduce(4), 8, LogP(1, 1, 1, 3))


def test_a_measured_link_is_a_machine() -> None:
    link = Link(1e-5, 1e9, logp=LogPTimes(6e-6, 2e-6, 4e-6))
    machine = LogGP.of(link, 8)
    assert machine == LogGP(L=6e-6, o=2e-6, g=4e-6, G=1e-9, P=8)
    assert machine.message_seconds(1) == pytest.approx(10e-6)
    with pytest.raises(InputError, match="a link without L, o and g"):
        LogGP.of(Link(1e-5, 1e9), 8)
