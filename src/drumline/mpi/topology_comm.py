"""Communicators with a topology: a grid, a graph, or a distributed graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from . import constants as C
from .comm import Comm
from .neighbor_collectives import NeighborCollectives
from .topology import CartesianGrid, LocalGraph, SharedGraph, integers


class Topocomm(NeighborCollectives):
    """A communicator with a topology."""

    __slots__ = ()

    def __new__(cls, comm: Comm | None = None) -> Self:
        """Refer to a communicator with a topology of this class's kind."""
        self = super().__new__(cls, comm)
        kind = next(c for c in cls.__mro__ if c is Topocomm or c in Comm._classes.values())
        if self and not issubclass(Comm._class_of(self._state), kind):
            raise TypeError(f"{cls.__name__} of a communicator with another topology, or with none")
        return self

    @property
    def degrees(self) -> tuple[int, int]:
        """Number of sources and of destinations."""
        return len(self.inedges), len(self.outedges)

    indegree = property(lambda self: self.degrees[0], doc="Number of sources.")
    outdegree = property(lambda self: self.degrees[1], doc="Number of destinations.")

    @property
    def inoutedges(self) -> tuple[list[int], list[int]]:
        """The sources and the destinations of this rank."""
        edges = self._neighborhood
        return [rank for rank, _ in edges.sources], [rank for rank, _ in edges.destinations]

    inedges = property(lambda self: self.inoutedges[0], doc="The sources of this rank.")
    outedges = property(lambda self: self.inoutedges[1], doc="The destinations of this rank.")


class Cartcomm(Topocomm, topology=C.CART):
    """A communicator whose ranks form a grid."""

    __slots__ = ()

    @property
    def _grid(self) -> CartesianGrid:
        grid = self._state.topology
        assert isinstance(grid, CartesianGrid)
        return grid

    def Get_dim(self) -> int:
        """Number of dims."""
        return len(self._grid.dims)

    dim = property(Get_dim, doc="Number of dims.")
    ndim = property(Get_dim, doc="Number of dims.")

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """Dims, periods, and the coordinates of this rank."""
        grid = self._grid
        return list(grid.dims), [int(p) for p in grid.periods], grid.coords(self._state.rank)

    topo = property(Get_topo, doc="Dims, periods, and the coordinates of this rank.")
    dims = property(lambda self: self.Get_topo()[0], doc="Ranks in each dim.")
    periods = property(lambda self: self.Get_topo()[1], doc="Whether each dim is a ring.")
    coords = property(lambda self: self.Get_topo()[2], doc="The coordinates of this rank.")

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """The rank at some coordinates."""
        return self._grid.rank(coords)

    def Get_coords(self, rank: int) -> list[int]:
        """The coordinates of a rank."""
        return self._grid.coords(rank)

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Source and destination of a shift along one dim, for Sendrecv."""
        return self._grid.shift(self._state.rank, direction, disp)

    def Sub(self, remain_dims: Sequence[bool]) -> Cartcomm:
        """The grid of the dims that remain, of the ranks with the same coordinates in the others."""
        grid, state = self._grid, self._state
        keep = integers([bool(k) for k in remain_dims], len(grid.dims))  # also numpy's
        mine = grid.coords(state.rank)
        members = [
            state.members[rank]
            for rank in range(grid.size)
            if all(k or a == b for k, a, b in zip(keep, grid.coords(rank), mine, strict=True))
        ]
        made = state.child("", members, "sub")
        made.topology = grid.without(keep)
        return type(self)._of(made)


class Graphcomm(Topocomm, topology=C.GRAPH):
    """A communicator whose ranks form a graph that all of them know."""

    __slots__ = ()

    @property
    def _graph(self) -> SharedGraph:
        graph = self._state.topology
        assert isinstance(graph, SharedGraph)
        return graph

    def Get_dims(self) -> tuple[int, int]:
        """Number of ranks and of edges."""
        return len(self._graph.index), len(self._graph.edges)

    dims = property(Get_dims, doc="Number of ranks and of edges.")
    nnodes = property(lambda self: self.Get_dims()[0], doc="Number of ranks.")
    nedges = property(lambda self: self.Get_dims()[1], doc="Number of edges.")

    def Get_topo(self) -> tuple[list[int], list[int]]:
        """Index and edges."""
        return list(self._graph.index), list(self._graph.edges)

    topo = property(Get_topo, doc="Index and edges.")
    index = property(lambda self: self.Get_topo()[0], doc="The end of each rank's edges.")
    edges = property(lambda self: self.Get_topo()[1], doc="The neighbours of all ranks.")

    def Get_neighbors_count(self, rank: int) -> int:
        """Number of neighbours of a rank."""
        return len(self._graph.neighbors(rank))

    def Get_neighbors(self, rank: int) -> list[int]:
        """The neighbours of a rank."""
        return self._graph.neighbors(rank)

    neighbors = property(lambda self: self.Get_neighbors(self.Get_rank()), doc="The neighbours of this rank.")
    nneighbors = property(lambda self: len(self.neighbors), doc="Number of neighbours of this rank.")


class Distgraphcomm(Topocomm, topology=C.DIST_GRAPH):
    """A communicator whose ranks form a graph of which each knows its own edges."""

    __slots__ = ()

    @property
    def _graph(self) -> LocalGraph:
        graph = self._state.topology
        assert isinstance(graph, LocalGraph)
        return graph

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        """Number of sources, number of destinations, and whether the edges have weights."""
        graph = self._graph
        return len(graph.sources), len(graph.destinations), graph.weights is not None

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], tuple[Any, Any] | None]:
        """Sources, destinations, and the weights of both, or None."""
        graph = self._graph
        weights = None if graph.weights is None else (list(graph.weights[0]), list(graph.weights[1]))
        return list(graph.sources), list(graph.destinations), weights
