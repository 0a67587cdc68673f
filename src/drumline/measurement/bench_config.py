"""Input and output of `drumline bench`, and its tables of a cluster file. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..clusters import Cluster, CollectiveTable, Link
from ..clusters.links import RankLink
from ..core.errors import InputError
from ..reports.bench_results import BenchResult
from ..schedules import OLD_WORDS

MESSAGES = ("latency", "bandwidth")
"""Measured besides the collectives, between the first two ranks."""
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "complex64",
    "complex128",
)
"""Element types that every transport can sum."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Input of a benchmark."""

    collectives: tuple[str, ...]
    """Names of collectives, and of MESSAGES."""
    sizes: tuple[int, ...]
    """Bytes of the whole buffer."""
    algorithms: tuple[str, ...]
    """Names, `ring*4` for four segments, `native`, `auto`; ("all",) for all of them."""
    transports: tuple[str, ...]
    dtype: str = "float32"
    seconds: float = 20.0
    cluster: Cluster | None = None
    """Basis of the choice of `auto`; without it, the links that are measured first."""
    pairs: bool = False
    """Whether to measure the link of each pair of ranks."""


@dataclass(slots=True)
class BenchOutcome:
    """Results over one or several transports."""

    results: list[BenchResult] = field(default_factory=list)
    links: dict[str, tuple[Link, float]] = field(default_factory=dict)
    """By transport: the fitted link and its mean relative error."""
    pairs: list[RankLink] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, other: BenchOutcome) -> None:
        """Add the results of another transport."""
        self.results += other.results
        self.links |= other.links
        self.pairs = self.pairs or other.pairs
        self.skipped += other.skipped


def parse_algorithm(text: str) -> tuple[str, int]:
    """`ring*4`: four segments."""
    name, star, number = text.partition("*")
    if star and not (number.isdigit() and int(number) > 0):
        raise InputError(f"algorithm {text!r}", rule="a name, or name*n for n segments")
    return OLD_WORDS.get(name, name), int(number) if star else 1


def tables(results: Sequence[BenchResult]) -> tuple[CollectiveTable, ...]:
    """Tables for the choice of `auto`, from benchmark results."""
    times_by_key: dict[tuple[str, str, int, str, int], dict[int, float]] = {}
    for r in results:
        if r.algorithm != "auto" and r.collective not in MESSAGES and r.seconds > 0:
            key = (r.collective, r.transport, r.ranks, r.algorithm, r.segments)
            times_by_key.setdefault(key, {})[max(r.bytes, 1)] = r.seconds
    made = []
    for (collective, transport, ranks, algorithm, segments), times in times_by_key.items():
        sizes, seconds = zip(*sorted(times.items()), strict=True)
        made.append(
            CollectiveTable(collective, transport, ranks, tuple(map(float, sizes)), seconds, algorithm, segments)
        )
    return tuple(made)


def with_tables(cluster: Cluster, outcome: BenchOutcome, origin: str) -> Cluster:
    """The cluster with new tables replacing those of the same collective, transport and ranks."""
    new = tables(outcome.results)
    keys = {(t.collective, t.transport, t.ranks) for t in new}
    old = tuple(t for t in cluster.collective if (t.collective, t.transport, t.ranks) not in keys)
    pairs = tuple(outcome.pairs) or cluster.rank_link
    origins = {**cluster.origin, "collective": origin, **({"rank_link": origin} if outcome.pairs else {})}
    return replace(cluster, collective=(*old, *new), rank_link=pairs, origin=origins)
