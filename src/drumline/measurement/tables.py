"""Measured collectives as tables of a cluster file, which `algorithm="auto"` chooses by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..clusters import Cluster, CollectiveTable
from ..reports.bench import Result
from .benchconfig import MESSAGES, Outcome


def tables(results: Sequence[Result]) -> tuple[CollectiveTable, ...]:
    """What auto chooses by, from what was measured."""
    found: dict[tuple[str, str, int, str, int], dict[int, float]] = {}
    for r in results:
        if r.algorithm != "auto" and r.collective not in MESSAGES and r.seconds > 0:
            key = (r.collective, r.transport, r.ranks, r.algorithm, r.segments)
            found.setdefault(key, {})[max(r.bytes, 1)] = r.seconds
    made = []
    for (collective, transport, ranks, algorithm, segments), times in found.items():
        sizes, seconds = zip(*sorted(times.items()), strict=True)
        made.append(CollectiveTable(collective, transport, ranks, tuple(map(float, sizes)), seconds, algorithm, segments))
    return tuple(made)


def with_tables(cluster: Cluster, outcome: Outcome, origin: str) -> Cluster:
    """The cluster with the new tables in place of those of the same collective, transport and ranks."""
    new = tables(outcome.results)
    keys = {(t.collective, t.transport, t.ranks) for t in new}
    old = tuple(t for t in cluster.collective if (t.collective, t.transport, t.ranks) not in keys)
    pairs = tuple(outcome.pairs) or cluster.rank_link
    origins = {**cluster.origin, "collective": origin, **({"rank_link": origin} if outcome.pairs else {})}
    return replace(cluster, collective=(*old, *new), rank_link=pairs, origin=origins)
