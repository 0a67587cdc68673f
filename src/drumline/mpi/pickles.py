"""Python objects as bytes: the one file of this package that pickles what ranks send each other.

Trust boundary: the lower-case methods of `drumline.MPI` unpickle what other ranks of the same job sent, as mpi4py does,
and unpickling can run code. Ranks of one job trust each other; nothing else is ever unpickled here. A rank takes bytes
from its own post office only, which joins the processes that one launcher started.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any


class Pickle:
    """How objects become bytes; `MPI.pickle` is the one in use, and programs may give it other functions."""

    def __init__(
        self, dumps: Any = None, loads: Any = None, protocol: int | None = None, threshold: int = 1 << 18
    ) -> None:
        self._dumps = dumps or pickle.dumps
        self._loads = loads or pickle.loads
        self.PROTOCOL: int | None = pickle.HIGHEST_PROTOCOL if protocol is None and dumps is None else protocol
        self.THRESHOLD = threshold

    def dumps(self, obj: Any) -> bytes:
        """An object as bytes."""
        data: bytes = self._dumps(obj) if self.PROTOCOL is None else self._dumps(obj, self.PROTOCOL)
        return data

    def loads(self, data: Any) -> Any:
        """The object of some bytes; of none, None."""
        return self._loads(data) if len(data) else None

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[memoryview]]:
        """An object as bytes, with its large buffers beside them."""
        buffers: list[memoryview] = []

        def aside(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < self.THRESHOLD:
                return True
            buffers.append(view)
            return False

        return self._dumps(obj, 5, buffer_callback=aside), buffers

    def loads_oob(self, data: Any, buffers: Iterable[Any]) -> Any:
        """The object of bytes and buffers beside them."""
        return self._loads(data, buffers=buffers)


default = Pickle()
