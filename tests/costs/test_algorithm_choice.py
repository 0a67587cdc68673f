"""The cheapest algorithm for a collective, against the price of all of them; rings ordered by measured links."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from drumline.clusters import Link
from drumline.core.errors import InputError
from drumline.costs.algorithm_choice import (
    MANY_RANKS,
    SEGMENTED_ALGORITHMS,
    SEGMENTS,
    SMALLEST_CHUNK,
    AlgorithmChoice,
    cheapest_algorithm,
)
from drumline.costs.collectives import price
from drumline.costs.ring_order import EXACT_RANKS, ring_length, ring_order
from drumline.schedules import ALGORITHMS, IN_RANK_ORDER, collective_schedule, reordered, segmented
from drumline.theory.alpha_beta import Links, NodeTopology, message_seconds
from drumline.theory.collective_forms import CLOSED_FORMS

LINK = Link(5e-6, 4e9)
NODES = NodeTopology(2, Link(2e-6, 5e10), Link(2e-5, 1e9))


def seconds(collective: str, choice: AlgorithmChoice, p: int, m: int, links: Links, per_node: int) -> float:
    """The price of a choice, from the schedule that it names."""
    schedule = collective_schedule(collective, choice.algorithm, p, per_node=per_node)
    if choice.order is not None:
        schedule = reordered(schedule, choice.order)
    return price(segmented(schedule, choice.segments), m, links)


@pytest.mark.parametrize("links", [LINK, NODES], ids=["one link", "nodes"])
@pytest.mark.parametrize("p", [1, 2, 3, 6])
@pytest.mark.parametrize("collective", ALGORITHMS)
def test_no_other_algorithm_is_cheaper(collective: str, p: int, links: Links) -> None:
    for m in (0, 60, 4096 * 60, 1 << 25):
        choice = cheapest_algorithm(collective, p, m, links, per_node=2)
        assert seconds(collective, choice, p, m, links, 2) == pytest.approx(choice.seconds, rel=1e-4)
        for algorithm in ALGORITHMS[collective]:
            schedule = collective_schedule(collective, algorithm, p, per_node=2)
            for n in SEGMENTS:
                if n * schedule.chunks <= 128 and (n == 1 or m >= n * SMALLEST_CHUNK * schedule.chunks):
                    assert choice.seconds <= price(segmented(schedule, n), m, links) * (1 + 1e-6)


def test_small_messages_take_few_rounds_and_large_ones_few_bytes() -> None:
    assert cheapest_algorithm("all_reduce", 8, 64, LINK).algorithm == "doubling"
    assert cheapest_algorithm("all_reduce", 8, 1 << 26, LINK).algorithm in ("halving", "ring")
    assert cheapest_algorithm("all_reduce", 7, 1 << 26, LINK).algorithm == "ring"
    assert cheapest_algorithm("broadcast", 8, 64, LINK).algorithm == "binomial"
    long = cheapest_algorithm("broadcast", 8, 1 << 26, LINK)
    assert (long.algorithm, long.segments) == ("chain", 64)
    assert cheapest_algorithm("all_to_all", 8, 64, LINK).algorithm == "bruck"
    assert cheapest_algorithm("all_to_all", 8, 1 << 20, LINK).algorithm == "pairwise"
    assert cheapest_algorithm(
        "all_reduce", 12, 1 << 24, NodeTopology(4, Link(1e-6, 1e11), Link(1e-5, 1e9)), per_node=4
    ).algorithm == ("hierarchical")
    assert str(long).startswith("chain in 64 segments: ")


def test_segments_are_not_cut_too_small() -> None:
    for m in (1 << 12, 1 << 14, 1 << 16, 1 << 22):
        choice = cheapest_algorithm("broadcast", 16, m, Link(1e-12, 1e9))
        assert choice.segments == 1 or m // choice.segments >= SMALLEST_CHUNK


@pytest.mark.parametrize("p", [2, 5, 8, MANY_RANKS])
def test_operations_that_do_not_commute_keep_the_order_of_ranks(p: int) -> None:
    for collective, known in IN_RANK_ORDER.items():
        for m in (8, 1 << 24):
            choice = cheapest_algorithm(collective, p, m, LINK, commutes=False)
            assert choice.algorithm in known
            assert choice.order is None


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_many_ranks_use_closed_forms(collective: str) -> None:
    """By closed form where it is exact; no worse than pricing all algorithms."""
    for p in (MANY_RANKS, 100):
        for m in (64, 1 << 24):
            choice = cheapest_algorithm(collective, p, m, LINK)
            best = min(CLOSED_FORMS[collective, a](p, m, LINK) for a in ALGORITHMS[collective])
            assert choice.seconds <= best * (1 + 1e-12)
            if choice.segments == 1:
                assert choice.seconds == pytest.approx(best, rel=1e-12)
            else:
                assert choice.algorithm in SEGMENTED_ALGORITHMS[collective]


def test_another_size_is_priced_at_once() -> None:
    for collective in ALGORITHMS:
        cheapest_algorithm(collective, 8, 1 << 20, LINK)
    start = time.process_time()  # of this process alone, so that a crowded machine does not count
    for collective in ALGORITHMS:
        cheapest_algorithm(collective, 8, (1 << 20) + 8, LINK)
    assert time.process_time() - start < 0.005 * len(ALGORITHMS)


def far_and_near(a: int, b: int) -> Link:
    """Even and odd ranks are two groups with slow links between them."""
    return Link(1e-6, 1e10) if (a - b) % 2 == 0 else Link(1e-4, 1e8)


def test_rings_follow_the_links() -> None:
    choice = cheapest_algorithm("all_gather", 6, 1 << 22, far_and_near)
    plain = price(collective_schedule("all_gather", "ring", 6), 1 << 22, far_and_near)
    assert choice.seconds <= plain
    assert seconds("all_gather", choice, 6, 1 << 22, far_and_near, 6) == pytest.approx(choice.seconds, rel=1e-4)
    order = ring_order(lambda a, b: message_seconds(1 << 20, far_and_near(a, b)), 6)
    assert sum((a - b) % 2 for a, b in itertools.pairwise((*order, order[0]))) == 2


def one_way(a: int, b: int) -> Link:
    """Only the ring 0, 2, 4, 1, 3 is fast, in this direction."""
    return Link(1e-6, 1e10) if (b - a) % 5 == 2 else Link(1e-3, 1e7)


def test_a_ring_is_chosen_with_its_best_order() -> None:
    choice = cheapest_algorithm("reduce_scatter", 5, 1 << 20, one_way)
    assert (choice.algorithm, choice.order) == ("ring", (0, 2, 4, 1, 3))
    assert seconds("reduce_scatter", choice, 5, 1 << 20, one_way, 5) == pytest.approx(choice.seconds, rel=1e-4)
    assert str(choice).startswith("ring, ranks in the order 0, 2, 4, 1, 3: ")
    # A chain from another root is the same ring, entered there.
    chain = cheapest_algorithm("broadcast", 5, 1 << 20, one_way, root=4)
    assert (chain.algorithm, chain.order) == ("chain", (0, 2, 4, 1, 3))


def random_costs(p: int, seed: int) -> list[list[float]]:
    chance = random.Random(seed)
    return [[chance.choice((1.0, 2.0, 3.0, 5.0, 8.0)) for _ in range(p)] for _ in range(p)]


@pytest.mark.parametrize("p", range(1, 8))
def test_small_rings_are_optimal(p: int) -> None:
    for seed in range(6):
        costs = random_costs(p, seed)
        order = ring_order(lambda a, b, costs=costs: costs[a][b], p)
        best = min(ring_length((0, *rest), costs) for rest in itertools.permutations(range(1, p))) if p > 1 else None
        assert sorted(order) == list(range(p))
        assert order[0] == 0
        if p > 1:
            assert ring_length(order, costs) == best


@pytest.mark.parametrize("p", [EXACT_RANKS + 1, 16, 40])
def test_large_rings_are_good(p: int) -> None:
    """Shuffled ranks on a circle: the ring is the circle."""
    places = list(range(p))
    random.Random(p).shuffle(places)

    def cost(a: int, b: int) -> float:
        around = abs(places[a] - places[b])
        return float(min(around, p - around))

    order = ring_order(cost, p)
    assert order == ring_order(cost, p)
    assert ring_length(order, [[cost(a, b) for b in range(p)] for a in range(p)]) == (1.0, float(p))
    costs = random_costs(p, 1)
    assert ring_length(ring_order(lambda a, b: costs[a][b], p), costs) <= ring_length(range(p), costs)


def test_wrong_calls() -> None:
    with pytest.raises(InputError, match=r"unknown collective 'all_reduc'(.|\n)*Did you mean 'all_reduce'\?"):
        cheapest_algorithm("all_reduc", 4, 8, LINK)
    with pytest.raises(InputError, match=r"over 0 ranks"):
        cheapest_algorithm("all_reduce", 0, 8, LINK)
    with pytest.raises(InputError, match=r"all_reduce of -1 bytes"):
        cheapest_algorithm("all_reduce", 4, -1, LINK)
    with pytest.raises(InputError, match=r"a ring of 0 ranks"):
        ring_order(lambda a, b: 1.0, 0)
