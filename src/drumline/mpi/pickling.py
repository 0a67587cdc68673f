"""Pickling of Python objects: the only file of this package that unpickles messages.

Trust boundary: the lower-case methods of `drumline.MPI` unpickle messages of other ranks of the same job, as mpi4py
does, and unpickling can run code. Ranks of one job trust each other; nothing else is ever unpickled here. A rank reads
from its own endpoint only, which connects the processes of one launcher.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any


class Pickle:
    """The serializer of objects; `MPI.pickle` is the one in use, and programs may replace its functions."""

    def __init__(
        self, dumps: Any = None, loads: Any = None, protocol: int | None = None, threshold: int = 1 << 18
    ) -> None:
        self._dumps = dumps or pickle.dumps
        self._loads = loads or pickle.loads
        self.PROTOCOL: int | None = pickle.HIGHEST_PROTOCOL if protocol is None and dumps is None else protocol
        self.THRESHOLD = threshold

    def dumps(self, obj: Any) -> bytes:
        """Serialize an object."""
        data: bytes = self._dumps(obj) if self.PROTOCOL is None else self._dumps(obj, self.PROTOCOL)
        return data

    def loads(self, data: Any) -> Any:
        """Deserialize an object; None from no bytes."""
        return self._loads(data) if len(data) else None

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[memoryview]]:
        """Serialize an object, with its large buffers out of band."""
        buffers: list[memoryview] = []

        def out_of_band(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < self.THRESHOLD:
                return True
            buffers.append(view)
            return False

        return self._dumps(obj, 5, buffer_callback=out_of_band), buffers

    def loads_oob(self, data: Any, buffers: Iterable[Any]) -> Any:
        """Deserialize an object with out-of-band buffers."""
        return self._loads(data, buffers=buffers)


default = Pickle()
