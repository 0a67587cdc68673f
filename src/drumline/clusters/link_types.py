"""Types of links (NVSwitch, InfiniBand, ...) and the constants of a collective on each.

The numbers are in link_types.toml. `drumline.costs.networks` uses them, and fits them to published measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ..core import files
from ..core.errors import ClusterError, nearest
from .measured import STRICT, Seconds

_FILE = Path(__file__).parent / "link_types.toml"
_Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class LinkType:
    """One type of link.

    A collective takes `startup + hop h + m (s / (efficiency B) + local_seconds_per_byte)` over h hops, with s m bytes
    on a link of bandwidth B.
    """

    __pydantic_config__ = STRICT
    OLD_KEYS: ClassVar[dict[str, str]] = {
        "start": "startup",
        "reach": "efficiency",
        "touch": "local_seconds_per_byte",
        "tree_start": "tree_startup",
        "tree_reach": "tree_efficiency",
    }
    level: Literal["node", "network"]
    """Inside a node or between nodes."""
    startup: Seconds
    """Before the first byte."""
    hop: Seconds
    """For each step of a ring inside a node; for each doubling of the nodes between them."""
    efficiency: _Share
    """The share of the data sheet's bandwidth that long messages reach."""
    local_seconds_per_byte: Annotated[float, Field(ge=0, lt=1e-6)] = 0.0
    """Inside a node: seconds per byte of the buffer for passes over the device's own memory, on top of the link."""
    tree_startup: Seconds = 0.0
    """Between nodes: the startup of a tree of nodes, which sends less than a ring of all devices but begins later."""
    tree_efficiency: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of the bandwidth that the tree reaches; 0 where there is no tree."""
    origin: str = ""
    """Source of the constants."""


@dataclass(frozen=True, slots=True)
class LinkTypes:
    """All types, by name."""

    __pydantic_config__ = STRICT
    OLD_KEYS: ClassVar[dict[str, str]] = {"wire": "link_type"}
    link_type: dict[str, LinkType]

    def get(self, name: str) -> LinkType:
        """The type of that name."""
        if name not in self.link_type:
            known = ", ".join(self.link_type)
            raise ClusterError(f"no link type {name!r}", rule=f"known: {known}", fix=nearest(name, self.link_type))
        return self.link_type[name]


def load_link_types(path: str | Path = _FILE) -> LinkTypes:
    """The types in a file."""
    return files.from_plain(LinkTypes, files.read_toml(path, ClusterError), str(path), ClusterError)


@cache
def link_types() -> LinkTypes:
    """The types that ship with Drumline."""
    return load_link_types()
