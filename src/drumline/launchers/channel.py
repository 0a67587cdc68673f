"""Texts between the ranks of a job through their store: tasks from the first rank, events and results to it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..comm.signed_store import SignedStore

if TYPE_CHECKING:
    import torch.distributed as dist

_PIECE = 1 << 20
"""Bytes of one entry of the store: torch's stores refuse large ones."""
_PAUSE = 0.02


class StoreChannel:
    """Named texts in a store. A text is written once; reading does not remove it."""

    def __init__(self, store: dist.Store) -> None:
        self._store = SignedStore(store)
        self._read: dict[str, int] = {}

    def put(self, name: str, text: str) -> None:
        """Write a text."""
        data = zlib.compress(text.encode(), 1)
        pieces = [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
        for i, piece in enumerate(pieces):
            self._store.set(f"{name}/{i}", piece.hex())  # a store keeps text: a byte of zero ends it
        self._store.set(name, str(len(pieces)))

    def has(self, name: str) -> bool:
        """Whether a text is there."""
        return self._store.check([name])

    def get(self, name: str) -> str:
        """A text that is there."""
        pieces = [self._store.get(f"{name}/{i}").decode() for i in range(int(self._store.get(name)))]
        return zlib.decompress(bytes.fromhex("".join(pieces))).decode()

    def wait(self, *names: str, seconds: float | None = None, meanwhile: Callable[[], None] | None = None) -> str:
        """The first of the names that is there; empty after that many seconds. Signals are handled while it waits."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            for name in names:
                if self.has(name):
                    return name
            if meanwhile is not None:
                meanwhile()
            if end is not None and time.monotonic() > end:
                return ""
            time.sleep(_PAUSE)

    def append(self, name: str, text: str) -> None:
        """Add a text to a list that several ranks write to."""
        self.put(f"{name}/at/{self._store.add(name, 1)}", text)

    def unread(self, name: str) -> Iterator[str]:
        """The texts of a list that this process has not read yet."""
        count = self._store.add(name, 0)
        while (number := self._read.get(name, 0) + 1) <= count:
            if not self.has(f"{name}/at/{number}"):
                return  # counted, not written yet
            self._read[name] = number
            yield self.get(f"{name}/at/{number}")

    def count(self, name: str, more: int = 1) -> int:
        """Add to a counter; its new value."""
        return self._store.add(name, more)
