"""The work of core.c in Python, for machines without a C compiler: the same memory, counters and steps, slower.

Counters are single aligned words that one rank writes. The processor must not reorder a write of data and the write of
the counter behind it: x86 does not; elsewhere each counter is written with the interpreter's lock taken anew between,
which orders them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from .core import MISMATCH, OK, STOPPED, Call, CoreBase
from .segment import CONTROL, RING, SLOT, SLOTS, SMALL, Segment

_ENTER, _IN, _OUT, _DONE, _BELL = (16 * i for i in range(5))
"""Where the counters of a rank are, in words of four bytes from its control block."""
_CALL = 40
"""Where its two calls are, in words of eight bytes: signature, site, steps."""
_FOLDS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class PythonCore(CoreBase):
    """The collectives of one group, in Python."""

    def __init__(self, segment: Segment, timeout: float) -> None:
        super().__init__(segment, timeout)
        at, p = segment.layout, segment.size
        memory = numpy.frombuffer(segment.memory, numpy.uint8)
        self._bytes = torch.from_numpy(memory)
        self._words = memory[at.control_at : at.control_at + p * CONTROL].view(numpy.uint32).reshape(p, -1)
        self._calls = memory[at.control_at : at.control_at + p * CONTROL].view(numpy.uint64).reshape(p, -1)
        rings = memory[at.ring_at : at.total].reshape(p, p, RING + at.ring)
        self._ends = rings[:, :, :RING].view(numpy.uint64)
        self._rings = rings[:, :, RING:]
        self._tick = self._step = 0
        self._differ = False

    # -- counters ----------------------------------------------------------------------------------------------------

    def _await(self, counter: int, target: int, ranks: Sequence[int] | None = None) -> int:
        """Look, then look less and less often, at most a thousand times a second."""
        for s in range(self.size) if ranks is None else ranks:
            if s == self.rank:
                continue
            looks, asked = 0, time.monotonic()
            while (int(self._words[s, counter]) - target) & 0x80000000:
                looks += 1
                time.sleep(0 if looks < 200 else 0.0001 if looks < 1000 else 0.001)
                if looks % 64 == 0 and time.monotonic() - asked > self.SLICE / 1000:
                    asked = time.monotonic()
                    if self.look(s, 0):
                        return STOPPED
        return OK

    def _raise(self, counter: int, value: int) -> None:
        time.sleep(0)  # gives the interpreter's lock away and takes it again: a barrier for memory
        self._words[self.rank, counter] = value & 0xFFFFFFFF

    def _enter(self, call: Call, steps: int) -> tuple[int, int]:
        """Say what this rank calls and learn what the others do: (code, steps of the one that needs most)."""
        self._tick += 1
        at = _CALL + 3 * (self._tick & 1)
        self._calls[self.rank, at : at + 3] = (call.signature, call.site, steps)
        self._raise(_ENTER, self._tick)
        if self._await(_ENTER, self._tick):
            return STOPPED, 0
        told = self._calls[:, at : at + 3]
        self._differ = bool((told[:, 1] != told[0, 1]).any())
        code = MISMATCH if (told[:, 0] != told[0, 0]).any() else OK
        return code, int(told[:, 2].max())

    # -- memory ------------------------------------------------------------------------------------------------------

    def _mailbox(self, s: int) -> Tensor:
        at = self.segment.layout.small_at + (2 * s + (self._tick & 1)) * SMALL
        return self._bytes[at : at + SMALL]

    def _slot(self, s: int, step: int, *, out: bool = False) -> Tensor:
        at = self.segment.layout.out_at if out else self.segment.layout.in_at
        at += (s * SLOTS + step % SLOTS) * SLOT
        return self._bytes[at : at + SLOT]

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str, root: int, call: Call) -> None:
        """As in core.c: each rank adds up its share of each block."""
        self.end(self._all_reduce(tensor.view(-1), op, call, root))

    def _all_reduce(self, x: Tensor, op: str, call: Call, root: int) -> int:
        p, r, item = self.size, self.rank, x.element_size()
        each = SLOT // item // p
        block = each * p
        code, steps = self._enter(call, -(-x.numel() // block))
        base = self._step
        for n in range(steps if code == OK else 0):
            part = [x[n * block + s * each : n * block + (s + 1) * each] for s in range(p)]
            if code := self._await(_DONE, base + n + 1 - SLOTS):
                break
            for s in range(p):
                self._lay(self._slot(r, base + n)[s * each * item :], part[s])
            self._raise(_IN, base + n + 1)
            if code := self._await(_IN, base + n + 1):
                break
            mine = part[r].numel() * item
            total = _fold([self._slot(s, base + n)[r * each * item :][:mine].view(x.dtype) for s in range(p)], op)
            self._lay(self._slot(r, base + n, out=True), total)
            self._raise(_OUT, base + n + 1)
            if root in (-1, r):
                if code := self._await(_OUT, base + n + 1):
                    break
                for s in range(p):
                    part[s].copy_(self._slot(s, base + n, out=True)[: part[s].numel() * item].view(x.dtype))
            self._raise(_DONE, base + n + 1)
        self._step = base + steps
        return code

    def reduce_scatter(self, blocks: Sequence[Tensor], out: Tensor, op: str, call: Call) -> None:
        """Everybody lays out its blocks; each rank adds up its own."""
        into = [torch.empty_like(out) for _ in range(self.size)]
        into[self.rank] = blocks[self.rank]
        self.exchange(
            [None if s == self.rank else b for s, b in enumerate(blocks)],
            [None if s == self.rank else b for s, b in enumerate(into)],
            call,
        )
        out.copy_(_fold([block.view(-1) for block in into], op).view(out.shape))

    def spread(self, mine: Tensor | None, counts: Sequence[int], to: Sequence[Tensor | None], call: Call) -> None:
        """Everybody may read what anybody lays out."""
        self.end(self._spread(None if mine is None else _raw(mine), counts, to, call))

    def _spread(self, mine: Tensor | None, counts: Sequence[int], to: Sequence[Tensor | None], call: Call) -> int:
        code, steps = self._enter(call, -(-max(counts) // SLOT))
        base = self._step
        for n in range(steps if code == OK else 0):
            if mine is not None and n * SLOT < counts[self.rank]:
                if code := self._await(_DONE, base + n + 1 - SLOTS):
                    break
                self._lay(self._slot(self.rank, base + n), mine[n * SLOT : (n + 1) * SLOT])
                self._raise(_IN, base + n + 1)
            for s, place in enumerate(to):
                if s != self.rank and place is not None and n * SLOT < counts[s]:
                    if code := self._await(_IN, base + n + 1, [s]):
                        break
                    into = _raw(place)[n * SLOT : (n + 1) * SLOT]
                    into.copy_(self._slot(s, base + n)[: into.numel()])
            if code:
                break
            self._raise(_DONE, base + n + 1)
        self._step = base + steps
        return code

    def exchange(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None], call: Call) -> None:
        """Everybody has something for everybody."""
        self.end(self._exchange([_raw(t) for t in out], [_raw(t) for t in into], call))

    def _exchange(self, out: Sequence[Tensor], into: Sequence[Tensor], call: Call) -> int:
        p, r, room = self.size, self.rank, SLOT // self.size // 64 * 64
        sizes = torch.tensor([*(t.numel() for t in out), *(t.numel() for t in into)])
        self._tick += 1  # the mailbox of the call that begins
        self._lay(self._mailbox(r), sizes)
        self._tick -= 1
        longest = max((t.numel() for t in (*out, *into)), default=0)
        code, steps = self._enter(call, -(-longest // room))
        if code == OK:
            table = torch.stack([self._mailbox(s)[: 16 * p].view(torch.int64) for s in range(p)])
            code = OK if torch.equal(table[:, :p], table[:, p:].T) else MISMATCH
        base = self._step
        for n in range(steps if code == OK else 0):
            if code := self._await(_DONE, base + n + 1 - SLOTS):
                break
            for s in range(p):
                self._lay(self._slot(r, base + n)[s * room :], out[s][n * room : (n + 1) * room])
            self._raise(_IN, base + n + 1)
            if code := self._await(_IN, base + n + 1):
                break
            for s in range(p):
                part = into[s][n * room : (n + 1) * room]
                part.copy_(self._slot(s, base + n)[r * room :][: part.numel()])
            self._raise(_DONE, base + n + 1)
        self._step = base + (0 if code == MISMATCH else steps)
        return code

    def barrier(self, call: Call) -> None:
        """Return when all ranks have come."""
        self.end(self._enter(call, 0)[0])

    @property
    def crossed(self) -> bool:
        """Whether the sites of the last call differ between ranks."""
        return self._differ

    def calls(self) -> list[tuple[int, int]]:
        """(signature, site) of the last call of every rank."""
        at = _CALL + 3 * (self._tick & 1)
        return [(int(row[at]), int(row[at + 1])) for row in self._calls]

    @staticmethod
    def _lay(place: Tensor, data: Tensor) -> None:
        raw = _raw(data)
        place[: raw.numel()].copy_(raw)

    # -- rings -------------------------------------------------------------------------------------------------------

    def write(self, dst: int, address: int, n: int) -> int:
        """Put up to n bytes into the ring to `dst`; how many there was room for."""
        ends, ring = self._ends[self.rank, dst], self._rings[self.rank, dst]
        head = int(ends[0])
        n = min(n, ring.size - (head - int(ends[8])))
        if n:
            self._copy(ring, head, n, numpy.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(address)), out=True)
            time.sleep(0)
            ends[0] = head + n
        return n

    def read(self, src: int, address: int, n: int) -> int:
        """Take up to n bytes that wait from `src`."""
        ends, ring = self._ends[src, self.rank], self._rings[src, self.rank]
        tail = int(ends[8])
        n = min(n, int(ends[0]) - tail)
        if n:
            self._copy(ring, tail, n, numpy.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(address)), out=False)
            time.sleep(0)
            ends[8] = tail + n
        return n

    @staticmethod
    def _copy(ring: Any, at: int, n: int, memory: Any, *, out: bool) -> None:
        start = at % ring.size
        first = min(n, ring.size - start)
        if out:
            ring[start : start + first], ring[: n - first] = memory[:first], memory[first:]
        else:
            memory[:first], memory[first:] = ring[start : start + first], ring[: n - first]

    def waiting(self, src: int) -> int:
        """How many bytes of `src` wait."""
        ends = self._ends[src, self.rank]
        return int(ends[0]) - int(ends[8])

    def any_waiting(self, start: int) -> int:
        """The first rank from `start` on, round the ring, of whom something waits; -1 if none."""
        for k in range(self.size):
            s = (start + k) % self.size
            if s != self.rank and self.waiting(s):
                return s
        return -1

    def bell(self, seen: int, milliseconds: int) -> int:
        """Nobody rings here: look at the rings, less and less often, until there is something to do."""
        end, looks = time.monotonic() + milliseconds / 1000, 0
        while milliseconds and self.any_waiting(0) < 0 and time.monotonic() < end:
            looks += 1
            time.sleep(0 if looks < 100 else 0.0005)
        return 0


def _raw(tensor: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.uint8) if tensor is None else tensor.reshape(-1).view(torch.uint8)


def _fold(parts: Sequence[Tensor], op: str) -> Tensor:
    """In the order of ranks; half types in float, rounded once."""
    dtype = parts[0].dtype
    wide = dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if wide else parts[0].clone()
    for part in parts[1:]:
        total = _FOLDS[op](total, part.float() if wide else part)
    if op == "avg":
        total = total / len(parts)
    return total.to(dtype)
