"""mpi4py's `buffer`: bytes with an address, as returned by Alloc_mem and windows."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from .memory import from_address, memory_of


class buffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes with an address. An array underneath, because a class in Python cannot export memory by itself."""

    obj: Any
    """The object whose memory it is; None for memory by address."""

    def __new__(cls, *args: Any) -> buffer:
        """The memory of an object; without an argument, no memory."""
        return buffer.frombuffer(*args) if args else _over(memoryview(bytearray()), None)

    def __array_finalize__(self, other: Any) -> None:
        """Start a view without an owner; who makes it sets the owner."""
        self.obj = None

    @staticmethod
    def allocate(nbytes: int, clear: bool = False) -> buffer:
        """Allocate memory; it is always cleared."""
        if index(nbytes) < 0:
            raise ValueError(f"{nbytes} bytes of memory")
        owner = np.zeros(max(1, index(nbytes)), dtype=np.uint8)[: index(nbytes)]  # no memory has an address, too
        made = owner.view(buffer)
        made.obj = owner
        return made

    @staticmethod
    def frombuffer(obj: Any, readonly: bool = False) -> buffer:
        """The memory of another object."""
        if obj is None or isinstance(obj, int | float | list | tuple):
            raise TypeError(f"{type(obj).__name__} has no memory")
        made = _over(memory_of(obj, writable=False), obj)
        return made.toreadonly() if readonly else made

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> buffer:
        """Memory by address."""
        if nbytes < 0 or (nbytes and not address):
            raise ValueError(f"{nbytes} bytes at address {address}")
        made = _over(from_address(address, nbytes), None)
        return made.toreadonly() if readonly else made

    @property
    def address(self) -> int:
        """The address of its first byte; 0 if it has no memory."""
        return int(self.ctypes.data) if self.nbytes or self.obj is not None else 0

    @property
    def readonly(self) -> bool:
        """Whether it is read-only."""
        return not self.flags.writeable

    @property
    def format(self) -> str:
        """The format code of its elements."""
        return "B"

    def __bool__(self) -> bool:
        return self.nbytes > 0

    def __getitem__(self, item: Any) -> Any:
        """A byte, or a part of the memory."""
        part = super().__getitem__(self._place(item))
        if not isinstance(part, buffer):
            return int(part)
        part.obj = self
        return part

    def __setitem__(self, item: Any, value: Any) -> None:
        """Write a byte, or the bytes of any object."""
        if self.readonly:
            raise TypeError("the buffer is read-only")
        place = self._place(item)
        if not hasattr(value, "__index__"):
            value = np.frombuffer(memory_of(value, writable=False), dtype=np.uint8)
            room = len(range(self.nbytes)[place]) if isinstance(place, slice) else 1
            if room != value.nbytes:
                raise ValueError(f"{value.nbytes} bytes assigned to {room}")
        super().__setitem__(place, value)

    def __delitem__(self, item: Any) -> None:
        raise NotImplementedError("memory cannot be removed from a buffer")

    @staticmethod
    def _place(item: Any) -> int | slice:
        if isinstance(item, slice):
            if item.step not in (None, 1):
                raise IndexError("slice with step not supported")
            return item
        return index(item)

    def cast(self, format: Any, *shape: Any) -> Any:
        """The same memory as elements of another type."""
        return self.data.cast(format, *shape)

    def toreadonly(self) -> buffer:
        """The same memory, read-only."""
        made = self.view(buffer)
        made.flags.writeable, made.obj = False, self.obj
        return made

    def release(self) -> None:
        """Give the memory up; it is freed when its views are gone as well."""
        self._released = self.base  # a view of this array keeps the array alive, and the array keeps the memory
        no_memory: Any = (1, (0,), self.dtype, False, b"")
        self.__setstate__(no_memory)
        self.obj = None


def _over(memory: memoryview, obj: Any) -> buffer:
    made = np.frombuffer(memory, dtype=np.uint8).view(buffer)
    made.obj = obj
    return made
