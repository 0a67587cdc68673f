"""Fit the constants of link types to published collectives: links inside a node first, then links between nodes.

Coordinate descent on the mean absolute error. The loss has kinks (absolute values, the faster of ring and tree), so a
least-squares solver would fit something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...clusters.link_types import LinkType, LinkTypes
from .model import interconnect_seconds
from .rows import CollectiveRow

MIN_BYTES = 1e6
"""Smaller messages are not fitted: start-up noise and protocol switches dominate them."""

FITTED_FIELDS = {
    "node": ("startup", "hop", "efficiency", "local_seconds_per_byte"),
    "network": ("startup", "hop", "efficiency", "tree_startup", "tree_efficiency"),
}
"""Fields of a link type that are fitted, by level."""

_ROUNDS = 60

ESTIMATES = {
    "nvswitch": LinkType("node", 45e-6, 2e-6, 0.95, 1.8e-12),
    "nvlink": LinkType("node", 25e-6, 4e-6, 0.95, 1e-12),
    "pcie": LinkType("node", 30e-6, 6e-6, 0.8, 1e-12),
    "xgmi": LinkType("node", 30e-6, 4e-6, 0.8, 1.8e-12),
    "infiniband": LinkType("network", 60e-6, 30e-6, 0.75, 0.0, 500e-6, 0.85),
    "efa": LinkType("network", 150e-6, 40e-6, 0.75, 0.0, 700e-6, 0.85),
    "efav2": LinkType("network", 100e-6, 40e-6, 0.6, 0.0, 250e-6, 0.9),
    "ethernet": LinkType("network", 80e-6, 40e-6, 0.7, 0.0, 600e-6, 0.8),
    "slingshot": LinkType("network", 80e-6, 40e-6, 0.7, 0.0, 600e-6, 0.8),
    "tcp": LinkType("network", 200e-6, 50e-6, 0.3, 0.0, 0.0, 0.0),
}
"""Starting points of the fit; they ship as estimates where nothing was published."""


def large_enough(rows: Iterable[CollectiveRow]) -> list[CollectiveRow]:
    """Rows that fits and error statistics cover."""
    return [row for row in rows if row.bytes >= MIN_BYTES]


def fit_link_types(rows: Sequence[CollectiveRow]) -> LinkTypes:
    """Constants that predict the rows best; estimates for link types without rows."""
    types = LinkTypes({name: dataclasses.replace(link, origin="estimate") for name, link in ESTIMATES.items()})
    for level in ("node", "network"):
        for name, link in ESTIMATES.items():
            own = [row for row in large_enough(rows) if row.link_type == name and _level(row) == level]
            if link.level == level and own:
                types = LinkTypes({**types.link_type, name: _fit_one(name, own, types)})
    return types


def _level(row: CollectiveRow) -> str:
    return "node" if row.level == "inside" else "network"


def _fit_one(name: str, rows: list[CollectiveRow], types: LinkTypes) -> LinkType:
    link = types.link_type[name]
    free = [k for k in FITTED_FIELDS[link.level] if getattr(link, k) and (link.level == "node" or _identifies(k, rows))]

    def loss(values: dict[str, Any]) -> float:
        trial = LinkTypes({**types.link_type, name: dataclasses.replace(link, **values)})
        errors = (
            interconnect_seconds(r.collective, r.ranks, r.bytes, r.interconnect, trial) / r.seconds - 1 for r in rows
        )
        return sum(map(abs, errors)) / len(rows)

    start: dict[str, Any] = {key: getattr(link, key) for key in free}
    best = minimise(loss, start, upper={"efficiency": 1.0, "tree_efficiency": 1.0})
    rounded: dict[str, Any] = {key: float(f"{value:.3g}") for key, value in best.items()}
    # a constant belongs to a type of link: the origin gives the number of rows, not where they were measured
    origin = f"fitted on {len(rows)} published collectives of {MIN_BYTES:g} bytes and more; free: {', '.join(free)}"
    return dataclasses.replace(link, **rounded, origin=origin)


def _identifies(key: str, rows: list[CollectiveRow]) -> bool:
    """Whether the rows determine a constant: hops need several numbers of nodes, trees an interconnect with trees."""
    if key == "hop":
        return len({row.ranks for row in rows}) > 1
    if key == "startup":
        return len({row.bytes for row in rows}) > 1
    if key.startswith("tree"):
        return any(row.interconnect.has_tree for row in rows)
    return True


def minimise(
    loss: Callable[[dict[str, float]], float], start: dict[str, float], *, upper: dict[str, float]
) -> dict[str, float]:
    """Minimise a loss by coordinate descent: one value at a time, by factors that shrink when they stop helping."""
    best, least = dict(start), loss(start)
    steps = dict.fromkeys(start, 0.3)
    for _ in range(_ROUNDS):
        for key in start:
            for factor in (1 + steps[key], 1 / (1 + steps[key])):
                trial = {**best, key: min(best[key] * factor, upper.get(key, float("inf")))}
                value = loss(trial)
                if value < least:
                    best, least = trial, value
                    break
            else:
                steps[key] *= 0.7
    return best
