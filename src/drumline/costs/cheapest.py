"""Which algorithm, in how many segments and in which order of ranks: by price, over all that the table has.

The price of a round is a maximum of straight lines in m, one for each port. These lines are drawn once for a schedule
on a topology; from then on the price of any size is a few multiplications.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from ..core.errors import InputError
from ..schedules import ALGORITHMS, IN_RANK_ORDER, Schedule, collective_schedule, messages, reordered
from ..theory.alpha_beta import Flat, Links, Pairs, Port, Topology, as_topology, message_seconds
from ..theory.collective_forms import CLOSED_FORMS
from .ring_order import ring_order

SEGMENTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of segments that are tried."""

SMALLEST = 4096
"""Bytes below which a chunk is not cut further: start-ups, and copies of small pieces, would eat the gain."""

MANY = 64
"""From so many ranks on, only the algorithms that look best by closed form are priced round by round."""

PIPELINES = {
    "all_reduce": ("double_tree", "naive"),
    "broadcast": ("binomial", "chain", "logp"),
    "reduce": ("binomial", "chain"),
    "scan": ("linear",),
    "exscan": ("linear",),
}
"""Where ranks are idle in many rounds, so that segments fill them: of many ranks these are always looked at."""

RINGS = {"all_reduce": ("ring",), "all_gather": ("ring",), "reduce_scatter": ("ring",), "broadcast": ("chain",)}
"""Where neighbours talk, so that the order of ranks matters when pairs of them have links of their own."""


_Sizes = dict[tuple[int, int], int]
_Line = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """The way to run a collective of one size."""

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
def cheapest(
    collective: str,
    p: int,
    m: int,
    links: Links,
    *,
    per_node: int | None = None,
    itemsize: int = 1,
    root: int = 0,
    commutes: bool = True,
) -> Choice:
    """The cheapest algorithm for a buffer of m bytes over p ranks, of which `per_node` neighbours share a host.

    The price is the sum of its rounds, with chunks taken to be equal. Of equal prices the first in the table wins. An
    operation that does not commute gets one of those that keep the order of ranks.
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
        if p >= MANY and base.algorithm not in PIPELINES.get(collective, ()):
            continue
        floor = _floor(base, topology)
        for n in SEGMENTS[1:]:
            if m < n * max(SMALLEST, itemsize) * floor.chunks:
                break
            if floor.seconds(n, m) < best.seconds:
                best = min(best, _choice(base, n, m, topology), key=lambda choice: choice.seconds)
    return best


def _candidates(
    collective: str, p: int, m: int, topology: Topology, per_node: int | None, root: int, commutes: bool
) -> list[str]:
    """The algorithms worth a price: all, or for many ranks the best by closed form and those that gain by cutting."""
    if collective not in ALGORITHMS or p < 1:
        collective_schedule(collective, next(iter(ALGORITHMS.get(collective, ())), ""), p)  # refuses, and says why
    ordered = IN_RANK_ORDER.get(collective)
    known = [a for a in ALGORITHMS[collective] if commutes or ordered is None or a in ordered]
    if p < MANY:
        return known
    far = topology.link(root, (root + p // 2) % p)
    promising = sorted(known, key=lambda a: CLOSED_FORMS[collective, a](p, m, far))[:2]
    return [
        a
        for a in known
        if a in promising or a in PIPELINES.get(collective, ()) or (a == "hierarchical" and (per_node or p) < p)
    ]


def _order(collective: str, algorithm: str, p: int, m: int, topology: Topology) -> tuple[int, ...] | None:
    """A ring by the pairs' own links, where they have such."""
    if not isinstance(topology, Pairs) or algorithm not in RINGS.get(collective, ()) or p < 3:
        return None
    part = m if algorithm == "chain" else -(-m // p)
    order = _ring(topology, p, part)
    return None if order == tuple(range(p)) else order


@lru_cache(maxsize=256)
def _ring(topology: Pairs, p: int, part: int) -> tuple[int, ...]:
    return ring_order(lambda a, b: message_seconds(part, topology.link(a, b)), p)


@dataclass(frozen=True, slots=True)
class _Base:
    """The schedule before it is cut, by its names: cheap to look up."""

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


def _choice(base: _Base, n: int, m: int, topology: Topology) -> Choice:
    if n == 1 and base.p >= MANY and isinstance(topology, Flat) and (base.per_node or base.p) >= base.p:
        seconds = CLOSED_FORMS[base.collective, base.algorithm](base.p, m, topology.wire)
    else:
        rounds = _lines(base, n, topology).items()
        seconds = sum(count * max(a + b * m for a, b in lines) for lines, count in rounds)
    return Choice(base.algorithm, n, base.order, seconds)


@dataclass(frozen=True, slots=True)
class _Floor:
    """What no number of segments can get below, because each round has a start-up and the busiest port its bytes."""

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
    for found in base.rounds():
        count += 1
        for (src, dst), size in found.items():
            link = topology.link(src, dst)
            alpha = min(alpha, link.alpha)
            for port in (("out", src), ("in", dst), *topology.shared(src, dst)):
                rates[port] += size / chunks * link.beta
    return _Floor(chunks, count, alpha if count else 0.0, max(rates.values(), default=0.0))


@lru_cache(maxsize=4096)
def _lines(base: _Base, n: int, topology: Topology) -> dict[tuple[_Line, ...], int]:
    """The rounds of a schedule in n segments, each as lines (start-ups, seconds per byte of m); equal ones counted."""
    whole = base.schedule().chunks * n
    return dict(Counter(_round_lines(found, whole, topology) for found in _windows(base.rounds(), n)))


def _windows(rounds: Iterator[_Sizes], n: int) -> Iterator[_Sizes]:
    """The messages of each round in n segments: those of n rounds in a row, one for each segment."""
    if n == 1:
        yield from rounds
        return
    now: Counter[tuple[int, int]] = Counter()
    there: Counter[tuple[int, int]] = Counter()
    latest: deque[_Sizes] = deque()
    for entering in chain(rounds, ({},) * (n - 1)):
        latest.append(entering)
        now.update(entering)
        there.update(entering.keys())
        if len(latest) > n:
            leaving = latest.popleft()
            now.subtract(leaving)
            there.subtract(leaving.keys())
        yield {pair: now[pair] for pair, times in there.items() if times}


def _round_lines(found: _Sizes, whole: int, topology: Topology) -> tuple[_Line, ...]:
    """What `round_seconds` is the maximum of, as lines in m; a line that is nowhere above another is left out."""
    starts: defaultdict[Port, float] = defaultdict(float)
    rates: defaultdict[Port, float] = defaultdict(float)
    for (src, dst), size in found.items():
        link = topology.link(src, dst)
        rate = size / whole * link.beta
        for port in (("out", src), ("in", dst)):
            starts[port] += link.alpha
            rates[port] += rate
        for port in topology.shared(src, dst):
            starts[port] = max(starts[port], link.alpha)
            rates[port] += rate
    upper: list[_Line] = []
    for line in sorted(((start, rates[port]) for port, start in starts.items()), reverse=True):
        if not upper or line[1] > upper[-1][1]:
            upper.append(line)
    return tuple(upper) or ((0.0, 0.0),)
