"""Closed-form time of every collective algorithm, with one link between any two ranks. Exact for any number of ranks.

Everywhere m is the bytes of the whole buffer: what all-gather ends with, what reduce-scatter begins with. A formula
is the sum over rounds of the busiest port, where each round begins when all ranks have ended the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ..clusters import Link
from ..schedules import logp_broadcast
from .alpha_beta import message_seconds

Form = Callable[[int, float, Link], float]


def log2_up(p: int) -> int:
    """ceil(log2 p): rounds in which one rank can reach p."""
    return (p - 1).bit_length()


def ring_all_reduce_seconds(p: int, m: float, link: Link) -> float:
    """2(p-1) (alpha + m/p beta)."""
    return 2 * (p - 1) * message_seconds(m / p, link)


def shares_seconds(p: int, m: float, link: Link) -> float:
    """(p-1) (alpha + m/p beta): p-1 messages of one share, one after the other."""
    return (p - 1) * message_seconds(m / p, link)


def buffers_seconds(p: int, m: float, link: Link) -> float:
    """(p-1) (alpha + m beta): p-1 messages of the whole buffer, one after the other."""
    return (p - 1) * message_seconds(m, link)


def tree_seconds(p: int, m: float, link: Link) -> float:
    """ceil(log2 p) (alpha + m beta)."""
    return log2_up(p) * message_seconds(m, link)


def tree_of_shares_seconds(p: int, m: float, link: Link) -> float:
    """ceil(log2 p) alpha + (p-1)/p m beta: messages of 1, 2, 4, ... shares."""
    return log2_up(p) * link.alpha + (p - 1) / p * m * link.beta


def twice_buffers_seconds(p: int, m: float, link: Link) -> float:
    """2(p-1) (alpha + m beta): to one rank or along a line, and back."""
    return 2 * buffers_seconds(p, m, link)


def doubling_all_reduce_seconds(p: int, m: float, link: Link) -> float:
    """log2 q (alpha + m beta) for the largest power of two q <= p, and two rounds more to fold and unfold if q < p."""
    rounds = p.bit_length() - 1
    return (rounds + 2 * _folds(p)) * message_seconds(m, link)


def halving_all_reduce_seconds(p: int, m: float, link: Link) -> float:
    """2 (log2 q alpha + (q-1)/q m beta), and 2 (alpha + m beta) more if q < p."""
    q = 1 << p.bit_length() - 1
    return 2 * tree_of_shares_seconds(q, m, link) + 2 * _folds(p) * message_seconds(m, link)


def double_tree_all_reduce_seconds(p: int, m: float, link: Link) -> float:
    """2 sum over l with 2^l < p of c (alpha + m/2 beta): c = 2 where a rank has two children at level l, else 1.

    There is such a rank where 3 2^l <= p. Unsegmented, so a tree is not at its best here.
    """
    levels = range(log2_up(p))
    return 2 * sum(2 if 3 << level <= p else 1 for level in levels) * message_seconds(m / 2, link)


def halves_seconds(p: int, m: float, link: Link) -> float:
    """log2 p alpha + (p-1)/p m beta for powers of two; else a half of odd size n takes two messages of (n-1)/2 shares.

    After k rounds the parts have p/2^k ranks, rounded down or up, and the slower kind decides.
    """
    total, part = 0.0, m / p
    for k in range(log2_up(p)):
        total += max(_halve(n, part, link) for n in {p >> k, -(-p >> k)})
    return total


def _halve(n: int, part: float, link: Link) -> float:
    if n == 1:
        return 0.0
    return (1 + n % 2) * message_seconds(n // 2 * part, link)


def scatter_allgather_broadcast_seconds(p: int, m: float, link: Link) -> float:
    """(ceil(log2 p) + p-1) alpha + 2 (p-1)/p m beta."""
    return tree_of_shares_seconds(p, m, link) + shares_seconds(p, m, link)


def logp_broadcast_seconds(p: int, m: float, link: Link) -> float:
    """R (alpha + m beta), R the rounds of the tree, which is optimal under LogP (`theory.logp`)."""
    return _logp_rounds(p) * message_seconds(m, link)


@lru_cache(maxsize=1024)
def _logp_rounds(p: int) -> int:
    return logp_broadcast(p).count_rounds()


def bruck_all_to_all_seconds(p: int, m: float, link: Link) -> float:
    """ceil(log2 p) alpha + b/p m beta, b the one-bits of the numbers 1 to p-1."""
    return log2_up(p) * link.alpha + sum(j.bit_count() for j in range(p)) / p * m * link.beta


def dissemination_barrier_seconds(p: int, m: float, link: Link) -> float:
    """ceil(log2 p) alpha, for any m: a barrier carries no data."""
    return log2_up(p) * link.alpha


def central_barrier_seconds(p: int, m: float, link: Link) -> float:
    """2(p-1) alpha."""
    return 2 * (p - 1) * link.alpha


def doubling_exscan_seconds(p: int, m: float, link: Link) -> float:
    """(1 + ceil(log2(p-1))) (alpha + m beta): a shift, then a scan over the others."""
    return (1 + log2_up(p - 1)) * message_seconds(m, link) if p > 1 else 0.0


def switch_all_reduce_seconds(p: int, m: float, link: Link) -> float:
    """2 alpha + (p+1)/p m beta, where the switch does the sum: no schedule of ranks alone is that short.

    The whole buffer of each rank goes to the switch, m, which gives each rank the sum of its share, m/p. Then each rank
    sends that sum, m/p, and the switch sends all of them to every rank, m.
    """
    return 2 * link.alpha + (p + 1) / p * m * link.beta if p > 1 else 0.0


def _folds(p: int) -> bool:
    return p & (p - 1) != 0


CLOSED_FORMS: dict[tuple[str, str], Form] = {
    ("all_reduce", "ring"): ring_all_reduce_seconds,
    ("all_reduce", "halving"): halving_all_reduce_seconds,
    ("all_reduce", "doubling"): doubling_all_reduce_seconds,
    ("all_reduce", "double_tree"): double_tree_all_reduce_seconds,
    ("all_reduce", "hierarchical"): ring_all_reduce_seconds,  # one link is one host, and one host is a ring
    ("all_reduce", "direct"): ring_all_reduce_seconds,  # the same messages one after the other, in two rounds
    ("all_reduce", "server"): twice_buffers_seconds,
    ("all_reduce", "naive"): twice_buffers_seconds,
    ("all_gather", "ring"): shares_seconds,
    ("all_gather", "doubling"): halves_seconds,
    ("all_gather", "bruck"): tree_of_shares_seconds,
    ("all_gather", "hierarchical"): shares_seconds,  # on one host a ring
    ("all_gather", "direct"): shares_seconds,
    ("reduce_scatter", "ring"): shares_seconds,
    ("reduce_scatter", "halving"): halves_seconds,
    ("reduce_scatter", "hierarchical"): shares_seconds,  # on one host a ring
    ("reduce_scatter", "direct"): shares_seconds,
    ("broadcast", "binomial"): tree_seconds,
    ("broadcast", "chain"): buffers_seconds,
    ("broadcast", "scatter_allgather"): scatter_allgather_broadcast_seconds,
    ("broadcast", "logp"): logp_broadcast_seconds,
    ("broadcast", "flat"): buffers_seconds,
    ("reduce", "binomial"): tree_seconds,
    ("reduce", "chain"): buffers_seconds,
    ("reduce", "flat"): buffers_seconds,
    ("gather", "binomial"): tree_of_shares_seconds,
    ("gather", "flat"): shares_seconds,
    ("scatter", "binomial"): tree_of_shares_seconds,
    ("scatter", "flat"): shares_seconds,
    ("all_to_all", "pairwise"): shares_seconds,
    ("all_to_all", "bruck"): bruck_all_to_all_seconds,
    ("barrier", "dissemination"): dissemination_barrier_seconds,
    ("barrier", "central"): central_barrier_seconds,
    ("scan", "doubling"): tree_seconds,
    ("scan", "linear"): buffers_seconds,
    ("exscan", "doubling"): doubling_exscan_seconds,
    ("exscan", "linear"): buffers_seconds,
}
"""(collective, algorithm) -> (p, m, link) -> seconds, with the names of the schedules."""

RUNS_AHEAD = frozenset({("all_reduce", "double_tree"), ("all_gather", "doubling"), ("reduce_scatter", "halving")})
"""Algorithms whose ranks need not wait for the busiest one of each round unless p is a power of two: their replay may
end before the closed form, which adds up rounds. All others end exactly with it on an idle network."""
