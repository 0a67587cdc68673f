"""Machines that many people have, as cluster files with data-sheet numbers."""

from __future__ import annotations

from pathlib import Path

from ...core.errors import ClusterError, nearest
from ..spec import Cluster

_FOLDER = Path(__file__).parent


def catalogue() -> tuple[str, ...]:
    """The names of the clusters that ship with Drumline."""
    return tuple(sorted(p.stem for p in _FOLDER.glob("*.toml")))


def load(name: str | Path) -> Cluster:
    """A cluster from a file, or from the catalogue by its name."""
    if Path(name).suffix == ".toml" or "/" in str(name):
        return Cluster.load(name)
    if str(name) in catalogue():
        return Cluster.load(_FOLDER / f"{name}.toml")
    if Path(name).exists():
        return Cluster.load(name)
    raise ClusterError(
        f"no cluster {str(name)!r}",
        rule=f"a file ending in .toml, or one of {', '.join(catalogue())}",
        fix=nearest(str(name), catalogue()) or "drumline measure writes one for this machine",
    )
