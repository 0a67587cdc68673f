"""Alpha-beta times of messages, rounds and schedules, on one link, on pairs, and on nodes that share a port."""

from __future__ import annotations

import dataclasses

from drumline.clusters import Link
from drumline.schedules import Send, binomial_broadcast, ring_all_reduce
from drumline.theory.alpha_beta import NodeTopology, as_topology, message_seconds, round_seconds, schedule_seconds

LINK = Link(1.0, 0.5)  # alpha 1 s, beta 2 s per byte
SLOW = Link(10.0, 0.25)


def test_a_message() -> None:
    assert message_seconds(0, LINK) == 1
    assert message_seconds(3, LINK) == 7


def test_sends_of_one_pair_cost_one_alpha() -> None:
    sends = (Send(0, 1, 0, True), Send(0, 1, 1, True))
    assert round_seconds(sends, (3, 4), LINK) == 1 + 2 * 7
    assert round_seconds((), (3, 4), LINK) == 0


def test_a_rank_sends_and_receives_one_message_at_a_time() -> None:
    assert round_seconds((Send(0, 1, 0, True), Send(0, 2, 0, True)), (3,), LINK) == 2 * 7
    assert round_seconds((Send(1, 0, 0, True), Send(2, 0, 0, True)), (3,), LINK) == 2 * 7
    assert round_seconds((Send(0, 1, 0, True), Send(1, 0, 0, True)), (3,), LINK) == 7


def test_pairs_have_separate_links() -> None:
    def between(src: int, dst: int) -> Link:
        return SLOW if {src, dst} == {0, 3} else LINK

    schedule = ring_all_reduce(4)  # the pair 3 -> 0 is in every round
    assert schedule_seconds(schedule, (5,) * 4, between) == 6 * message_seconds(5, SLOW)
    assert schedule_seconds(binomial_broadcast(2), (5,), between) == message_seconds(5, LINK)


def test_nodes_share_their_port_to_the_network() -> None:
    nodes = NodeTopology(2, LINK, SLOW)
    assert as_topology(nodes) is nodes
    assert round_seconds((Send(0, 1, 0, True),), (3,), nodes) == message_seconds(3, LINK)
    assert round_seconds((Send(1, 2, 0, True),), (3,), nodes) == message_seconds(3, SLOW)
    both = (Send(0, 2, 0, True), Send(1, 3, 0, True))
    assert round_seconds(both, (3,), nodes) == 10 + 2 * 3 * 4  # start-ups together, bytes one after the other
    apart = (Send(0, 2, 0, True), Send(3, 1, 0, True))
    assert round_seconds(apart, (3,), nodes) == 10 + 3 * 4  # the two directions do not share


def test_rounds_add_up() -> None:
    uneven = dataclasses.replace(ring_all_reduce(2), rounds=((Send(0, 1, 0, True),), (Send(1, 0, 1, True),)))
    assert schedule_seconds(uneven, (1, 2), LINK) == message_seconds(1, LINK) + message_seconds(2, LINK)
