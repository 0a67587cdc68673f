"""Collectives between neighbours of a topology: blocking, with an I as a request, and persistent.

Each rank sends one message along each edge that leaves it and receives one from each that arrives. Messages of an edge
carry its lane as their tag, so several edges between two ranks stay apart. An edge to PROC_NULL, beyond the end of
a grid, carries nothing: its part of the buffer keeps its contents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import constants as C
from . import pickling
from .buffers import MessageBuffer, parse_message, parse_vector, parse_vector_w
from .info import INFO_NULL, Info
from .intracomm import Intracomm
from .persistent_request import Prequest
from .prepared_collectives import PreparedRun
from .request import Request
from .state import CollectiveChannel
from .topology import Neighborhood

_ALLGATHER, _ALLTOALL, _OBJECTS = ((n + 1) << 20 for n in range(3))
"""Added to the lane: ranks that call different collectives do not receive each other's messages."""


class NeighborCollectives(Intracomm):
    """The collectives between neighbours."""

    __slots__ = ()

    @property
    def _neighborhood(self) -> Neighborhood:
        state = self._state
        assert state.topology is not None
        return state.topology.neighborhood(state.rank)

    # -- prepared -----------------------------------------------------------------------------------------------------

    def _to_neighbors(
        self, tag: int, sources: Sequence[MessageBuffer], targets: Sequence[MessageBuffer]
    ) -> PreparedRun:
        """Send the k-th source to the k-th destination, and receive the k-th target from the k-th source."""
        edges = self._neighborhood

        def run(channel: CollectiveChannel) -> None:
            sends = [
                (rank, tag + lane, region.data())
                for (rank, lane), region in zip(edges.destinations, sources, strict=True)
                if rank != C.PROC_NULL
            ]
            receives = [
                (rank, tag + lane, region)
                for (rank, lane), region in zip(edges.sources, targets, strict=True)
                if rank != C.PROC_NULL
            ]
            channel.exchange_edges(sends, receives)

        return run

    def _neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> PreparedRun:
        edges = self._neighborhood
        source = parse_message(sendbuf, writable=False)
        targets = _equal_blocks(recvbuf, len(edges.sources), writable=True)
        return self._to_neighbors(_ALLGATHER, [source] * len(edges.destinations), targets)

    def _neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> PreparedRun:
        edges = self._neighborhood
        source = parse_message(sendbuf, writable=False)
        targets = parse_vector(recvbuf, len(edges.sources), writable=True)
        return self._to_neighbors(_ALLGATHER, [source] * len(edges.destinations), targets)

    def _neighbor_alltoall(
        self, sendbuf: Any, recvbuf: Any, read: Callable[..., Sequence[MessageBuffer]]
    ) -> PreparedRun:
        edges = self._neighborhood
        sources = read(sendbuf, len(edges.destinations), writable=False)
        return self._to_neighbors(_ALLTOALL, sources, read(recvbuf, len(edges.sources), writable=True))

    # -- blocking -----------------------------------------------------------------------------------------------------

    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send a buffer to all neighbours."""
        self._run_now(self._neighbor_allgather(sendbuf, recvbuf))

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Neighbor_allgather with counts that differ by neighbour."""
        self._run_now(self._neighbor_allgatherv(sendbuf, recvbuf))

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send a block to each neighbour."""
        self._run_now(self._neighbor_alltoall(sendbuf, recvbuf, _equal_blocks))

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Neighbor_alltoall with counts that differ by neighbour."""
        self._run_now(self._neighbor_alltoall(sendbuf, recvbuf, parse_vector))

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """Neighbor_alltoallv with datatypes that differ by neighbour."""
        self._run_now(self._neighbor_alltoall(sendbuf, recvbuf, parse_vector_w))

    # -- nonblocking --------------------------------------------------------------------------------------------------

    def Ineighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start a Neighbor_allgather."""
        return self._run_later(self._neighbor_allgather(sendbuf, recvbuf))

    def Ineighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start a Neighbor_allgatherv."""
        return self._run_later(self._neighbor_allgatherv(sendbuf, recvbuf))

    def Ineighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start a Neighbor_alltoall."""
        return self._run_later(self._neighbor_alltoall(sendbuf, recvbuf, _equal_blocks))

    def Ineighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start a Neighbor_alltoallv."""
        return self._run_later(self._neighbor_alltoall(sendbuf, recvbuf, parse_vector))

    def Ineighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start a Neighbor_alltoallw."""
        return self._run_later(self._neighbor_alltoall(sendbuf, recvbuf, parse_vector_w))

    # -- persistent ---------------------------------------------------------------------------------------------------

    def Neighbor_allgather_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Neighbor_allgather."""
        return self._persistent(self._neighbor_allgather, sendbuf, recvbuf)

    def Neighbor_allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Neighbor_allgatherv."""
        return self._persistent(self._neighbor_allgatherv, sendbuf, recvbuf)

    def Neighbor_alltoall_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Neighbor_alltoall."""
        return self._persistent(self._neighbor_alltoall, sendbuf, recvbuf, _equal_blocks)

    def Neighbor_alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Neighbor_alltoallv."""
        return self._persistent(self._neighbor_alltoall, sendbuf, recvbuf, parse_vector)

    def Neighbor_alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Make a persistent Neighbor_alltoallw."""
        return self._persistent(self._neighbor_alltoall, sendbuf, recvbuf, parse_vector_w)

    # -- objects ------------------------------------------------------------------------------------------------------

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all neighbours; None from PROC_NULL."""
        data = pickling.default.dumps(sendobj)
        return self._objects([data] * len(self._neighborhood.destinations))

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Send an object to each neighbour; returns theirs, and None from PROC_NULL."""
        items, degree = list(sendobj), len(self._neighborhood.destinations)
        if len(items) != degree:
            raise ValueError(f"expecting {degree} items, got {len(items)}")
        return self._objects([pickling.default.dumps(obj) for obj in items])

    def _objects(self, data: Sequence[bytes]) -> list[Any]:
        edges, state = self._neighborhood, self._state
        sends = [
            (rank, _OBJECTS + lane, memoryview(body))
            for (rank, lane), body in zip(edges.destinations, data, strict=True)
            if rank != C.PROC_NULL
        ]
        sources = [(rank, _OBJECTS + lane) for rank, lane in edges.sources if rank != C.PROC_NULL]
        with state.lock("neighbor"):
            received = iter(state.blocking.exchange_edge_bytes(sends, sources))
        return [None if rank == C.PROC_NULL else pickling.default.loads(next(received)) for rank, _ in edges.sources]


def _equal_blocks(message: Any, blocks: int, *, writable: bool) -> list[MessageBuffer]:
    """One block of equal size for each neighbour."""
    region = parse_message(message, writable=writable, blocks=max(1, blocks))
    whole = MessageBuffer(region.memory, region.base, region.count * blocks, region.type, region.device)
    return [whole.part(i * region.count, region.count) for i in range(blocks)]
