"""Collectives of Python objects: pickled, and combined by Python functions in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import torch

from . import pickles
from .collective import Collectives
from .op import SUM

_GATHER, _SCATTER, _ALLGATHER, _ALLTOALL, _SCAN, _EXSCAN = range(16, 22)
"""Tags: ranks that call different collectives do not take each other's objects."""
Function = Callable[[Any, Any], Any]


def _dumps(obj: Any) -> bytes:
    return pickles.default.dumps(obj)


class ObjectCollectives(Collectives):
    """The lower-case collectives of a communicator."""

    __slots__ = ()

    def barrier(self) -> None:
        """Return when all ranks have come."""
        self.Barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The root's object, on all ranks."""
        mine, channel = self._root(root), self._state.now
        with self._state.lock("bcast"):
            data = _dumps(obj) if mine else b""
            size = channel.comm.broadcast(torch.tensor([len(data)]), root=root)
            memory = bytearray(data) if mine else bytearray(int(size))
            channel.comm.broadcast(torch.frombuffer(memory, dtype=torch.uint8), root=root)
        return pickles.default.loads(memory)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Every rank's object at the root, by rank; None elsewhere."""
        mine, state = self._root(root), self._state
        with state.lock("gather"):
            found = state.now.trade(_GATHER, {root: _dumps(sendobj)}, range(state.size) if mine else ())
        return [pickles.default.loads(found[r]) for r in range(state.size)] if mine else None

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """One of the root's objects for each rank."""
        mine, state = self._root(root), self._state
        sends = dict(enumerate(map(_dumps, self._each(sendobj)))) if mine else {}
        with state.lock("scatter"):
            return pickles.default.loads(state.now.trade(_SCATTER, sends, [root])[root])

    def allgather(self, sendobj: Any) -> list[Any]:
        """Every rank's object on every rank, by rank."""
        state = self._state
        with state.lock("allgather"):
            data = dict.fromkeys(range(state.size), _dumps(sendobj))
            found = state.now.trade(_ALLGATHER, data, range(state.size))
        return [pickles.default.loads(found[r]) for r in range(state.size)]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """An object from every rank for every rank."""
        state = self._state
        with state.lock("alltoall"):
            data = dict(enumerate(map(_dumps, self._each(sendobj))))
            found = state.now.trade(_ALLTOALL, data, range(state.size))
        return [pickles.default.loads(found[r]) for r in range(state.size)]

    def reduce(self, sendobj: Any, op: Function = SUM, root: int = 0) -> Any:
        """All ranks' objects combined, at the root; None elsewhere."""
        found = self.gather(sendobj, root)
        return None if found is None else fold(op, found)

    def allreduce(self, sendobj: Any, op: Function = SUM) -> Any:
        """All ranks' objects combined, on all ranks."""
        return self.bcast(self.reduce(sendobj, op, 0), 0)

    def scan(self, sendobj: Any, op: Function = SUM) -> Any:
        """The objects of ranks 0 to this one combined."""
        before = self._chain(sendobj, op, _SCAN)
        return sendobj if before is None else op(before[0], sendobj)

    def exscan(self, sendobj: Any, op: Function = SUM) -> Any:
        """The objects of the ranks before this one combined; None on rank 0."""
        before = self._chain(sendobj, op, _EXSCAN)
        return None if before is None else before[0]

    def _chain(self, sendobj: Any, op: Function, tag: int) -> tuple[Any] | None:
        """What the ranks before this one make, handed from rank to rank."""
        state = self._state
        channel, rank = state.now, state.rank
        with state.lock("scan"):
            before = None
            if rank > 0:
                before = (pickles.default.loads(channel.trade(tag, {}, [rank - 1])[rank - 1]),)
            if rank + 1 < state.size:
                # op may change its operands: the next rank gets what the objects are now
                mine = sendobj if before is None else op(pickles.default.loads(_dumps(before[0])), sendobj)
                channel.trade(tag, {rank + 1: _dumps(mine)}, ())
        return before

    def _each(self, objects: Sequence[Any] | None) -> list[Any]:
        size = self._state.size
        found = [] if objects is None else list(objects)
        if len(found) != size:
            raise ValueError(f"{len(found)} objects for {size} ranks")
        return found
