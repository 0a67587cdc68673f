"""Chooses the cheapest algorithm for a collective, its number of segments and the order of its ranks.

The price of a round is a maximum of linear functions of m, one for each port. These lines are computed once for a
schedule on a topology; then the price of any size is a few multiplications.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from ..core.errors import InputError
from ..schedules import (
    ALGORITHMS,
    IN_RANK_ORDER,
    SEGMENTED_ALL_REDUCES,
    Schedule,
    collective_schedule,
    messages,
    reordered,
)
from ..theory.alpha_beta import Links, PairTopology, Port, Topology, UniformTopology, as_topology, message_seconds
from ..theory.collective_forms import CLOSED_FORMS
from .ring_order import ring_order

SEGMENTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of segments that are tried."""

SMALLEST_CHUNK = 4096
"""Bytes below which a chunk is not cut further: start-ups and copies of small pieces would cost more than is gained."""

MANY_RANKS = 64
"""Ranks from which only the best algorithms by closed form are priced round by round."""

SEGMENTED_ALGORITHMS = {
    "all_reduce": SEGMENTED_ALL_REDUCES,
    "broadcast": ("binomial", "chain", "logp"),
    "reduce": ("binomial", "chain"),
    "scan": ("linear",),
    "exscan": ("linear",),
}
"""Algorithms in which ranks are idle in many rounds, which segments fill: priced for any number of ranks."""

RING_ALGORITHMS = {
    "all_reduce": ("ring",),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "broadcast": ("chain",),
}
"""Algorithms in which neighbours exchange messages: the order of ranks matters if pairs have their own links."""

_Sizes = dict[tuple[int, int], int]
_Line = tuple[float, float]


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """How to run a collective of one size."""

    algorithm: str
    segments: int
    order: tuple[int, ...] | None
    """Ranks in the order of the ring, for `reordered`; None leaves them as they are."""
    seconds: float

    def __str__(self) -> str:
        cut = f" in {self.segments} segments" if self.segments > 1 else ""
        turn = f", ranks in the order {', '.join(map(str, self.order))}" if self.order else ""
        return f"{self.algorithm}{cut}{turn}: {self.seconds:.3g} s"


@lru_cache(maxsize=4096)
def cheapest_algorithm(
    collective: str,
    p: int,
    m: int,
    links: Links,
    *,
    per_node: int | None = None,
    itemsize: int = 1,
    root: int = 0,
    commutes: bool = True,
) -> AlgorithmChoice:
    """The cheapest algorithm for a buffer of m bytes over p ranks, of which `per_node` neighbours share a host.

    The price is the sum of its rounds, with equal chunks. Of equal prices the first in the table wins. An operation
    that does not commute gets an algorithm that keeps the order of ranks.
    """
    if m < 0 or itemsize < 1:
        raise InputError(f"{collective} of {m} bytes, elements of {itemsize}", rule="bytes >= 0, elements >= 1 byte")
    topology = as_topology(links)
    bases = [
        _Base(collective, algorithm, p, root, per_node, _order(collective, algorithm, p, m, topology))
        for algorithm in _candidates(collective, p, m, topology, per_node, root, commutes)
    ]
    best = min((_choice(base, 1, m, topology) for base in bases), key=lambda choice: choice.seconds)
    for base in bases:
        if p >= MANY_RANKS and base.algorithm not in SEGMENTED_ALGORITHMS.get(collective, ()):
            continue
        floor = _floor(base, topology)
        for n in SEGMENTS[1:]:
            if m < n * max(SMALLEST_CHUNK, itemsize) * floor.chunks:
                break
            if floor.seconds(n, m) < best.seconds:
                best = min(best, _choice(base, n, m, topology), key=lambda choice: choice.seconds)
    return best


def algorithm_seconds(
    collective: str,
    algorithm: str,
    p: int,
    m: float,
    links: Links,
    *,
    per_node: int | None = None,
    segments: int = 1,
) -> float:
    """The price of one algorithm for a buffer of m bytes: the sum of its rounds, with equal chunks."""
    base = _Base(collective, algorithm, p, 0, per_node, None)
    return _choice(base, segments, m, as_topology(links)).seconds


def _candidates(
    collective: str, p: int, m: int, topology: Topology, per_node: int | None, root: int, commutes: bool
) -> list[str]:
    """The algorithms to price: all, or for many ranks the best by closed form and those that gain from segments."""
    if collective not in ALGORITHMS or p < 1:
        collective_schedule(collective, next(iter(ALGORITHMS.get(collective, ())), ""), p)  # raises with the reason
    ordered = IN_RANK_ORDER.get(collective)
    known = [a for a in ALGORITHMS[collective] if commutes or ordered is None or a in ordered]
    if p < MANY_RANKS:
        return known
    far = topology.link(root, (root + p // 2) % p)
    promising = sorted(known, key=lambda a: CLOSED_FORMS[collective, a](p, m, far))[:2]
    return [
        a
        for a in known
        if a in promising
        or a in SEGMENTED_ALGORITHMS.get(collective, ())
        or (a == "hierarchical" and (per_node or p) < p)
    ]


def _order(collective: str, algorithm: str, p: int, m: int, topology: Topology) -> tuple[int, ...] | None:
    """The order of a ring, if pairs of ranks have their own links."""
    if not isinstance(topology, PairTopology) or algorithm not in RING_ALGORITHMS.get(collective, ()) or p < 3:
        return None
    part = m if algorithm == "chain" else -(-m // p)
    order = _ring(topology, p, part)
    return None if order == tuple(range(p)) else order


@lru_cache(maxsize=256)
def _ring(topology: PairTopology, p: int, part: int) -> tuple[int, ...]:
    return ring_order(lambda a, b: message_seconds(part, topology.link(a, b)), p)


@dataclass(frozen=True, slots=True)
class _Base:
    """The key of a schedule before it is cut into segments."""

    collective: str
    algorithm: str
    p: int
    root: int
    per_node: int | None
    order: tuple[int, ...] | None

    def schedule(self) -> Schedule:
        root = self.root if self.order is None else self.order.index(self.root)
        made = collective_schedule(self.collective, self.algorithm, self.p, root=root, per_node=self.per_node)
        return made if self.order is None else reordered(made, self.order)

    def rounds(self) -> Iterator[_Sizes]:
        """The messages of each round with their sizes, in elements of a buffer that has one for each chunk."""
        schedule = self.schedule()
        # A buffer of as many elements as chunks has whole chunks, so shares of m are exact.
        sizes = schedule.sizes(schedule.chunks)
        for sends in schedule.rounds:
            yield {pair: sum(sizes[s.chunk] for s in parts) for pair, parts in messages(sends).items()}


def _choice(base: _Base, n: int, m: float, topology: Topology) -> AlgorithmChoice:
    if (
        n == 1
        and base.p >= MANY_RANKS
        and isinstance(topology, UniformTopology)
        and (base.per_node or base.p) >= base.p
    ):
        seconds = CLOSED_FORMS[base.collective, base.algorithm](base.p, m, topology.single)
    else:
        rounds = _lines(base, n, topology).items()
        seconds = sum(count * max(a + b * m for a, b in lines) for lines, count in rounds)
    return AlgorithmChoice(base.algorithm, n, base.order, seconds)


@dataclass(frozen=True, slots=True)
class _Floor:
    """A lower bound for any number of segments: each round has a start-up, and the busiest port its bytes."""

    chunks: int
    rounds: int
    alpha: float
    rate: float

    def seconds(self, n: int, m: int) -> float:
        return (self.rounds + n - 1) * self.alpha + self.rate * m


@lru_cache(maxsize=4096)
def _floor(base: _Base, topology: Topology) -> _Floor:
    chunks = base.schedule().chunks
    count, alpha = 0, float("inf")
    rates: defaultdict[Port, float] = defaultdict(float)
    for sizes in base.rounds():
        count += 1
        for (src, dst), size in sizes.items():
            link = topology.link(src, dst)
            alpha = min(alpha, link.alpha)
            for port in (("out", src, 0), ("in", dst, 0)):
                rates[port] += size / chunks * link.beta
            for port in topology.shared(src, dst):
                rates[port] += size / chunks / topology.capacity(port)
    return _Floor(chunks, count, alpha if count else 0.0, max(rates.values(), default=0.0))


@lru_cache(maxsize=4096)
def _lines(base: _Base, n: int, topology: Topology) -> dict[tuple[_Line, ...], int]:
    """The rounds of a schedule in n segments, each as lines (start-ups, seconds per byte of m); equal ones counted."""
    whole = base.schedule().chunks * n
    return dict(Counter(_round_lines(sizes, whole, topology) for sizes in _windows(base.rounds(), n)))


def _windows(rounds: Iterator[_Sizes], n: int) -> Iterator[_Sizes]:
    """The messages of each round in n segments: those of n rounds in a row, one for each segment."""
    if n == 1:
        yield from rounds
        return
    now: Counter[tuple[int, int]] = Counter()
    present: Counter[tuple[int, int]] = Counter()
    latest: deque[_Sizes] = deque()
    for entering in chain(rounds, ({},) * (n - 1)):
        latest.append(entering)
        now.update(entering)
        present.update(entering.keys())
        if len(latest) > n:
            leaving = latest.popleft()
            now.subtract(leaving)
            present.subtract(leaving.keys())
        yield {pair: now[pair] for pair, times in present.items() if times}


def _round_lines(sizes: _Sizes, whole: int, topology: Topology) -> tuple[_Line, ...]:
    """The lines in m whose maximum is `round_seconds`; a line that is nowhere above another is left out."""
    starts: defaultdict[Port, float] = defaultdict(float)
    rates: defaultdict[Port, float] = defaultdict(float)
    for (src, dst), size in sizes.items():
        link = topology.link(src, dst)
        for port in (("out", src, 0), ("in", dst, 0)):
            starts[port] += link.alpha
            rates[port] += size / whole * link.beta
        for port in topology.shared(src, dst):
            starts[port] = max(starts[port], link.alpha)
            rates[port] += size / whole / topology.capacity(port)
    upper: list[_Line] = []
    for line in sorted(((start, rates[port]) for port, start in starts.items()), reverse=True):
        if not upper or line[1] > upper[-1][1]:
            upper.append(line)
    return tuple(upper) or ((0.0, 0.0),)
