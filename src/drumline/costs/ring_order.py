"""Orders the ranks of a ring when some pairs of them have slower links than others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import InputError

EXACT_RANKS = 9
"""Ranks up to which the best ring is computed; beyond that a good one."""

_STEPS = 4_000_000
"""Hops that the search for a good ring may examine: about a second."""

_Costs = Sequence[Sequence[float]]


def ring_order(cost: Callable[[int, int], float], p: int) -> tuple[int, ...]:
    """The ranks in the order of a ring, from rank 0: cost(a, b) is the time of one message from a to b.

    In each round of a ring all hops go at once, so the longest hop decides: of all rings those with the shortest
    longest hop, and of these the one with the least sum. Exact up to nine ranks; beyond that the nearest neighbour
    first, then segments of the ring are reversed as long as that helps. The same costs give the same ring.
    """
    if p < 1:
        raise InputError(f"a ring of {p} ranks", rule="a ring has at least one rank")
    costs = [[cost(a, b) if a != b else 0.0 for b in range(p)] for a in range(p)]
    if p <= 3 and all(costs[a][b] == costs[b][a] for a in range(p) for b in range(p)):
        return tuple(range(p))
    return _exact(costs) if p <= EXACT_RANKS else _good(costs)


def ring_length(order: Sequence[int], costs: _Costs) -> tuple[float, float]:
    """The longest hop, then the sum of all hops: the shorter ring has the smaller pair."""
    hops = [costs[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True)]
    return max(hops), sum(hops)


def _exact(costs: _Costs) -> tuple[int, ...]:
    """The best ring by two passes over all sets of ranks: first the longest hop alone, then the sum below it."""
    longest, _ = _over_sets(costs, lambda so_far, hop: max(so_far, hop), float("inf"))
    _, order = _over_sets(costs, lambda so_far, hop: so_far + hop, longest)
    return order


def _over_sets(costs: _Costs, longer: Callable[[float, float], float], limit: float) -> tuple[float, tuple[int, ...]]:
    """The shortest ring through rank 0 whose hops are all within the limit, by paths that grow a rank at a time."""
    p = len(costs)
    if p == 1:
        return 0.0, (0,)
    paths: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(1, 0): (0.0, (0,))}
    for _ in range(p - 1):
        grown: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (seen, last), (length, path) in paths.items():
            for r in range(1, p):
                if seen >> r & 1 or costs[last][r] > limit:
                    continue
                longer_path = (longer(length, costs[last][r]), (*path, r))
                key = (seen | 1 << r, r)
                if key not in grown or longer_path < grown[key]:
                    grown[key] = longer_path
        paths = grown
    closed = [
        (longer(length, costs[last][0]), path) for (_, last), (length, path) in paths.items() if costs[last][0] <= limit
    ]
    return min(closed)


def _good(costs: _Costs) -> tuple[int, ...]:
    p = len(costs)
    order = [0]
    left = set(range(1, p))
    while left:
        order.append(min(left, key=lambda r: (costs[order[-1]][r], r)))
        left.remove(order[-1])
    best, tries, improved = ring_length(order, costs), _STEPS // p, True
    while improved and tries > 0:
        improved = False
        for i in range(1, p - 1):
            for j in range(i + 1, p):
                turned = order[:i] + order[i : j + 1][::-1] + order[j + 1 :]
                length = ring_length(turned, costs)
                tries -= 1
                if length < best:
                    order, best, improved = turned, length, True
            if tries <= 0:
                break
    return tuple(order)
