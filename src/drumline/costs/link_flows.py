"""Messages counted on the links of a topology, many at once: the same links that `Topology.shared` names one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..theory.alpha_beta import NodeTopology
from ..theory.topologies import TorusTopology

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Counts = npt.NDArray[np.intp]


def group_flows(world: int, block: int, hop: int) -> tuple[Counts, Counts]:
    """(senders, receivers): each rank of a world sends `hop` ranks further on, cyclically in its block of ranks."""
    import numpy as np

    src = np.arange(world)
    return src, src - src % block + (src % block + hop) % block


def leaving(nodes: int, devices: int, src: Counts, dst: Counts) -> Counts:
    """Messages that leave each node."""
    import numpy as np

    away = src // devices != dst // devices
    return np.bincount(src[away] // devices, minlength=nodes)


def most(rounds: Iterable[Counts]) -> int:
    """The most messages on one link, of all rounds together."""
    import numpy as np

    return int(np.sum(list(rounds), axis=0).max(initial=0))


def link_loads(
    topology: NodeTopology | TorusTopology, nodes: int, src: Counts, dst: Counts
) -> Iterator[tuple[str, Counts]]:
    """(level, messages on each of its links) of all levels between nodes."""
    away = src // topology.devices != dst // topology.devices
    if isinstance(topology, TorusTopology):
        return _torus_loads(topology, src[away] // topology.devices, dst[away] // topology.devices)
    return _node_loads(topology, nodes, src[away], dst[away])


def _node_loads(topology: NodeTopology, nodes: int, src: Counts, dst: Counts) -> Iterator[tuple[str, Counts]]:
    import numpy as np

    d, rails = topology.devices, topology.rails
    a, b = src // d, dst // d
    rail_a, rail_b = src % d * rails // d, dst % d * rails // d
    word = "node" if rails == 1 else "rail"
    yield f"{word} out", np.bincount(a * rails + rail_a, minlength=nodes * rails)
    yield f"{word} in", np.bincount(b * rails + rail_b, minlength=nodes * rails)
    if topology.oversubscription > 1:
        under = topology.nodes_per_switch or nodes
        up, down = a // under * rails + rail_a, b // under * rails + rail_b
        size = -(-nodes // under) * rails
        yield "uplink", np.bincount(up[up != down], minlength=size)
        yield "downlink", np.bincount(down[up != down], minlength=size)


def _torus_loads(topology: TorusTopology, at: Counts, to: Counts) -> Iterator[tuple[str, Counts]]:
    """Along the last direction first, each the shorter way round, one node at a time."""
    import numpy as np

    nodes = int(np.prod(topology.shape))
    for axis in reversed(range(len(topology.shape))):
        n = topology.shape[axis]
        width = int(np.prod(topology.shape[axis + 1 :]))
        here, there = at // width % n, to // width % n
        forward = (there - here) % n
        for sign, step, hops in (
            ("+", 1, np.where(2 * forward <= n, forward, 0)),
            ("-", -1, np.where(2 * forward <= n, 0, n - forward)),
        ):
            load = np.zeros(nodes, dtype=np.intp)
            for hop in range(int(hops.max(initial=0))):
                passing = hops > hop
                place = at + ((here + step * hop) % n - here) * width
                load += np.bincount(place[passing], minlength=nodes)
            yield f"torus {'xyz'[axis]}{sign}", load
        at = at + (there - here) * width
