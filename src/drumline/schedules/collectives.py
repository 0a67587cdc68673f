"""The table of collective algorithms by name. docs/collectives.md explains how to add one."""

from __future__ import annotations

from collections.abc import Callable

from ..core.errors import InputError, nearest
from .barriers import central_barrier, dissemination_barrier
from .direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_reduce_scatter,
    flat_broadcast,
    flat_gather,
    flat_reduce,
    flat_scatter,
    naive_all_reduce,
    pairwise_all_to_all,
    server_all_reduce,
)
from .halving import (
    bruck_all_gather,
    bruck_all_to_all,
    doubling_all_gather,
    doubling_all_reduce,
    halving_all_reduce,
    halving_reduce_scatter,
)
from .hierarchical import hierarchical_all_gather, hierarchical_all_reduce, hierarchical_reduce_scatter
from .rings import chain_broadcast, chain_reduce, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from .scans import doubling_exscan, doubling_scan, linear_exscan, linear_scan
from .spec import Schedule
from .trees import (
    binomial_broadcast,
    binomial_gather,
    binomial_reduce,
    binomial_scatter,
    double_tree_all_reduce,
    logp_broadcast,
    scatter_allgather_broadcast,
)

Make = Callable[[int, int, int], Schedule]


def _plain(write: Callable[[int], Schedule]) -> Make:
    return lambda p, root, per_node: write(p)


def _rooted(write: Callable[[int, int], Schedule]) -> Make:
    return lambda p, root, per_node: write(p, root)


def _hosts(write: Callable[[int, int], Schedule]) -> Make:
    return lambda p, root, per_node: write(p, per_node)


ALGORITHMS: dict[str, dict[str, Make]] = {
    "all_reduce": {
        "ring": _plain(ring_all_reduce),
        "halving": _plain(halving_all_reduce),
        "doubling": _plain(doubling_all_reduce),
        "double_tree": _plain(double_tree_all_reduce),
        "hierarchical": _hosts(hierarchical_all_reduce),
        "direct": _plain(direct_all_reduce),
        "server": _plain(server_all_reduce),
        "naive": _plain(naive_all_reduce),
    },
    "all_gather": {
        "ring": _plain(ring_all_gather),
        "doubling": _plain(doubling_all_gather),
        "bruck": _plain(bruck_all_gather),
        "hierarchical": _hosts(hierarchical_all_gather),
        "direct": _plain(direct_all_gather),
    },
    "reduce_scatter": {
        "ring": _plain(ring_reduce_scatter),
        "halving": _plain(halving_reduce_scatter),
        "hierarchical": _hosts(hierarchical_reduce_scatter),
        "direct": _plain(direct_reduce_scatter),
    },
    "broadcast": {
        "binomial": _rooted(binomial_broadcast),
        "chain": _rooted(chain_broadcast),
        "scatter_allgather": _rooted(scatter_allgather_broadcast),
        "logp": _rooted(logp_broadcast),
        "flat": _rooted(flat_broadcast),
    },
    "reduce": {
        "binomial": _rooted(binomial_reduce),
        "chain": _rooted(chain_reduce),
        "flat": _rooted(flat_reduce),
    },
    "gather": {"binomial": _rooted(binomial_gather), "flat": _rooted(flat_gather)},
    "scatter": {"binomial": _rooted(binomial_scatter), "flat": _rooted(flat_scatter)},
    "all_to_all": {"pairwise": _plain(pairwise_all_to_all), "bruck": _plain(bruck_all_to_all)},
    "barrier": {"dissemination": _plain(dissemination_barrier), "central": _plain(central_barrier)},
    "scan": {"doubling": _plain(doubling_scan), "linear": _plain(linear_scan)},
    "exscan": {"doubling": _plain(doubling_exscan), "linear": _plain(linear_exscan)},
}
"""Collective -> algorithm -> (p, root, ranks per host) -> schedule, the default algorithm first.

Every reader, and every test of the readers, uses this table.
"""

NATIVE = "native"
"""The word for the implementation of the transport or backend itself, which runs no schedule."""

ALL_REDUCE_WORDS = ("auto", NATIVE, *ALGORITHMS["all_reduce"])
"""The words for the algorithm of an all-reduce: in the plan notation, in `bench` and in `simulate`."""

OLD_WORDS = {"tree": "double_tree"}
"""Words that earlier releases used for an algorithm."""

SHARDED_HALVES: dict[str, tuple[str, str]] = {
    "ring": ("ring", "ring"),
    "halving": ("halving", "doubling"),
    "hierarchical": ("hierarchical", "hierarchical"),
    "direct": ("direct", "direct"),
}
"""All-reduce algorithms that are a reduce-scatter and an all-gather, by the names of these two. With the others,
sharded gradients are all-reduced whole and every rank keeps its shard; the updated shards are gathered by the ring."""

SEGMENTED_ALL_REDUCES = ("double_tree", "naive")
"""All-reduce algorithms in which ranks idle in most rounds unless the buffer travels in segments."""

IN_RANK_ORDER: dict[str, tuple[str, ...]] = {
    "all_reduce": ("halving", "doubling", "double_tree", "direct", "server", "naive"),
    "reduce_scatter": ("direct",),
    "reduce": ("binomial", "flat"),
    "scan": ("doubling", "linear"),
    "exscan": ("doubling", "linear"),
}
"""Collective -> algorithms whose operands are in rank order for any p and root, as operations that do not commute
require. The checker proves that the list is complete."""


def collective_schedule(
    collective: str, algorithm: str, p: int, *, root: int = 0, per_node: int | None = None
) -> Schedule:
    """The schedule of a collective by an algorithm; `per_node` neighbouring ranks share a host (default: all)."""
    if collective not in ALGORITHMS:
        raise InputError(
            f"unknown collective {collective!r}",
            rule=f"known: {', '.join(ALGORITHMS)}",
            fix=nearest(collective, ALGORITHMS),
        )
    known = ALGORITHMS[collective]
    if algorithm not in known:
        raise InputError(
            f"unknown algorithm {algorithm!r} for {collective}",
            rule=f"known: {', '.join(known)}",
            fix=nearest(algorithm, known),
        )
    return known[algorithm](p, root, p if per_node is None else per_node)
