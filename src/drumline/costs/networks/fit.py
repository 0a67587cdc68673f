"""Fits the constants of wires to published collectives: those inside a node first, then those between nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...clusters.link_types import LinkType, LinkTypes
from .model import fabric_seconds
from .rows import Row

SMALLEST = 1e6
"""Bytes from which on messages count: below, start-up noise and the protocols of the moment decide."""

FREE = {"node": ("start", "hop", "reach", "touch"), "network": ("start", "hop", "reach", "tree_start", "tree_reach")}
"""What is fitted of a wire, by its level."""

_ROUNDS = 60

ESTIMATES = {
    "nvswitch": LinkType("node", 45e-6, 2e-6, 0.95, 1.8e-12),
    "nvlink": LinkType("node", 25e-6, 4e-6, 0.95, 1e-12),
    "pcie": LinkType("node", 30e-6, 6e-6, 0.8, 1e-12),
    "xgmi": LinkType("node", 30e-6, 4e-6, 0.8, 1.8e-12),
    "infiniband": LinkType("network", 60e-6, 30e-6, 0.75, 0.0, 500e-6, 0.85),
    "efa": LinkType("network", 150e-6, 40e-6, 0.75, 0.0, 700e-6, 0.85),
    "ethernet": LinkType("network", 80e-6, 40e-6, 0.7, 0.0, 600e-6, 0.8),
    "slingshot": LinkType("network", 80e-6, 40e-6, 0.7, 0.0, 600e-6, 0.8),
    "tcp": LinkType("network", 200e-6, 50e-6, 0.3, 0.0, 0.0, 0.0),
}
"""Where fits begin, and what stands where nothing was published: estimates."""


def counted(rows: Iterable[Row]) -> list[Row]:
    """The rows that fits and errors are about."""
    return [row for row in rows if row.bytes >= SMALLEST]


def fit(rows: Sequence[Row]) -> LinkTypes:
    """The constants that predict the rows best; estimates where no row tells."""
    known = LinkTypes({name: dataclasses.replace(wire, origin="estimate") for name, wire in ESTIMATES.items()})
    for level in ("node", "network"):
        for name, wire in ESTIMATES.items():
            own = [row for row in counted(rows) if row.wire == name and _level(row) == level]
            if wire.level == level and own:
                known = LinkTypes({**known.link_type, name: _fitted(name, own, known)})
    return known


def _level(row: Row) -> str:
    return "node" if row.level == "inside" else "network"


def _fitted(name: str, rows: list[Row], known: LinkTypes) -> LinkType:
    wire = known.link_type[name]
    free = [key for key in FREE[wire.level] if getattr(wire, key) and (wire.level == "node" or _tells(key, rows))]
    kept: dict[str, Any] = {key: getattr(wire, key) for key in free}

    def loss(values: dict[str, Any]) -> float:
        trial = LinkTypes({**known.link_type, name: dataclasses.replace(wire, **values)})
        errors = (fabric_seconds(r.collective, r.ranks, r.bytes, r.fabric, trial) / r.seconds - 1 for r in rows)
        return sum(map(abs, errors)) / len(rows)

    found = descend(loss, kept, upper={"reach": 1.0, "tree_reach": 1.0})
    best: dict[str, Any] = {key: float(f"{value:.3g}") for key, value in found.items()}
    # the number of rows, and no name of where they are from: a constant belongs to a kind of link
    origin = f"fitted on {len(rows)} published collectives of {SMALLEST:g} bytes and more; free: {', '.join(free)}"
    return dataclasses.replace(wire, **best, origin=origin)


def _tells(key: str, rows: list[Row]) -> bool:
    """Whether the rows say anything about a constant: hops need several numbers of nodes, trees their fabric."""
    if key == "hop":
        return len({row.ranks for row in rows}) > 1
    if key == "start":
        return len({row.bytes for row in rows}) > 1
    if key.startswith("tree"):
        return any(row.fabric.has_tree for row in rows)
    return True


def descend(
    loss: Callable[[dict[str, float]], float], start: dict[str, float], *, upper: dict[str, float]
) -> dict[str, float]:
    """The least loss near `start`, one value at a time, by factors that shrink where they do not help."""
    now, least = dict(start), loss(start)
    steps = dict.fromkeys(start, 0.3)
    for _ in range(_ROUNDS):
        for key in start:
            for factor in (1 + steps[key], 1 / (1 + steps[key])):
                trial = {**now, key: min(now[key] * factor, upper.get(key, float("inf")))}
                found = loss(trial)
                if found < least:
                    now, least = trial, found
                    break
            else:
                steps[key] *= 0.7
    return now
