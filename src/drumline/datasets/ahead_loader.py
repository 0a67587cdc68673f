"""Batches loaded ahead in an order that is known only a few steps before: each step is announced, then asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ..torchkit.data_workers import end_workers
from .loader import Parcel, next_parcel, start_workers
from .stream import RankBatch, Stream

_AHEAD = 1
"""Batches that each worker process prepares ahead, unless the data says otherwise."""


class AheadLoader:
    """`batch(step)`, as of the stream, loaded by worker processes if the step was announced.

    A step that was announced and is passed over was given to another; its batch is dropped.
    """

    def __init__(self, stream: Stream, *, pin: bool = False) -> None:
        self._stream, self._pin = stream, pin
        self.depth = stream.workers * (stream.source.prefetch or _AHEAD)
        """Steps to announce ahead."""
        self._announced: deque[int] = deque()
        """Not yet sent to a worker process."""
        self._loading: deque[int | None] = deque()
        """Sent to the worker processes, in their order; None in place of a step where none was announced."""
        self._parcels: Iterator[Parcel] | None = None

    def batch(self, step: int, coming: Sequence[int] = ()) -> RankBatch:
        """The batch of a step; `coming` are the steps that will be asked for next, in their order."""
        known = {*self._announced, *self._loading}
        wanted = {step, *coming}
        self._announced = deque(s for s in self._announced if s in wanted)
        self._announced += [s for s in coming if s not in known]
        if self._parcels is None and self._announced:
            workers = self._stream.workers
            self._parcels = start_workers(
                self._stream, self._order(), workers=workers, prefetch=self.depth // workers, pin=self._pin
            )
        if self._parcels is None or step not in known:
            return self._stream.batch(step)
        while True:
            parcel, of = next_parcel(self._parcels, step, self._stream.workers), self._loading.popleft()
            if of == step:
                return parcel.result()

    def _order(self) -> Iterator[int | None]:
        """The worker processes take steps from here, one for each batch that is read from them."""
        while True:
            self._loading.append(self._announced.popleft() if self._announced else None)
            yield self._loading[-1]

    def close(self) -> None:
        """End the worker processes."""
        parcels, self._parcels = self._parcels, None
        self._announced.clear()
        self._loading.clear()
        if parcels is not None:
            end_workers(parcels)
