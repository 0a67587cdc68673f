"""Persistent requests, including those of partitioned messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from . import constants as C
from .exception import MPIError
from .request import Request


class Prequest(Request):
    """A persistent request: made once and started repeatedly."""

    __slots__ = ()

    def Start(self) -> None:
        """Start it."""
        if self._h is None or self._h.start is None or self._h.started:
            raise MPIError(C.ERR_REQUEST, "Start of a null or active request", rule="wait for it first")
        self._h.restart()

    @classmethod
    def Startall(cls, requests: Sequence[Prequest]) -> None:
        """Start several."""
        for request in requests:
            request.Start()

    # -- partitioned messages -----------------------------------------------------------------------------------------

    def _partitions(self, name: str) -> Any:
        partitions = None if self._h is None else self._h.partitions
        if not hasattr(partitions, name):
            kind = "Psend_init" if name == "ready" else "Precv_init"
            raise MPIError(C.ERR_REQUEST, f"P{name} of another request", rule=f"a request of {kind}")
        return partitions

    def Pready(self, partition: int) -> None:
        """Mark a partition of a send as ready: it is sent now."""
        self.Pready_list([partition])

    def Pready_range(self, partition_low: int, partition_high: int) -> None:
        """Mark the partitions from the lowest to the highest, inclusive, as ready."""
        self.Pready_list(range(partition_low, partition_high + 1))

    def Pready_list(self, partitions: Iterable[int]) -> None:
        """Mark partitions as ready."""
        mine = self._partitions("ready")
        if not self._active:
            raise MPIError(C.ERR_REQUEST, "Pready of an inactive request", rule="Start it first")
        for partition in partitions:
            mine.ready(partition)

    def Parrived(self, partition: int) -> bool:
        """Whether a partition of a receive has arrived; True if the request is not active."""
        mine = self._partitions("arrived")
        assert self._h is not None
        mine.check(partition)
        if not self._active:
            return True
        self._h.make_progress()
        arrived: bool = mine.arrived(partition)
        return arrived


class Grequest(Request):
    """Generalised requests are not supported: only the null one exists."""

    __slots__ = ()
