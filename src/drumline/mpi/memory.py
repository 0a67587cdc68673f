"""Bytes with an address: what Alloc_mem and windows give, and what made operators get."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from .buffers import memory_of
from .foreign import from_address


class buffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes with an address: what Alloc_mem and windows give."""

    def __new__(cls, obj: Any = b"") -> buffer:
        if obj is None or isinstance(obj, int | float | list | tuple):
            raise TypeError(f"{type(obj).__name__} has no memory")
        return np.frombuffer(memory_of(obj, writable=False), dtype=np.uint8).view(cls)

    def __setitem__(self, item: Any, value: Any) -> None:
        """A byte, or the bytes of something of any type."""
        if not isinstance(value, int | np.integer):
            value = np.frombuffer(memory_of(value, writable=False), dtype=np.uint8)
            if self[item].nbytes != value.nbytes:
                raise ValueError(f"{value.nbytes} bytes in the place of {self[item].nbytes}")
        super().__setitem__(item, value)

    @staticmethod
    def allocate(nbytes: int, clear: bool = False) -> buffer:
        """New memory."""
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes of memory")
        return np.zeros(index(nbytes), dtype=np.uint8).view(buffer)

    @staticmethod
    def frombuffer(obj: Any, readonly: bool = False) -> buffer:
        """The memory of something else."""
        made = buffer(obj)
        return made.toreadonly() if readonly else made

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> buffer:
        """Memory by its address."""
        if nbytes < 0 or (nbytes and not address):
            raise ValueError(f"{nbytes} bytes at address {address}")
        made = np.frombuffer(from_address(address, nbytes), dtype=np.uint8).view(buffer)
        return made.toreadonly() if readonly else made

    @property
    def address(self) -> int:
        """Where it begins."""
        return int(self.ctypes.data) if self.nbytes else 0

    @property
    def readonly(self) -> bool:
        """Whether it may not be changed."""
        return not self.flags.writeable

    @property
    def format(self) -> str:
        """The letter of its elements."""
        return "B"

    def __bool__(self) -> bool:
        return self.nbytes > 0

    def cast(self, format: Any, *shape: Any) -> Any:
        """The same memory as elements of another type."""
        return memoryview(self.data).cast(format, *shape)

    def toreadonly(self) -> buffer:
        """The same memory, which may not be changed through it."""
        made = self.view()
        made.flags.writeable = False
        return made
