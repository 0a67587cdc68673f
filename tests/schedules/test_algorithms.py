"""Every algorithm is proved for p = 1..40, and any single change of it is detected."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from drumline.core.errors import InputError, VerificationError
from drumline.schedules import (
    ALGORITHMS,
    IN_RANK_ORDER,
    Schedule,
    Send,
    collective_schedule,
    double_tree_all_reduce,
    halving_reduce_scatter,
    hierarchical_all_reduce,
    logp_broadcast,
    prove,
)
from drumline.schedules.spec import even_ranges

NAMES = [(c, a) for c, algorithms in ALGORITHMS.items() for a in algorithms]
REDUNDANT = {("broadcast", "scatter_allgather"), ("barrier", "dissemination")}
"""Algorithms that send some ranks what they already have, so that a lost message may be harmless."""


def roots(collective: str, p: int) -> list[int]:
    """All roots of few ranks, the corner cases of many; rank 0 without roots."""
    if not collective_schedule(collective, next(iter(ALGORITHMS[collective])), p).contract.rooted:
        return [0]
    return list(range(p)) if p <= 9 else sorted({0, 1, p // 2, p - 1})


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_every_schedule_is_proved(collective: str, algorithm: str) -> None:
    in_order = True
    for p in range(1, 41):
        for root in roots(collective, p):
            schedule = collective_schedule(collective, algorithm, p, root=root)
            proof = prove(schedule)
            assert schedule.name == f"{algorithm}_{collective}"
            assert (schedule.collective, schedule.root) == (collective, root)
            assert proof.rounds == schedule.count_rounds()
            # A barrier has no bits; everywhere else all who hold the same sum hold the same bits.
            assert proof.identical or collective == "barrier"
            in_order = in_order and proof.in_rank_order
    if collective in IN_RANK_ORDER:
        assert in_order == (algorithm in IN_RANK_ORDER[collective])


@pytest.mark.parametrize("p", [*range(1, 17), 24, 30, 40])
def test_hosts_of_any_size(p: int) -> None:
    for per_node in range(1, p + 2):
        schedule = hierarchical_all_reduce(p, per_node)
        assert prove(schedule).identical
        if 1 < per_node < p:
            crossing = [s for sends in schedule.rounds for s in sends if s.src // per_node != s.dst // per_node]
            size = schedule.sizes(p * 60)
            # Each byte crosses 2(h-1) times in all, which is as rarely as a ring over h hosts can.
            assert sum(size[s.chunk] for s in crossing) == 2 * (-(-p // per_node) - 1) * p * 60
    assert hierarchical_all_reduce(p) == hierarchical_all_reduce(p, p)


def test_one_host_and_single_rank_hosts_are_a_ring() -> None:
    ring = list(collective_schedule("all_reduce", "ring", 6).rounds)
    for per_node in (None, 6, 7, 1):
        assert list(collective_schedule("all_reduce", "hierarchical", 6, per_node=per_node).rounds) == ring


@pytest.mark.parametrize("p", range(1, 10))
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_hierarchical_halves_send_little_between_hosts(collective: str, p: int) -> None:
    for per_node in range(1, p + 2):
        schedule = collective_schedule(collective, "hierarchical", p, per_node=per_node)
        prove(schedule)
        if 1 < per_node < p and p % per_node == 0:
            crossing = [s for sends in schedule.rounds for s in sends if s.src // per_node != s.dst // per_node]
            size = schedule.sizes(60 * p)
            # each of the h hosts sends, or receives, all but its own part of the buffer: (h-1)/h m, h times
            assert sum(size[s.chunk] for s in crossing) == (p // per_node - 1) * p * 60


def changes(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Every schedule that differs by one send: dropped, doubled, redirected, flipped."""
    rounds = [list(sends) for sends in schedule.rounds]
    for k, i in itertools.product(range(len(rounds)), range(max(map(len, rounds)))):
        if i >= len(rounds[k]):
            continue
        send = rounds[k][i]
        astray = next(r for r in range(schedule.p) if r not in (send.src, send.dst))
        kinds = {
            "dropped": [],
            "doubled": [send, send],
            "astray": [dataclasses.replace(send, dst=astray)],
            "flipped": [dataclasses.replace(send, reduce=not send.reduce)],
        }
        for kind, sends in kinds.items():
            copy = [list(old) for old in rounds]
            copy[k][i : i + 1] = sends
            yield f"{kind}: round {k}, {send}", dataclasses.replace(schedule, rounds=tuple(map(tuple, copy)))


def holds(schedule: Schedule) -> bool:
    """The question of the checker, answered by counting contributions in multisets."""
    s = schedule
    places = list(itertools.product(range(s.p), range(s.chunks)))
    bags = {place: Counter([place[0]]) if s.contract.before(s, *place) else Counter() for place in places}
    for sends in s.rounds:
        before = {place: Counter(bag) for place, bag in bags.items()}
        kept = [(send.dst, send.chunk) for send in sends if not send.reduce]
        if any(sum((send.dst, send.chunk) == place for send in sends) > 1 for place in kept):
            return False  # what is kept would depend on which message comes last
        for send in sends:
            new, place = before[send.src, send.chunk], (send.dst, send.chunk)
            if not new or (send.reduce and not before[place]):
                return False
            bags[place] = bags[place] + new if send.reduce else Counter(new)
    for place in places:
        expected = s.contract.after(s, *place)
        bag = Counter(set(bags[place])) if s.contract.idempotent else bags[place]
        if expected is not None and bag != Counter(expected):
            return False
    return True


@pytest.mark.parametrize("p", [4, 5])
@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_every_single_change_that_matters_is_detected(collective: str, algorithm: str, p: int) -> None:
    schedule, detected = collective_schedule(collective, algorithm, p, root=1, per_node=2), 0
    assert holds(schedule)
    for what, changed in changes(schedule):
        try:
            prove(changed)
            proved = True
        except VerificationError:
            proved = False
        # A sum may be added twice on a rank that nobody asks again: the checker refuses that as well.
        assert not proved or holds(changed), f"{what}: proved, and wrong"
        if (collective, algorithm) not in REDUNDANT and what.startswith("dropped"):
            assert not proved, f"{what}: still proved"
        detected += not proved
    assert detected


def test_lost_messages_of_redundant_algorithms_are_detected_where_they_matter() -> None:
    broadcast = collective_schedule("broadcast", "scatter_allgather", 4)
    barrier = collective_schedule("barrier", "dissemination", 4)
    for schedule in (broadcast, barrier):
        lost = dataclasses.replace(schedule, rounds=tuple(schedule.rounds)[1:])
        with pytest.raises(VerificationError, match=r"does not have|ends without"):
            prove(lost)


@pytest.mark.parametrize("p", range(1, 41))
def test_the_double_tree_balances_work(p: int) -> None:
    """Inner ranks of one tree are leaves of the other, with at most two children and few levels."""
    up = list(double_tree_all_reduce(p).rounds)[: (p - 1).bit_length()]
    children: dict[tuple[int, int], list[int]] = {}
    for send in itertools.chain(*up):
        children.setdefault((send.dst, send.chunk), []).append(send.src)
    assert all(len(own) <= 2 for own in children.values())
    assert not any((rank, 0) in children and (rank, 1) in children for rank in range(p))
    assert double_tree_all_reduce(p).count_rounds() == 2 * (p - 1).bit_length()


@pytest.mark.parametrize("p", range(1, 41))
def test_halving_works_for_any_number_of_ranks(p: int) -> None:
    schedule = halving_reduce_scatter(p)
    assert schedule.count_rounds() == (p - 1).bit_length()
    assert schedule.fan_in <= 2
    assert (schedule.fan_in == 2) == (p & (p - 1) != 0)


def test_the_logp_tree_follows_its_parameters() -> None:
    """The textbook's eight processors with L=6, o=2, g=4: the root sends four times, its first child twice."""
    sends = [s for group in logp_broadcast(8).rounds for s in group]
    assert [sum(s.src == r for s in sends) for r in range(8)] == [4, 2, 1, 0, 0, 0, 0, 0]
    # Without latency it is a binomial tree; with nothing but latency all sends are the root's.
    binomial = collective_schedule("broadcast", "binomial", 8).count_rounds()
    assert logp_broadcast(8, latency=0, overhead=0, gap=1).count_rounds() >= binomial
    assert logp_broadcast(8, latency=100, overhead=0, gap=1).count_rounds() == 7
    with pytest.raises(InputError, match=r"LogP with L=0, o=0, g=0\n.*not all of them 0"):
        logp_broadcast(4, latency=0, overhead=0, gap=0)


def test_all_to_all_blocks_are_at_the_position_of_their_receiver() -> None:
    schedule = collective_schedule("all_to_all", "pairwise", 3)
    assert schedule.ranges(7) == ((0, 3), (3, 5), (5, 7)) * 3
    assert schedule.sizes(12) == (4,) * 9
    assert even_ranges(7, 3) == schedule.ranges(7)[:3]


def test_a_barrier_carries_no_data() -> None:
    for algorithm in ALGORITHMS["barrier"]:
        schedule = collective_schedule("barrier", algorithm, 6)
        assert set(schedule.sizes(1000)) == {0}
        assert {t.bytes for t in schedule.traffic(1000)} == {0}
        assert max(t.messages for t in schedule.traffic(1000)) > 0


def test_flat_algorithms_have_full_fan_in() -> None:
    for collective, algorithm in (("reduce", "flat"), ("gather", "flat"), ("all_reduce", "server")):
        assert collective_schedule(collective, algorithm, 9).fan_in == 8
    assert collective_schedule("reduce", "binomial", 9).fan_in == 1


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(InputError, match=r"hosts of 0 ranks\n.*at least one"):
        hierarchical_all_reduce(4, 0)
    with pytest.raises(
        InputError, match=r"unknown algorithm 'pairwize' for all_to_all(.|\n)*Did you mean 'pairwise'\?"
    ):
        collective_schedule("all_to_all", "pairwize", 4)
    for collective, algorithm in NAMES:
        with pytest.raises(InputError, match="at least one rank"):
            collective_schedule(collective, algorithm, 0)
    with pytest.raises(VerificationError, match="names rank 4 of 4"):
        schedule = collective_schedule("scan", "linear", 4)
        prove(dataclasses.replace(schedule, rounds=((Send(3, 4, 0, True),),)))
