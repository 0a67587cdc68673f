"""`algorithm="auto"`: the fastest algorithm of a collective by measured tables, or by price if nothing was measured.

All ranks choose alike, because the inputs are the same on all: the cluster, the links, the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..clusters import Cluster, CollectiveTable, Link
from ..core import files
from ..core.errors import InputError
from ..costs.algorithm_choice import RING_ALGORITHMS, cheapest_algorithm
from ..costs.collectives import price
from ..costs.ring_order import ring_order
from ..schedules import ALGORITHMS, NATIVE, Schedule, collective_schedule, prove, reordered, segmented
from ..theory.alpha_beta import Links, NodeTopology, PairTopology, as_topology, message_seconds
from .call_check import digest

DEFAULT_LINK = Link(5e-5, 2e9)
"""Assumed if no cluster is given: roughly, processes of one host."""
_RING_BYTES = 2**20
"""Bytes of the buffer for which the ring order is chosen."""


@dataclass(frozen=True, slots=True)
class ChosenAlgorithm:
    """An algorithm, its number of segments, and the reason for the choice."""

    algorithm: str
    segments: int = 1
    seconds: float = 0.0
    """Measured or priced; 0 if neither was needed."""
    origin: str = "given"
    """`given`, `measured`, `priced`, or `offered` by the transport."""
    order: tuple[int, ...] | None = None
    """Ranks in ring order, if the links make another order than 0, 1, 2, ... better."""

    def __str__(self) -> str:
        return self.algorithm if self.segments == 1 else f"{self.algorithm} in {self.segments} segments"


class AlgorithmChooser:
    """Chooses algorithms for the ranks of one communicator, and caches the choices."""

    def __init__(
        self,
        p: int,
        *,
        transport: str,
        cluster: Cluster | None,
        links: Links | None,
        per_node: int | None,
        offers: Callable[[str], bool],
    ) -> None:
        self.p, self.per_node = p, per_node
        self._transport, self._cluster, self._offers = transport, cluster, offers
        given = links if links is not None else _links_of(cluster, p, per_node)
        self.links: Links = DEFAULT_LINK if given is None else given
        self._order = _best_ring(self.links, p)
        self._chosen: dict[tuple[str, int, int, int, bool, bool], ChosenAlgorithm] = {}

    @property
    def digest(self) -> int:
        """A 64-bit hash of the choice's inputs: ranks with different ones would choose differently."""
        tables = () if self._cluster is None else self._cluster.collective
        return digest(f"{files.to_plain(tables)} {self._transport} {self.per_node} {_links_text(self.links, self.p)}")

    def choose(
        self, collective: str, m: int, *, itemsize: int = 1, root: int = 0, in_order: bool = False, native: bool = True
    ) -> ChosenAlgorithm:
        """Choose for a buffer of m bytes. `in_order`: keep the rank order; `native`: allow the transport's own.

        Sizes that differ by less than an eighth share one choice.
        """
        bits = m.bit_length()
        key = (collective, bits, m >> (bits - 4) if bits > 4 else m, root, in_order, native)
        choice = self._chosen.get(key)
        if choice is None:
            choice = self._chosen[key] = self._choose(collective, m, itemsize, root, in_order, native)
        return choice

    def given(self, collective: str, algorithm: str, segments: int = 1, *, in_order: bool = False) -> ChosenAlgorithm:
        """The algorithm that a caller named; rings in the order of the measured links."""
        ring = algorithm in RING_ALGORITHMS.get(collective, ()) and not in_order
        return ChosenAlgorithm(algorithm, segments, order=self._order if ring else None)

    def schedule(self, collective: str, choice: ChosenAlgorithm, *, root: int = 0) -> Schedule:
        """The schedule of a choice."""
        if choice.order is None:
            return segmented(self._plain(collective, choice.algorithm, root), choice.segments)
        made = self._plain(collective, choice.algorithm, choice.order.index(root))
        return segmented(reordered(made, choice.order), choice.segments)

    def keeps_order(self, collective: str, algorithm: str, root: int) -> bool:
        """Whether the checker proves that an algorithm keeps the rank order."""
        return _keeps_order(collective, algorithm, self.p, root, self.per_node)

    def ordered(self, collective: str, root: int) -> list[str]:
        """The algorithms that keep the rank order."""
        return [a for a in ALGORITHMS[collective] if self.keeps_order(collective, a, root)]

    def _plain(self, collective: str, algorithm: str, root: int) -> Schedule:
        return collective_schedule(collective, algorithm, self.p, root=root, per_node=self.per_node)

    def _choose(
        self, collective: str, m: int, itemsize: int, root: int, in_order: bool, native: bool
    ) -> ChosenAlgorithm:
        offered = native and not in_order and self._offers(collective)
        measured = [
            replace(
                self.given(collective, t.algorithm, t.segments, in_order=in_order), seconds=t.at(m), origin="measured"
            )
            for t in self._tables(collective)
            if (offered if t.algorithm == NATIVE else self._allowed(collective, t.algorithm, root, in_order))
        ]
        if measured:
            return min(measured, key=lambda c: (c.seconds, c.algorithm, c.segments))
        if offered and self._cluster is None:
            return ChosenAlgorithm(NATIVE, origin="offered")
        if in_order:
            return self._cheapest_in_order(collective, m, itemsize, root)
        best = cheapest_algorithm(
            collective, self.p, m, self.links, per_node=self.per_node, itemsize=itemsize, root=root
        )
        return ChosenAlgorithm(best.algorithm, best.segments, best.seconds, "priced", best.order)

    def _tables(self, collective: str) -> list[CollectiveTable]:
        if self._cluster is None:
            return []
        return [
            t
            for t in self._cluster.collective
            if (t.collective, t.ranks, t.transport) == (collective, self.p, self._transport)
        ]

    def _allowed(self, collective: str, algorithm: str, root: int, in_order: bool) -> bool:
        # a cluster file may come from a release with other algorithms
        return algorithm in ALGORITHMS[collective] and (not in_order or self.keeps_order(collective, algorithm, root))

    def _cheapest_in_order(self, collective: str, m: int, itemsize: int, root: int) -> ChosenAlgorithm:
        names = self.ordered(collective, root)
        if not names:
            raise InputError(
                f"{collective} by an operator that does not commute", rule="no algorithm keeps the order of ranks"
            )
        whole = m - m % itemsize
        prices = {a: price(self._plain(collective, a, root), whole, self.links, itemsize=itemsize) for a in names}
        best = min(prices, key=lambda a: (prices[a], a))
        return ChosenAlgorithm(best, 1, prices[best], "priced")


@lru_cache(maxsize=1024)
def _keeps_order(collective: str, algorithm: str, p: int, root: int, per_node: int | None) -> bool:
    return prove(collective_schedule(collective, algorithm, p, root=root, per_node=per_node)).in_rank_order


def _links_of(cluster: Cluster | None, p: int, per_node: int | None) -> Links | None:
    if cluster is None:
        return None
    if cluster.rank_link:
        between = {(pair.src, pair.dst): pair.link for pair in cluster.rank_link}
        if all((a, b) in between for a in range(p) for b in range(p) if a != b):
            return PairTopology(lambda src, dst: between[src, dst])
    return NodeTopology.of(cluster) if cluster.network is not None else cluster.node.link


def _best_ring(links: Links, p: int) -> tuple[int, ...] | None:
    """The best ring order, if each pair of ranks has its own link."""
    topology = as_topology(links)
    if p < 3 or not isinstance(topology, PairTopology):
        return None
    order = ring_order(lambda a, b: message_seconds(_RING_BYTES / p, topology.link(a, b)), p)
    return None if order == tuple(range(p)) else order


def _links_text(links: Links, p: int) -> str:
    """The links as text; for pairs, all of them."""
    topology = as_topology(links)
    if not isinstance(topology, PairTopology):
        return str(topology)
    return " ".join(str(topology.link(a, b)) for a in range(p) for b in range(p) if a != b)
