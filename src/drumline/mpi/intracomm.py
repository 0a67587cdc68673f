"""Intra-communicators, COMM_WORLD and COMM_SELF; construction of topologies; and ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from ..comm.messaging.endpoint import Endpoint
from ..comm.messaging.matching import MessageMatcher
from ..comm.messaging.thread_endpoint import run_endpoints
from . import constants as C
from . import world
from .comm import Comm
from .group import GROUP_EMPTY, Group
from .info import INFO_NULL, Info
from .memory import SpecialBuffer
from .state import CommState, context_number
from .topology import LocalGraph, cartesian_grid, graph_edges, local_graph, shared_graph

T = TypeVar("T")

Weights = Sequence[int] | SpecialBuffer | None
_from_group: dict[object, int] = {}


class Intracomm(Comm, topology=C.UNDEFINED):
    """A communicator of one group."""

    __slots__ = ()

    @classmethod
    def _world_of(cls, matcher: MessageMatcher) -> Self:
        state = CommState(context_number("world"), "MPI_COMM_WORLD")
        state.join(matcher, range(matcher.size))
        return cls._of(state)

    # -- of a group ---------------------------------------------------------------------------------------------------

    def Create_group(self, group: Group, tag: int = 0) -> Intracomm:
        """A communicator of some of the ranks; only those ranks call it."""
        members = group._state.ranks
        if self._state.matcher.rank not in members:
            return Intracomm()
        made: Intracomm = self._child(members, "group", members, tag)
        return made

    @classmethod
    def Create_from_group(
        cls, group: Group, stringtag: str = "drumline", info: Info = INFO_NULL, errhandler: Any = None
    ) -> Intracomm:
        """A communicator of a group without a parent; its ranks identify it by a string."""
        if group == GROUP_EMPTY:
            return Intracomm()
        kind = ("from group", group._state.ranks, stringtag)
        nth = _from_group[kind] = _from_group.get(kind, 0) + 1
        state = CommState(context_number(*kind, nth), "")
        state.join(world.matcher(), group._state.ranks)
        return cls._of(state)

    # -- with a topology ----------------------------------------------------------------------------------------------

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | bool | None = None, reorder: bool = False
    ) -> Any:
        """A communicator whose first ranks form a grid; null on the others. Ranks are never reordered."""
        grid = cartesian_grid(dims, periods, self._state.size)
        return self._child(self._state.members[: grid.size], "cart", topology=grid)

    def Create_graph(self, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
        """A communicator whose first ranks form a graph that all know; null on the others."""
        graph = shared_graph(index, edges, self._state.size)
        return self._child(self._state.members[: len(graph.index)], "graph", topology=graph)

    def Create_dist_graph_adjacent(
        self,
        sources: Sequence[int] | None,
        destinations: Sequence[int] | None,
        sourceweights: Weights = None,
        destweights: Weights = None,
        info: Info = INFO_NULL,
        reorder: bool = False,
    ) -> Any:
        """A communicator with a graph; each rank gives its own edges, and nothing is sent."""
        graph = local_graph(sources, destinations, sourceweights, destweights, self._state.size)
        return self._child(self._state.members, "dist graph", topology=graph)

    def Create_dist_graph(
        self,
        sources: Sequence[int],
        degrees: Sequence[int],
        destinations: Sequence[int],
        weights: Weights = None,
        info: Info = INFO_NULL,
        reorder: bool = False,
    ) -> Any:
        """A communicator with a graph; each rank may give any edges. They are sent to the two ranks of each edge."""
        edges, weighted = graph_edges(sources, degrees, destinations, weights, self._state.size)
        parts: list[Any] = [([], []) for _ in range(self._state.size)]
        for edge in edges:
            parts[edge[0]][0].append(edge)
            parts[edge[1]][1].append(edge)
        parts = self.alltoall(parts)
        # Both ends of an edge order it by the rank that gave it, then as given, so parallel edges match.
        out = [(head, weight) for part, _ in parts for _, head, weight in part]
        into = [(tail, weight) for _, part in parts for tail, _, weight in part]
        both = (tuple(w for _, w in into), tuple(w for _, w in out)) if weighted else None
        graph = LocalGraph(tuple(tail for tail, _ in into), tuple(head for head, _ in out), both)
        return self._child(self._state.members, "dist graph", topology=graph)

    def Cart_map(self, dims: Sequence[int], periods: Sequence[bool] | bool | None = None) -> int:
        """This rank's number in a grid; UNDEFINED if it is outside."""
        grid = cartesian_grid(dims, periods, self._state.size)
        return self._state.rank if self._state.rank < grid.size else C.UNDEFINED

    def Graph_map(self, index: Sequence[int], edges: Sequence[int]) -> int:
        """This rank's number in a graph; UNDEFINED if it is outside."""
        graph = shared_graph(index, edges, self._state.size)
        return self._state.rank if self._state.rank < len(graph.index) else C.UNDEFINED


def _all_ranks() -> tuple[MessageMatcher, Sequence[int]]:
    m = world.matcher()
    return m, range(m.size)


def _this_rank() -> tuple[MessageMatcher, Sequence[int]]:
    m = world.matcher()
    return m, [m.rank]


COMM_WORLD = Intracomm._constant("COMM_WORLD", CommState(context_number("world"), "MPI_COMM_WORLD", _all_ranks))
COMM_SELF = Intracomm._constant("COMM_SELF", CommState(context_number("self"), "MPI_COMM_SELF", _this_rank))


def _comm_lock_table(comm: Comm) -> dict[Any, threading.Lock]:
    """The locks of a communicator's object collectives, by name."""
    return comm._state.locks


def run_threads(function: Callable[[Intracomm], T], p: int) -> list[T]:
    """Run `function(comm)` on p ranks that are threads of this process; returns their results by rank."""

    def rank(endpoint: Endpoint) -> T:
        with world.thread_rank(endpoint) as matcher:
            return function(Intracomm._world_of(matcher))

    return run_endpoints(rank, p)
