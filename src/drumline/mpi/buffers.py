"""Parse message arguments: arrays, tensors, bytes, or lists of a buffer, a count and a datatype."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import torch

from .datatype import Datatype
from .memory import BOTTOM, IN_PLACE, from_address, resolve
from .predefined_types import BYTE, CODES
from .type_layout import TypeLayout


def in_place(message: object) -> bool:
    """Whether a collective works in place."""
    return message is None or message is IN_PLACE


class MessageBuffer:
    """The memory of one message: `count` elements of a datatype, starting at `base`."""

    __slots__ = ("base", "count", "device", "layout", "memory", "type")

    def __init__(
        self,
        memory: memoryview,
        base: int,
        count: int,
        kind: Datatype,
        device: torch.Tensor | None = None,
        *,
        fits: bool = False,
    ) -> None:
        self.memory, self.base, self.count, self.type, self.device = memory, base, count, kind, device
        self.layout: TypeLayout = kind._layout
        if count and not fits:
            low = base + self.layout.true_lb + min(0, (count - 1) * self.layout.extent)
            high = base + self.layout.true_ub + max(0, (count - 1) * self.layout.extent)
            if low < 0 or high > len(memory):
                name = kind.Get_name() or "a derived datatype"
                raise ValueError(
                    f"message: {count} of {name} reach from byte {low} to byte {high} of a buffer of {len(memory)}"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.count * self.layout.size

    @property
    def check(self) -> int:
        """The element type, compared by sender and receiver; 0 matches every type."""
        uniform_scalar = self.layout.uniform_scalar
        return uniform_scalar.check if uniform_scalar is not None else 0

    def part(self, first: int, count: int) -> MessageBuffer:
        """`count` elements, starting at element `first`."""
        return MessageBuffer(self.memory, self.base + first * self.layout.extent, count, self.type, self.device)

    def raw(self) -> memoryview:
        """The memory itself, including gaps."""
        return self.memory[self.base : self.base + self.count * self.layout.extent]

    def data(self) -> memoryview:
        """The bytes to send: the memory itself if it has no gaps, else packed."""
        if self.layout.dense:
            return self.memory[self.base : self.base + self.nbytes]
        return self.layout.pack(self.memory, self.base, self.count)

    def receive_memory(self) -> memoryview:
        """Memory to receive into: the memory itself if it has no gaps, else a temporary one."""
        if self.layout.dense:
            return self.memory[self.base : self.base + self.nbytes]
        return memoryview(bytearray(self.nbytes))

    def unpack_received(self, into: memoryview, nbytes: int) -> None:
        """Unpack data received into `receive_memory`."""
        if not self.layout.dense:
            self.layout.unpack(into[:nbytes], self.memory, self.base, self.count)
        self.flush()

    def flush(self) -> None:
        """Copy changed memory back to the GPU, if it is a copy."""
        if self.device is not None:
            _to_device(self.memory, self.device)

    def fill(self, data: memoryview | bytes) -> None:
        """Write packed bytes to the memory."""
        data = memoryview(data)
        if self.layout.dense:
            self.memory[self.base : self.base + len(data)] = data
        self.unpack_received(data, len(data))


NOTHING = MessageBuffer(memoryview(bytearray()), 0, 0, BYTE, None)


def _to_device(memory: memoryview, device: torch.Tensor) -> None:
    """Copy from host memory to the GPU."""
    flat = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
    device.copy_(flat.view(device.dtype).view(device.shape))


def as_datatype(kind: Any) -> Datatype:
    """A datatype, given as itself or by its type code."""
    if isinstance(kind, Datatype):
        return kind
    if kind[:1] == ">":
        raise BufferError(f"elements {kind!r} in non-native byte order")
    if kind not in CODES:
        raise KeyError(f"{kind!r} is no MPI datatype")
    return CODES[kind]


def _is_type(x: object) -> bool:
    return isinstance(x, Datatype | str)


def _items(message: Any, pair: type | tuple[type, ...]) -> tuple[Any, Any, Any, Any]:
    """(buffer, count, displacement, datatype) of a message; None if not given. A `pair` has count and displacement."""
    if not isinstance(message, list | tuple):
        return message, None, None, None
    if not 2 <= len(message) <= 4:
        raise ValueError(f"message of {len(message)} items: a buffer with count, displacement and datatype has 2 to 4")
    buf, *rest = message
    kind = rest.pop() if len(message) > 2 or _is_type(rest[-1]) else None
    count, displ = (*rest, None, None)[:2]
    if isinstance(count, pair) and len(message) < 4:
        count, displ = count  # type: ignore[misc]  # `pair` are sequence types
    return buf, count, displ, kind


def _memory(buf: Any, kind: Any, writable: bool) -> tuple[memoryview | None, Datatype, torch.Tensor | None]:
    """Memory, datatype and GPU tensor; None as memory is the whole address space."""
    if buf is None or buf is BOTTOM:
        return None, as_datatype(kind), None
    memory, own, device = resolve(buf, writable)
    return memory, as_datatype(own if kind is None else kind), device


def parse_message(message: Any, *, writable: bool, blocks: int = 1) -> MessageBuffer:
    """Parse one message. Without a count, it is the buffer's length divided by `blocks`."""
    if message is None:
        raise TypeError("message: None is no buffer")
    if type(message) is np.ndarray and (plain := _plain_array(message, writable, blocks)) is not None:
        return plain
    buf, n, displ, kind_given = _items(message, (list, tuple))
    memory, kind, device = _memory(buf, kind_given, writable)
    length = 0 if memory is None else len(memory)
    offset = 0
    if displ is not None and index(displ) != 0:
        if index(displ) < 0:
            raise ValueError(f"message: displacement {displ} is negative")
        offset = index(displ) * _extent(kind)
        if offset > length:
            raise ValueError(f"message: displacement {displ} is beyond the {length} bytes of the buffer")
        length -= offset
    if n is not None:
        count = index(n)
        if count < 0:
            raise ValueError(f"message: count {count} is negative")
        if count and buf is None:
            raise ValueError(f"message: {count} elements of no buffer")
    else:
        count = _counted(length, kind, blocks) if length else 0
    if not kind:
        return NOTHING
    if memory is None:
        return absolute(count, kind)
    return MessageBuffer(memory, offset, count, kind, device)


def _plain_array(array: np.ndarray[Any, Any], writable: bool, blocks: int) -> MessageBuffer | None:
    """A fast path for arrays of plain numbers; None for anything else."""
    kind, flags = _BY_CHAR.get(array.dtype.char), array.flags
    if (
        kind is None
        or not flags.c_contiguous
        or not array.dtype.isnative
        or array.size == 0
        or array.size % blocks
        or (writable and not flags.writeable)
    ):
        return None
    return MessageBuffer(array.data.cast("B"), 0, array.size // blocks, kind, fits=True)


_BY_CHAR = {code: CODES[code] for code in "bhilqBHILQefdgFDG?"}


def absolute(count: int, kind: Datatype, offset: int = 0) -> MessageBuffer:
    """Elements whose datatype contains absolute addresses (BOTTOM)."""
    layout = kind._layout
    low, high = layout.true_lb, layout.true_ub + max(0, count - 1) * layout.extent
    if count == 0 or low == high:
        return MessageBuffer(memoryview(bytearray()), 0, 0, kind, None)
    return MessageBuffer(from_address(offset + low, high - low), -low, count, kind, None)


def _extent(kind: Datatype) -> int:
    if not kind:
        raise ValueError("message: count and displacement need a datatype, and it is null")
    if kind._layout.extent <= 0:
        raise ValueError(f"message: elements of extent {kind._layout.extent} cannot be counted")
    return kind._layout.extent


def _counted(length: int, kind: Datatype, blocks: int) -> int:
    extent = _extent(kind)
    if length % (extent * blocks):
        raise ValueError(
            f"message: {length} bytes are no multiple of {blocks} blocks of elements of {extent} bytes"
            if blocks > 1
            else f"message: {length} bytes are no multiple of elements of {extent} bytes"
        )
    return length // extent // blocks


def parse_vector(message: Any, blocks: int, *, writable: bool) -> list[MessageBuffer]:
    """Parse one message per rank: counts and displacements in elements; by default the buffer is divided evenly."""
    if message is None:
        raise TypeError("message: None is no buffer")
    buf, counts, displs, kind_given = _items(message, tuple)
    memory, kind, device = _memory(buf, kind_given, writable)
    if counts is None:
        n = 0 if not memory else _counted(len(memory), kind, 1)
        counts = [n // blocks + (n % blocks > i) for i in range(blocks)]
    counts = _each(counts, blocks)
    if displs is None:
        displs = [sum(counts[:i]) for i in range(blocks)]
    elif not isinstance(displs, Sequence) and np.ndim(displs) == 0:
        displs = [index(displs) * i for i in range(blocks)]
    displs = _each(displs, blocks)
    if memory is None:
        return [absolute(n, kind, d * kind._layout.extent) for n, d in zip(counts, displs, strict=True)]
    return [
        MessageBuffer(memory, d * kind._layout.extent if n else 0, n, kind, device)
        for n, d in zip(counts, displs, strict=True)
    ]


def parse_vector_w(message: Any, blocks: int, *, writable: bool) -> list[MessageBuffer]:
    """Parse one message per rank, each with its own datatype and a displacement in bytes."""
    if not isinstance(message, list | tuple) or not 2 <= len(message) <= 4:
        raise ValueError("message: a buffer, counts, displacements and datatypes")
    buf, *rest = message
    types = [as_datatype(t) for t in rest.pop()]
    if len(types) != blocks:
        raise ValueError(f"message: {len(types)} datatypes for {blocks} ranks")
    counts, displs = rest if len(rest) == 2 else rest[0] if rest else (None, None)
    if (buf is None or buf is BOTTOM) and (counts is None or displs is None):
        raise ValueError("message: BOTTOM needs counts and displacements")
    counts = _each(1 if counts is None else counts, blocks)
    displs = _each(0 if displs is None else displs, blocks)
    if buf is None or buf is BOTTOM:
        return [absolute(n, t, d) for n, d, t in zip(counts, displs, types, strict=True)]
    memory, _, device = resolve(buf, writable)
    return [MessageBuffer(memory, d if n else 0, n, t, device) for n, d, t in zip(counts, displs, types, strict=True)]


def _each(values: Any, blocks: int) -> list[int]:
    """One integer per rank."""
    if not isinstance(values, Sequence) and np.ndim(values) == 0:
        return [index(values)] * blocks
    numbers = [index(v) for v in values]
    if len(numbers) != blocks:
        raise ValueError(f"message: {len(numbers)} numbers for {blocks} ranks")
    return numbers
