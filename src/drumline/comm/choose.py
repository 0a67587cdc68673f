"""`algorithm="auto"`: the fastest way of a collective, from measured tables, or by price where nothing was measured.

All ranks choose alike, because they choose from what all of them share: the cluster, the links, the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..clusters import Cluster, Link, CollectiveTable
from ..core import files
from ..core.errors import InputError
from ..costs.cheapest import RINGS, cheapest
from ..costs.collectives import price
from ..costs.ring_order import ring_order
from ..schedules import ALGORITHMS, Schedule, collective_schedule, prove, reordered, segmented
from ..theory.alpha_beta import Links, Nodes, Pairs, as_topology, message_seconds
from .calls import digest

NATIVE = "native"
"""The name of what a transport itself offers."""
ASSUMED = Link(5e-5, 2e9)
"""What messages cost where no cluster was given: those between processes of one host, roughly."""
_LONG = 2**20
"""Bytes of the message by which neighbours are chosen."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm, in how many segments, and what it was chosen by."""

    algorithm: str
    segments: int = 1
    seconds: float = 0.0
    """Measured or priced; 0 where neither was needed."""
    origin: str = "given"
    """`given`, `measured`, `priced`, or `offered` by the transport."""
    order: tuple[int, ...] | None = None
    """Ranks in the order of a ring, where links make another than 0, 1, 2, ... better."""

    def __str__(self) -> str:
        return self.algorithm if self.segments == 1 else f"{self.algorithm} in {self.segments} segments"


class Chooser:
    """Chooses for the ranks of one communicator, and remembers what it chose."""

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
        self.links: Links = ASSUMED if given is None else given
        self._order = _neighbours(self.links, p)
        self._chosen: dict[tuple[str, int, int, int, bool, bool], Choice] = {}

    @property
    def digest(self) -> int:
        """64 bits of what the choice depends on: ranks with different ones would choose differently."""
        tables = () if self._cluster is None else self._cluster.collective
        return digest(f"{files.to_plain(tables)} {self._transport} {self.per_node} {_fares(self.links, self.p)}")

    def choose(
        self, collective: str, m: int, *, itemsize: int = 1, root: int = 0, in_order: bool = False, native: bool = True
    ) -> Choice:
        """For a buffer of m bytes. `in_order`: only what keeps the order of ranks; `native`: also the transport's own.

        Sizes that differ by less than an eighth share one choice.
        """
        bits = m.bit_length()
        key = (collective, bits, m >> (bits - 4) if bits > 4 else m, root, in_order, native)
        found = self._chosen.get(key)
        if found is None:
            found = self._chosen[key] = self._choose(collective, m, itemsize, root, in_order, native)
        return found

    def given(self, collective: str, algorithm: str, segments: int = 1, *, in_order: bool = False) -> Choice:
        """What a caller names himself; rings in the order of the measured links."""
        ring = algorithm in RINGS.get(collective, ()) and not in_order
        return Choice(algorithm, segments, order=self._order if ring else None)

    def schedule(self, collective: str, choice: Choice, *, root: int = 0) -> Schedule:
        """The schedule of a choice."""
        if choice.order is None:
            return segmented(self._plain(collective, choice.algorithm, root), choice.segments)
        made = self._plain(collective, choice.algorithm, choice.order.index(root))
        return segmented(reordered(made, choice.order), choice.segments)

    def keeps_order(self, collective: str, algorithm: str, root: int) -> bool:
        """Whether an algorithm is proved to keep the order of ranks."""
        return _keeps_order(collective, algorithm, self.p, root, self.per_node)

    def ordered(self, collective: str, root: int) -> list[str]:
        """The algorithms that keep the order of ranks."""
        return [a for a in ALGORITHMS[collective] if self.keeps_order(collective, a, root)]

    def _plain(self, collective: str, algorithm: str, root: int) -> Schedule:
        return collective_schedule(collective, algorithm, self.p, root=root, per_node=self.per_node)

    def _choose(self, collective: str, m: int, itemsize: int, root: int, in_order: bool, native: bool) -> Choice:
        offered = native and not in_order and self._offers(collective)
        measured = [
            replace(
                self.given(collective, t.algorithm, t.segments, in_order=in_order),
                seconds=t.at(m),
                origin="measured",
            )
            for t in self._tables(collective)
            if (offered if t.algorithm == NATIVE else self._allowed(collective, t.algorithm, root, in_order))
        ]
        if measured:
            return min(measured, key=lambda c: (c.seconds, c.algorithm, c.segments))
        if offered and self._cluster is None:
            return Choice(NATIVE, origin="offered")
        if in_order:
            return self._cheapest_in_order(collective, m, itemsize, root)
        found = cheapest(collective, self.p, m, self.links, per_node=self.per_node, itemsize=itemsize, root=root)
        return Choice(found.algorithm, found.segments, found.seconds, "priced", found.order)

    def _tables(self, collective: str) -> list[CollectiveTable]:
        if self._cluster is None:
            return []
        return [
            t
            for t in self._cluster.collective
            if (t.collective, t.ranks, t.transport) == (collective, self.p, self._transport)
        ]

    def _allowed(self, collective: str, algorithm: str, root: int, in_order: bool) -> bool:
        # a file may have been written by a release that knew other algorithms
        return algorithm in ALGORITHMS[collective] and (not in_order or self.keeps_order(collective, algorithm, root))

    def _cheapest_in_order(self, collective: str, m: int, itemsize: int, root: int) -> Choice:
        names = self.ordered(collective, root)
        if not names:
            raise InputError(
                f"{collective} by an operator that does not commute", rule="no algorithm keeps the order of ranks"
            )
        whole = m - m % itemsize
        prices = {a: price(self._plain(collective, a, root), whole, self.links, itemsize=itemsize) for a in names}
        best = min(prices, key=lambda a: (prices[a], a))
        return Choice(best, 1, prices[best], "priced")


@lru_cache(maxsize=1024)
def _keeps_order(collective: str, algorithm: str, p: int, root: int, per_node: int | None) -> bool:
    return prove(collective_schedule(collective, algorithm, p, root=root, per_node=per_node)).in_rank_order


def _links_of(cluster: Cluster | None, p: int, per_node: int | None) -> Links | None:
    if cluster is None:
        return None
    if cluster.rank_link:
        between = {(pair.src, pair.dst): pair.link for pair in cluster.rank_link}
        if all((a, b) in between for a in range(p) for b in range(p) if a != b):
            return Pairs(lambda src, dst: between[src, dst])
    return Nodes.of(cluster) if cluster.network is not None else cluster.node.link


def _neighbours(links: Links, p: int) -> tuple[int, ...] | None:
    """The best ring, where each pair has a link of its own."""
    topology = as_topology(links)
    if p < 3 or not isinstance(topology, Pairs):
        return None
    order = ring_order(lambda a, b: message_seconds(_LONG / p, topology.link(a, b)), p)
    return None if order == tuple(range(p)) else order


def _fares(links: Links, p: int) -> str:
    """The links in words; of pairs, all of them."""
    topology = as_topology(links)
    if not isinstance(topology, Pairs):
        return str(topology)
    return " ".join(str(topology.link(a, b)) for a in range(p) for b in range(p) if a != b)
