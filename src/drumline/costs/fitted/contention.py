"""Contention between the groups of every layout, on a network with less than full bisection bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...clusters import Cluster
from ..contention import cluster_contention, limits_messages
from ..plan_columns import Array, Columns
from .inputs import LayoutColumns


@dataclass(frozen=True, slots=True)
class ContentionColumns(Columns):
    """Factors on seconds between nodes, by the axis of the messages (`costs.contention`)."""

    tp: Array
    cp: Array
    shards: Array
    """Between the ranks that share one sharded copy; between all replicas where nothing is sharded."""
    replicas: Array
    """Between copies of the same shard."""
    stages: Array


FULL_BISECTION = ContentionColumns.of(tp=1.0, cp=1.0, shards=1.0, replicas=1.0, stages=1.0)


def layout_contention(layouts: LayoutColumns, cluster: Cluster) -> ContentionColumns:
    """The factors of every layout on a cluster."""
    if not limits_messages(cluster):
        return FULL_BISECTION
    shared = shared_by(layouts)
    return ContentionColumns.of(
        tp=_factors(layouts.tp, np.ones_like(layouts.tp), cluster, "across"),
        cp=_factors(layouts.cp, layouts.tp, cluster, "next"),
        shards=_factors(shared, layouts.tp, cluster, "across"),
        replicas=_factors(layouts.dp * layouts.cp / shared, layouts.tp * shared, cluster, "across"),
        stages=_factors(layouts.pp, layouts.ranks / layouts.pp, cluster, "next"),
    )


def shared_by(layouts: LayoutColumns) -> Array:
    """Ranks that share one sharded copy of the gradients; all with the same weights where nothing is sharded."""
    replicas = layouts.dp * layouts.cp
    return np.where(layouts.zero >= 1, np.minimum(layouts.shard * layouts.cp, replicas), replicas)


def _factors(ranks: Array, strides: Array, cluster: Cluster, pattern: str) -> Array:
    groups, rows = np.unique(np.stack([ranks, strides]).astype(int), axis=1, return_inverse=True)
    factors = [cluster_contention(cluster, int(p), int(stride), pattern).factor for p, stride in groups.T]
    return np.array(factors)[rows.ravel()]
