"""Process topologies as values: a Cartesian grid, a graph known to all ranks, and a graph of which a rank knows its
own edges. They compute neighbours and send nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import index
from typing import ClassVar, Protocol

from . import constants as C
from .exception import MPIError
from .memory import SpecialBuffer

UNWEIGHTED, WEIGHTS_EMPTY = SpecialBuffer("UNWEIGHTED", 10), SpecialBuffer("WEIGHTS_EMPTY", 20)

Edge = tuple[int, int]
"""(rank, lane): lanes distinguish the edges between two ranks; messages on one lane keep their order."""


@dataclass(frozen=True, slots=True)
class Neighborhood:
    """The edges of one rank."""

    sources: tuple[Edge, ...]
    destinations: tuple[Edge, ...]


class ProcessTopology(Protocol):
    """A topology of a communicator."""

    kind: ClassVar[int]

    def neighborhood(self, rank: int) -> Neighborhood:
        """The edges of a rank."""


@dataclass(frozen=True, slots=True)
class CartesianGrid:
    """Ranks in a grid, in row-major order; a periodic dim is a ring."""

    kind: ClassVar[int] = C.CART
    dims: tuple[int, ...]
    periods: tuple[bool, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.dims)

    def coords(self, rank: int) -> list[int]:
        """The coordinates of a rank."""
        if not 0 <= rank < self.size:
            raise MPIError(C.ERR_RANK, f"rank {rank}", rule=f"0 <= rank < {self.size}")
        coords = []
        for dim in reversed(self.dims):
            rank, coord = divmod(rank, dim)
            coords.append(coord)
        return coords[::-1]

    def rank(self, coords: Sequence[int]) -> int:
        """The rank at some coordinates; in a periodic dim they wrap around."""
        rank = 0
        for i, (dim, periodic, coord) in enumerate(
            zip(self.dims, self.periods, integers(coords, len(self.dims)), strict=True)
        ):
            if not periodic and not 0 <= coord < dim:
                raise MPIError(C.ERR_ARG, f"coordinate {coord} in dim {i}", rule=f"0 <= coordinate < {dim}")
            rank = rank * dim + coord % dim
        return rank

    def shift(self, rank: int, direction: int, disp: int) -> tuple[int, int]:
        """(source, destination) of a shift along one dim; PROC_NULL beyond the end of a dim that is not periodic."""
        if not 0 <= direction < len(self.dims):
            raise MPIError(C.ERR_ARG, f"direction {direction}", rule=f"0 <= direction < {len(self.dims)}")
        ends = []
        for step in (-disp, disp):
            coords = self.coords(rank)
            coords[direction] += step
            inside = self.periods[direction] or 0 <= coords[direction] < self.dims[direction]
            ends.append(self.rank(coords) if inside else C.PROC_NULL)
        return ends[0], ends[1]

    def neighborhood(self, rank: int) -> Neighborhood:
        """The two neighbours in each dim. The lane is the direction in which a message travels: in a ring of one or
        two ranks both neighbours are the same rank, and what it sends down arrives from above."""
        sources, destinations = [], []
        for i in range(len(self.dims)):
            down, up = self.shift(rank, i, 1)
            sources += [(down, 2 * i + 1), (up, 2 * i)]
            destinations += [(down, 2 * i), (up, 2 * i + 1)]
        return Neighborhood(tuple(sources), tuple(destinations))

    def without(self, keep: Sequence[object]) -> CartesianGrid:
        """The grid of the dims to keep."""
        kept = [i for i, k in enumerate(keep) if k]
        return CartesianGrid(tuple(self.dims[i] for i in kept), tuple(self.periods[i] for i in kept))


@dataclass(frozen=True, slots=True)
class SharedGraph:
    """A graph that every rank knows: rank r's neighbours are edges[index[r - 1] : index[r]]."""

    kind: ClassVar[int] = C.GRAPH
    index: tuple[int, ...]
    edges: tuple[int, ...]

    def neighbors(self, rank: int) -> list[int]:
        """The neighbours of a rank."""
        if not 0 <= rank < len(self.index):
            raise MPIError(C.ERR_RANK, f"rank {rank}", rule=f"0 <= rank < {len(self.index)}")
        return list(self.edges[self.index[rank - 1] if rank else 0 : self.index[rank]])

    def neighborhood(self, rank: int) -> Neighborhood:
        """The neighbours, which are both sources and destinations."""
        edges = tuple((r, 0) for r in self.neighbors(rank))
        return Neighborhood(edges, edges)


@dataclass(frozen=True, slots=True)
class LocalGraph:
    """The edges of this rank in a distributed graph, with their weights if it has any."""

    kind: ClassVar[int] = C.DIST_GRAPH
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    weights: tuple[tuple[int, ...], tuple[int, ...]] | None

    def neighborhood(self, rank: int) -> Neighborhood:
        """This rank's edges."""
        return Neighborhood(tuple((r, 0) for r in self.sources), tuple((r, 0) for r in self.destinations))


# -- from arguments ---------------------------------------------------------------------------------------------------


def integers(values: Sequence[int], count: int | None = None) -> list[int]:
    """A list of integers, of a given length."""
    numbers = [index(v) for v in values]
    if count is not None and len(numbers) != count:
        raise ValueError(f"expecting {count} items, got {len(numbers)}")
    return numbers


def cartesian_grid(dims: Sequence[int], periods: Sequence[bool] | bool | None, ranks: int) -> CartesianGrid:
    """A grid of at most `ranks` ranks."""
    sizes = integers(dims)
    wraps = [bool(periods)] * len(sizes) if periods is None or isinstance(periods, bool) else list(periods)
    if len(wraps) != len(sizes):
        raise ValueError(f"expecting {len(sizes)} items, got {len(wraps)}")
    if any(n < 1 for n in sizes):
        raise MPIError(C.ERR_DIMS, f"dims {sizes}", rule="each dim has at least one rank", fix="Compute_dims")
    if prod(sizes) > ranks:
        raise MPIError(C.ERR_ARG, f"a grid of {prod(sizes)} ranks", rule=f"at most {ranks} ranks", fix="Compute_dims")
    return CartesianGrid(tuple(sizes), tuple(bool(w) for w in wraps))


def shared_graph(indices: Sequence[int], edges: Sequence[int], ranks: int) -> SharedGraph:
    """A graph of at most `ranks` ranks; the index may start with an additional 0."""
    ends, targets = integers(indices), integers(edges)
    if len(ends) > 1 and ends[0] == 0 and ends[-1] == len(targets):
        ends = ends[1:]
    if len(ends) > ranks:
        raise MPIError(C.ERR_ARG, f"a graph of {len(ends)} ranks", rule=f"at most {ranks} ranks")
    if any(a > b for a, b in pairwise([0, *ends])) or (ends and ends[-1] > len(targets)):
        raise MPIError(C.ERR_ARG, f"index {ends} of {len(targets)} edges", rule="it grows up to the number of edges")
    _check_ranks(targets, len(ends), C.ERR_ARG)
    return SharedGraph(tuple(ends), tuple(targets))


def edge_weights(weights: Sequence[int] | SpecialBuffer | None, degree: int) -> tuple[int, ...] | None:
    """The weights of `degree` edges; None if they have none."""
    if weights is None or weights is UNWEIGHTED:
        return None
    if isinstance(weights, SpecialBuffer):
        if weights is WEIGHTS_EMPTY and degree:
            raise ValueError(f"WEIGHTS_EMPTY for {degree} edges: it stands for the weights of no edge")
        return ()
    return tuple(integers(weights, degree))


def local_graph(
    sources: Sequence[int] | None,
    destinations: Sequence[int] | None,
    source_weights: Sequence[int] | SpecialBuffer | None,
    destination_weights: Sequence[int] | SpecialBuffer | None,
    ranks: int,
) -> LocalGraph:
    """The edges of this rank, given by itself."""
    into, out = integers(sources or ()), integers(destinations or ())
    in_weights, out_weights = edge_weights(source_weights, len(into)), edge_weights(destination_weights, len(out))
    if (in_weights is None) != (out_weights is None):
        raise MPIError(C.ERR_TOPOLOGY, "weights of one direction only", rule="both directions have weights, or none")
    _check_ranks([*into, *out], ranks, C.ERR_RANK)
    weights = None if in_weights is None or out_weights is None else (in_weights, out_weights)
    return LocalGraph(tuple(into), tuple(out), weights)


def graph_edges(
    sources: Sequence[int],
    degrees: Sequence[int],
    destinations: Sequence[int],
    weights: Sequence[int] | SpecialBuffer | None,
    ranks: int,
) -> tuple[list[tuple[int, int, int]], bool]:
    """Edges as (source, destination, weight), and whether they are weighted."""
    tails = integers(sources)
    counts = integers(degrees, len(tails))
    if any(n < 0 for n in counts):
        raise MPIError(C.ERR_ARG, f"degrees {counts}", rule="each is at least 0")
    heads = integers(destinations, sum(counts))
    _check_ranks([*tails, *heads], ranks, C.ERR_RANK)
    numbers = edge_weights(weights, len(heads))
    repeated = [tail for tail, n in zip(tails, counts, strict=True) for _ in range(n)]
    return list(zip(repeated, heads, numbers or [1] * len(heads), strict=True)), numbers is not None


def _check_ranks(ranks: Sequence[int], size: int, error: int) -> None:
    bad = [r for r in ranks if not 0 <= r < size]
    if bad:
        raise MPIError(error, f"edges with rank {bad[0]}", rule=f"0 <= rank < {size}")
