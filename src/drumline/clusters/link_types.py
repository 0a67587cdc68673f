"""What links are made of, and how collectives run on each kind: a few constants a kind, each with its origin.

The numbers are in wires.toml. `drumline.costs.networks` uses them, and fits them to published measurements.
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
from .measured import STRICT

WIRES = Path(__file__).parent / "wires.toml"

_Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class LinkType:
    """One kind of link. A collective takes start + hop h + m (s / (reach B) + touch): h hops, s m bytes on the link."""

    __pydantic_config__ = STRICT
    level: Literal["node", "network"]
    """Where it is found."""
    startup: _Seconds
    """Before the first byte."""
    hop: _Seconds
    """For each step of a ring inside a node; for each doubling of the nodes between them."""
    efficiency: _Share
    """The share of the data sheet's bandwidth that long messages get."""
    local_seconds_per_byte: Annotated[float, Field(ge=0, lt=1e-6)] = 0.0
    """Inside a node: seconds per byte of the buffer for passes over the device's own memory, on top of the link."""
    tree_startup: _Seconds = 0.0
    """Between nodes: the start of a tree of nodes, which sends less than a ring of all devices and begins later."""
    tree_efficiency: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of the bandwidth that the tree gets; 0 where there is none."""
    origin: str = ""
    """Where the constants come from."""


@dataclass(frozen=True, slots=True)
class LinkTypes:
    """All kinds, by name."""

    __pydantic_config__ = STRICT
    link_type: dict[str, LinkType]

    def get(self, name: str) -> LinkType:
        """The kind of that name."""
        if name not in self.link_type:
            raise ClusterError(
                f"no wire {name!r}", rule=f"known: {', '.join(self.link_type)}", fix=nearest(name, self.link_type)
            )
        return self.link_type[name]


def load_link_types(path: str | Path = WIRES) -> LinkTypes:
    """The kinds in a file."""
    return files.from_plain(LinkTypes, files.read_toml(path, ClusterError), str(path), ClusterError)


@cache
def link_types() -> LinkTypes:
    """The kinds that ship with Drumline."""
    return load_link_types()
