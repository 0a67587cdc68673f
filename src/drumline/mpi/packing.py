"""Packing of elements into contiguous bytes, native or in the portable format external32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import constants as C
from . import external32
from .datatype_base import DatatypeBase
from .exception import MPIError

if TYPE_CHECKING:
    from .comm import Comm


class TypePacking(DatatypeBase):
    """Packing and unpacking of a datatype's elements."""

    __slots__ = ()

    def Pack_size(self, count: int, comm: Comm) -> int:
        """Bytes of `count` packed elements."""
        return count * self._layout.size

    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: Comm) -> int:
        """Pack elements at a position; returns the end position."""
        return _write(_message(inbuf, self, writable=False).data(), outbuf, position)

    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: Comm) -> int:
        """Unpack elements from a position; returns the end position."""
        out = _message(outbuf, self, writable=True)
        out.fill(_read(inbuf, position, out.nbytes))
        return position + int(out.nbytes)

    def Pack_external_size(self, datarep: str, count: int) -> int:
        """Bytes of `count` elements in the format external32."""
        _check_format(datarep)
        return count * external32.size(self._layout)

    def Pack_external(self, datarep: str, inbuf: Any, outbuf: Any, position: int) -> int:
        """Pack elements in the format external32; returns the end position."""
        _check_format(datarep)
        region = _message(inbuf, self, writable=False)
        return _write(external32.encode(region.data(), self._layout, region.count), outbuf, position)

    def Unpack_external(self, datarep: str, inbuf: Any, position: int, outbuf: Any) -> int:
        """Unpack elements in the format external32; returns the end position."""
        _check_format(datarep)
        out = _message(outbuf, self, writable=True)
        nbytes = int(out.count) * external32.size(self._layout)
        out.fill(external32.decode(_read(inbuf, position, nbytes), self._layout, out.count))
        return position + nbytes


def _message(buf: Any, kind: TypePacking, *, writable: bool) -> Any:
    from .buffers import parse_message

    return parse_message([buf, kind], writable=writable)


def _write(data: memoryview, outbuf: Any, position: int) -> int:
    from .memory import memory_of

    memory, end = memory_of(outbuf, writable=True), position + len(data)
    _check_room(position, end, len(memory))
    memory[position:end] = data
    return end


def _read(inbuf: Any, position: int, nbytes: int) -> memoryview:
    from .memory import memory_of

    memory = memory_of(inbuf, writable=False)
    _check_room(position, position + nbytes, len(memory))
    return memory[position : position + nbytes]


def _check_room(start: int, end: int, length: int) -> None:
    if start < 0 or end > length:
        raise MPIError(
            C.ERR_ARG, f"bytes {start} to {end} of a buffer of {length}", rule="packed data lie inside of the buffer"
        )


def _check_format(datarep: str) -> None:
    if datarep != "external32":
        raise MPIError(C.ERR_UNSUPPORTED_DATAREP, f"data format {datarep!r}", rule="external32")
