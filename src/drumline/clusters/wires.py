"""What links are made of, and how collectives run on each kind: a few constants a kind, each with its origin.

The numbers are in wires.toml. `drumline.costs.fabric` uses them, and fits them to published measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ..core import files
from ..core.errors import ClusterError, nearest
from ..core.units import parse_seconds
from .curves import STRICT

WIRES = Path(__file__).parent / "wires.toml"

_Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class Wire:
    """One kind of link. A collective takes start + hop h + m (s / (reach B) + touch): h hops, s m bytes on the link."""

    __pydantic_config__ = STRICT
    level: Literal["node", "network"]
    """Where it is found."""
    start: _Seconds
    """Before the first byte."""
    hop: _Seconds
    """For each step of a ring inside a node; for each doubling of the nodes between them."""
    reach: _Share
    """The share of the data sheet's bandwidth that long messages get."""
    touch: Annotated[float, Field(ge=0, lt=1e-6)] = 0.0
    """Inside a node: seconds per byte of the buffer for passes over the device's own memory, on top of the link."""
    tree_start: _Seconds = 0.0
    """Between nodes: the start of a tree of nodes, which sends less than a ring of all devices and begins later."""
    tree_reach: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of the bandwidth that the tree gets; 0 where there is none."""
    origin: str = ""
    """Where the constants come from."""


@dataclass(frozen=True, slots=True)
class Wires:
    """All kinds, by name."""

    __pydantic_config__ = STRICT
    wire: dict[str, Wire]

    def get(self, name: str) -> Wire:
        """The kind of that name."""
        if name not in self.wire:
            raise ClusterError(f"no wire {name!r}", rule=f"known: {', '.join(self.wire)}", fix=nearest(name, self.wire))
        return self.wire[name]


def load_wires(path: str | Path = WIRES) -> Wires:
    """The kinds in a file."""
    return files.from_plain(Wires, files.read_toml(path, ClusterError), str(path), ClusterError)


@cache
def wires() -> Wires:
    """The kinds that ship with Drumline."""
    return load_wires()
