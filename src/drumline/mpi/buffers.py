"""Messages as programs give them: arrays, tensors, bytes, or lists of a buffer, a count and a datatype."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import torch

from .datatype import Datatype
from .foreign import from_address, from_cuda_interface, from_dlpack
from .layout import Layout
from .types import BYTE, CODES, of_torch


class Marker:
    """A place that stands for something special."""

    def __init__(self, name: str, value: int) -> None:
        self._name, self._value = name, value

    def __repr__(self) -> str:
        return self._name

    def __bool__(self) -> bool:
        return self._value != 0

    def __int__(self) -> int:
        return self._value

    def __reduce__(self) -> str:
        return self._name


Marker.__module__ = "drumline.MPI"  # where the markers are found again after a journey
BOTTOM, IN_PLACE, BUFFER_AUTOMATIC = Marker("BOTTOM", 0), Marker("IN_PLACE", -1), Marker("BUFFER_AUTOMATIC", -2)


def in_place(message: object) -> bool:
    """Whether the other buffer of a collective is meant."""
    return message is None or message is IN_PLACE


class Spot:
    """Memory of one message: `count` elements of a datatype from `base` on."""

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
        self.layout: Layout = kind._layout
        if count and not fits:
            low = base + self.layout.true_lb + min(0, (count - 1) * self.layout.extent)
            high = base + self.layout.true_ub + max(0, (count - 1) * self.layout.extent)
            if low < 0 or high > len(memory):
                name = kind.Get_name() or "a made datatype"
                raise ValueError(
                    f"message: {count} of {name} reach from byte {low} to byte {high} of a buffer of {len(memory)}"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.count * self.layout.size

    @property
    def check(self) -> int:
        """What sender and receiver compare; 0 fits everything."""
        alike = self.layout.alike
        return alike.check if alike is not None else 0

    def part(self, first: int, count: int) -> Spot:
        """`count` elements from element `first` on."""
        return Spot(self.memory, self.base + first * self.layout.extent, count, self.type, self.device)

    def raw(self) -> memoryview:
        """The memory itself, gaps and all."""
        return self.memory[self.base : self.base + self.count * self.layout.extent]

    def data(self) -> memoryview:
        """The bytes to send: the memory itself where it has no gaps."""
        if self.layout.dense:
            return self.memory[self.base : self.base + self.nbytes]
        return self.layout.pack(self.memory, self.base, self.count)

    def landing(self) -> memoryview:
        """Where to receive: the memory itself, or memory beside it that `fill` unpacks."""
        if self.layout.dense:
            return self.memory[self.base : self.base + self.nbytes]
        return memoryview(bytearray(self.nbytes))

    def land(self, into: memoryview, nbytes: int) -> None:
        """What came into `landing` goes to its place."""
        if not self.layout.dense:
            self.layout.unpack(into[:nbytes], self.memory, self.base, self.count)
        self.flush()

    def flush(self) -> None:
        """The memory has changed: if it is a copy of a GPU's, that changes too."""
        if self.device is not None:
            _to_device(self.memory, self.device)

    def fill(self, data: memoryview | bytes) -> None:
        """Put bytes in place."""
        data = memoryview(data)
        if self.layout.dense:
            self.memory[self.base : self.base + len(data)] = data
        self.land(data, len(data))


NOTHING = Spot(memoryview(bytearray()), 0, 0, BYTE, None)


def _to_device(memory: memoryview, device: torch.Tensor) -> None:
    """From the copy in host memory back to the GPU."""
    flat = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
    device.copy_(flat.view(device.dtype).view(device.shape))


def _tensor(tensor: torch.Tensor, writable: bool) -> tuple[memoryview, Datatype, torch.Tensor | None]:
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} with gaps: call .contiguous()")
    host = tensor.cpu()
    memory = from_address(host.data_ptr(), host.numel() * host.element_size(), host)
    return memory, of_torch(tensor.dtype), tensor if writable and host.data_ptr() != tensor.data_ptr() else None


def _buffer(obj: Any, writable: bool) -> tuple[memoryview, str]:
    if isinstance(obj, np.ndarray) and not obj.flags.c_contiguous and obj.flags.f_contiguous:
        obj = obj.T
    view = memoryview(obj)
    if not view.c_contiguous:
        raise BufferError("ndarray is not contiguous")
    if writable and view.readonly:
        raise BufferError("the buffer is read-only: nothing can be received into it")
    return view.cast("B") if view.nbytes else memoryview(bytearray()), view.format.lstrip("<=@")


def resolve(obj: Any, writable: bool) -> tuple[memoryview, str | Datatype, torch.Tensor | None]:
    """The bytes of anything that has memory, what its elements are, and the GPU's tensor that they are a copy of."""
    if isinstance(obj, torch.Tensor):
        return _tensor(obj, writable)
    try:
        return *_buffer(obj, writable), None
    except TypeError:
        if hasattr(obj, "__dlpack__"):
            found = from_dlpack(obj, writable)
        elif hasattr(obj, "__cuda_array_interface__"):
            found = from_cuda_interface(obj, writable)
        else:
            raise TypeError(f"message: {type(obj).__name__} is no buffer, and no list of one") from None
    return _tensor(found, writable) if isinstance(found, torch.Tensor) else (*found, None)


def memory_of(obj: Any, *, writable: bool) -> memoryview:
    """Just the bytes."""
    return memoryview(bytearray()) if obj is None or obj is BOTTOM else resolve(obj, writable)[0]


def address_of(obj: Any) -> int:
    """Where the memory of something begins."""
    if obj is None or obj is BOTTOM:
        return 0
    memory = memory_of(obj, writable=False)
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data) if len(memory) else 0


def as_datatype(kind: Any) -> Datatype:
    """A datatype, from itself or from its letter."""
    if isinstance(kind, Datatype):
        return kind
    if kind[:1] == ">":
        raise BufferError(f"elements {kind!r} in the byte order of other machines")
    if kind not in CODES:
        raise KeyError(f"{kind!r} stands for no MPI datatype")
    return CODES[kind]


def _is_type(x: object) -> bool:
    return isinstance(x, Datatype | str)


def _items(message: Any, pair: type | tuple[type, ...]) -> tuple[Any, Any, Any, Any]:
    """(buffer, count, displacement, datatype) of any form; None where nothing was said. A `pair` holds both numbers."""
    if not isinstance(message, list | tuple):
        return message, None, None, None
    if not 2 <= len(message) <= 4:
        raise ValueError(f"message of {len(message)} items: a buffer with count, displacement and datatype has 2 to 4")
    buf, *rest = message
    kind = rest.pop() if len(message) > 2 or _is_type(rest[-1]) else None
    count, displ = (*rest, None, None)[:2]
    if isinstance(count, pair) and len(message) < 4:
        count, displ = count  # type: ignore[misc]  # `pair` are kinds of sequences
    return buf, count, displ, kind


def _memory(buf: Any, kind: Any, writable: bool) -> tuple[memoryview | None, Datatype, torch.Tensor | None]:
    """None stands for all of memory, from address 0 on."""
    if buf is None or buf is BOTTOM:
        return None, as_datatype(kind), None
    memory, own, device = resolve(buf, writable)
    return memory, as_datatype(own if kind is None else kind), device


def simple(message: Any, *, writable: bool, blocks: int = 1) -> Spot:
    """One message. Where no count is given, the buffer's length says it, divided by `blocks`."""
    if message is None:
        raise TypeError("message: None is no buffer")
    if type(message) is np.ndarray and (plain := _plain(message, writable, blocks)) is not None:
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
        return bottom(count, kind)
    return Spot(memory, offset, count, kind, device)


def _plain(array: np.ndarray[Any, Any], writable: bool, blocks: int) -> Spot | None:
    """The quick way for an array of plain numbers; None where something needs a closer look."""
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
    return Spot(array.data.cast("B"), 0, array.size // blocks, kind, fits=True)


_BY_CHAR = {code: CODES[code] for code in "bhilqBHILQefdgFDG?"}


def bottom(count: int, kind: Datatype, offset: int = 0) -> Spot:
    """Elements whose datatype holds their addresses."""
    layout = kind._layout
    low, high = layout.true_lb, layout.true_ub + max(0, count - 1) * layout.extent
    if count == 0 or low == high:
        return Spot(memoryview(bytearray()), 0, 0, kind, None)
    return Spot(from_address(offset + low, high - low), -low, count, kind, None)


def _extent(kind: Datatype) -> int:
    if not kind:
        raise ValueError("message: the datatype is null, and no count or displacement can be told from it")
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


def vector(message: Any, blocks: int, *, writable: bool) -> list[Spot]:
    """One message for each rank: counts and displacements in elements; left out, the buffer is shared out evenly."""
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
        return [bottom(n, kind, d * kind._layout.extent) for n, d in zip(counts, displs, strict=True)]
    return [
        Spot(memory, d * kind._layout.extent if n else 0, n, kind, device) for n, d in zip(counts, displs, strict=True)
    ]


def vector_w(message: Any, blocks: int, *, writable: bool) -> list[Spot]:
    """One message for each rank, each with its own datatype and a displacement in bytes."""
    if not isinstance(message, list | tuple) or not 2 <= len(message) <= 4:
        raise ValueError("message: a buffer, counts, displacements and datatypes")
    buf, *rest = message
    types = [as_datatype(t) for t in rest.pop()]
    if len(types) != blocks:
        raise ValueError(f"message: {len(types)} datatypes for {blocks} ranks")
    counts, displs = rest if len(rest) == 2 else rest[0] if rest else (None, None)
    if (buf is None or buf is BOTTOM) and (counts is None or displs is None):
        raise ValueError("message: all of memory needs counts and displacements")
    counts = _each(1 if counts is None else counts, blocks)
    displs = _each(0 if displs is None else displs, blocks)
    if buf is None or buf is BOTTOM:
        return [bottom(n, t, d) for n, d, t in zip(counts, displs, types, strict=True)]
    memory, _, device = resolve(buf, writable)
    return [Spot(memory, d if n else 0, n, t, device) for n, d, t in zip(counts, displs, types, strict=True)]


def _each(values: Any, blocks: int) -> list[int]:
    """One whole number for each rank."""
    if not isinstance(values, Sequence) and np.ndim(values) == 0:
        return [index(values)] * blocks
    found = [index(v) for v in values]
    if len(found) != blocks:
        raise ValueError(f"message: {len(found)} numbers for {blocks} ranks")
    return found
