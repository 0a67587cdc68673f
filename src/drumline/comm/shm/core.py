"""Collectives in shared memory by core.c: tensor addresses in, a return code out, errors as exceptions."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.errors import DrumlineError, GaveUp
from . import native
from .segment import SLOT, SMALL, SharedSegment

if TYPE_CHECKING:
    from .python_core import PythonCore

DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 9,
    torch.complex64: 10,
    torch.complex128: 11,
    torch.uint16: 12,
    torch.uint32: 13,
    torch.uint64: 14,
}
"""The type numbers of core.c."""
OPS = {"sum": 0, "product": 1, "min": 2, "max": 3, "band": 4, "bor": 5, "bxor": 6, "avg": 7}
"""The operator numbers of core.c."""
_SPIN, _YIELD = 20_000, 200_000
"""Nanoseconds until a wait yields, and until it sleeps. If ranks outnumber cores it yields at once: the rank it waits
for may need this core."""
OK, STOPPED, MISMATCH = 0, 1, 2
"""Return codes of core.c."""


class CallMismatch(Exception):
    """The ranks made different calls; nothing was moved. Raised on all ranks."""


@dataclass(slots=True)
class CallIds:
    """The hashes by which ranks compare a call."""

    signature: int = 0
    """Equal on all ranks, or the call is refused."""
    site: int = 0
    """A hash of the line in the user's program."""


class SharedCore:
    """The base of the native and the Python core: checks the other ranks during a wait."""

    SLICE = 100
    """Milliseconds between two checks."""

    def __init__(self, segment: SharedSegment, timeout: float) -> None:
        self.segment, self.rank, self.size, self.timeout = segment, segment.rank, segment.size, timeout
        self._since = 0.0
        self._reason: DrumlineError | None = None
        self.on_slow: Callable[[int, float], DrumlineError | None] | None = None
        """(rank waited for, seconds) -> an error that ends the wait, or None. Called during a wait."""

    def end(self, code: int) -> None:
        """Raise the error of a return code; called after every call."""
        self._since = 0.0
        if code == OK:
            return
        if code == MISMATCH:
            raise CallMismatch
        assert code == STOPPED and self._reason is not None
        raise self._reason

    def check_peer(self, rank: int, what: int) -> int:
        """Called during a wait: is the other rank alive, and is there time left? Nonzero ends the wait."""
        try:
            now = time.monotonic()
            self._since = self._since or now - self.SLICE / 1000
            self._reason = self._problem(rank, now - self._since)
        except Exception as e:  # nothing may escape into C
            self._reason = GaveUp(f"rank {self.rank} could not check rank {rank}: {e!r}")
        return int(self._reason is not None)

    def _problem(self, rank: int, seconds: float) -> DrumlineError | None:
        # Its error is more precise than that a rank is gone.
        if self.on_slow is not None and (problem := self.on_slow(rank, seconds)) is not None:
            return problem
        state = self.segment.state(rank)
        if state != "alive":
            reason = "has left the group" if state == "left" else "has died"
            return GaveUp(f"rank {self.rank} waits for rank {rank}, which {reason}")
        if seconds > self.timeout:
            return GaveUp(
                f"rank {self.rank} waited {self.timeout:g} s for rank {rank}",
                rule="all ranks call the same collectives in the same order, within the timeout of the group",
            )
        return None


class NativeCore(SharedCore):
    """The collectives of one group by core.c. Its owner makes one call at a time."""

    def __init__(self, segment: SharedSegment, timeout: float) -> None:
        super().__init__(segment, timeout)
        self._c = native.load()
        at = segment.layout
        crowded = segment.size > (os.cpu_count() or 1)
        self._slow = native.SLOW(self.check_peer)
        self._group = native.NativeGroup(
            base=segment.base,
            p=self.size,
            r=self.rank,
            small=SMALL,
            slot=SLOT,
            ring=at.ring,
            control_at=at.control_at,
            small_at=at.small_at,
            in_at=at.in_at,
            out_at=at.out_at,
            ring_at=at.ring_at,
            spin_ns=0 if crowded else _SPIN,
            yield_ns=_YIELD,
            slice_ms=self.SLICE,
            slow=self._slow,
        )
        self._g = ctypes.byref(self._group)
        self._many = ctypes.c_void_p * self.size
        self._counts = ctypes.c_uint64 * self.size

    def all_reduce(self, tensor: Tensor, op: str, root: int, call: CallIds) -> None:
        """Reduce in place, on all ranks (root -1) or on the root alone. All tensors here are contiguous."""
        self._run(
            self._c.dl_all_reduce,
            tensor.data_ptr(),
            tensor.numel(),
            tensor.element_size(),
            DTYPES[tensor.dtype],
            OPS[op],
            root,
            call.signature,
            call.site,
        )

    def reduce_scatter(self, blocks: Sequence[Tensor], out: Tensor, op: str, call: CallIds) -> None:
        """Write block `rank` of the reduction of all ranks' blocks to `out`."""
        self._run(
            self._c.dl_reduce_scatter,
            self._pointers(blocks),
            out.data_ptr(),
            out.numel(),
            out.element_size(),
            DTYPES[out.dtype],
            OPS[op],
            call.signature,
            call.site,
        )

    def spread(self, mine: Tensor | None, counts: Sequence[int], to: Sequence[Tensor | None], call: CallIds) -> None:
        """Publish `mine`, and copy `counts[s]` bytes of every rank s to `to[s]`, if there is one."""
        self._run(
            self._c.dl_spread,
            None if mine is None else mine.data_ptr(),
            self._counts(*counts),
            self._pointers(to),
            call.signature,
            call.site,
        )

    def exchange(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None], call: CallIds) -> None:
        """Send `out[s]` to rank s, receive `into[s]` from it; None is no message. The rank's own part is not copied."""
        self._run(
            self._c.dl_exchange,
            self._pointers(out),
            self._bytes(out),
            self._pointers(into),
            self._bytes(into),
            call.signature,
            call.site,
        )

    def barrier(self, call: CallIds) -> None:
        """Return when all ranks have called it."""
        self._run(self._c.dl_barrier, call.signature, call.site)

    @property
    def crossed(self) -> bool:
        """Whether the sites of the last call differ between ranks."""
        return bool(self._group.crossed)

    def calls(self) -> list[tuple[int, int]]:
        """(signature, site) of every rank's last call."""
        signature, site = ctypes.c_uint64(), ctypes.c_uint64()
        calls = []
        for s in range(self.size):
            self._c.dl_call(self._g, s, ctypes.byref(signature), ctypes.byref(site))
            calls.append((signature.value, site.value))
        return calls

    def write(self, dst: int, address: int, n: int) -> int:
        """Write up to n bytes into the ring to `dst` and wake it; returns the number written."""
        return int(self._c.dl_ring_write(self._g, dst, address, n, 1))

    def read(self, src: int, address: int, n: int) -> int:
        """Read up to n bytes from the ring of `src`; returns the number read."""
        return int(self._c.dl_ring_read(self._g, src, address, n))

    def readable(self, src: int) -> int:
        """Bytes in the ring of `src`."""
        return int(self._c.dl_ring_waiting(self._g, src))

    def first_readable(self, start: int) -> int:
        """The first rank from `start` on, cyclically, whose ring is not empty; -1 if all are."""
        return int(self._c.dl_ring_any(self._g, start))

    def bell(self, seen: int, milliseconds: int) -> int:
        """The number of wake-ups so far; waits up to `milliseconds` for it to differ from `seen`."""
        return int(self._c.dl_bell(self._g, seen, milliseconds))

    def _pointers(self, tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
        return self._many(*(None if t is None else t.data_ptr() for t in tensors))

    def _bytes(self, tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_uint64]:
        return self._counts(*(0 if t is None else t.numel() * t.element_size() for t in tensors))

    def _run(self, function: Callable[..., int], *arguments: object) -> None:
        code = function(self._g, *arguments)
        if code or self._since:
            self.end(code)


def make_core(segment: SharedSegment, timeout: float, *, compiled: bool) -> NativeCore | PythonCore:
    """The kind of core that rank 0 chose for the group."""
    if compiled:
        return NativeCore(segment, timeout)
    from .python_core import PythonCore

    return PythonCore(segment, timeout)
