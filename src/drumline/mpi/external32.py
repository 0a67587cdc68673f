"""The portable format external32: big-endian scalars of fixed sizes, without gaps.

It differs from native data in the byte order and in three types: long has 4 bytes, wchar_t 2, and a long double is an
IEEE number of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

from . import constants as C
from .exception import MPIError
from .type_layout import ScalarType, TypeLayout

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""One row per element."""
_FRACTION = np.uint64((1 << 63) - 1)
"""The bits of an x87 number's mantissa without its first, which is not stored elsewhere."""


def size(layout: TypeLayout) -> int:
    """Bytes of one element."""
    return sum(_external(scalar) for scalar in layout.scalars)


def encode(data: memoryview, layout: TypeLayout, count: int) -> memoryview:
    """Convert packed native elements."""
    native = np.frombuffer(data, dtype=np.uint8).reshape(count, layout.size)
    rows = np.empty((count, size(layout)), dtype=np.uint8)
    for scalar, here, there in _runs(layout):
        rows[:, there] = _encode(native[:, here], scalar)
    return rows.reshape(-1).data


def decode(data: memoryview, layout: TypeLayout, count: int) -> memoryview:
    """Convert to packed native elements."""
    rows = np.frombuffer(data, dtype=np.uint8).reshape(count, size(layout))
    native = np.empty((count, layout.size), dtype=np.uint8)
    for scalar, here, there in _runs(layout):
        native[:, here] = _decode(rows[:, there], scalar)
    return native.reshape(-1).data


def _runs(layout: TypeLayout) -> Iterator[tuple[ScalarType, slice, slice]]:
    """Runs of equal scalars: their native and their external bytes in an element."""
    here = there = 0
    for scalar, run in groupby(layout.scalars):
        n = len(list(run))
        yield scalar, slice(here, here + n * scalar.size), slice(there, there + n * _external(scalar))
        here, there = here + n * scalar.size, there + n * _external(scalar)


def _external(scalar: ScalarType) -> int:
    if not scalar.external:
        raise MPIError(C.ERR_TYPE, "a pair of value and index in external32", rule="the format has no pairs")
    return scalar.external


def _unit(scalar: ScalarType) -> int:
    """Bytes that are reversed together: half a complex number."""
    return scalar.size // 2 if scalar.kind == "c" else scalar.size


def _has_long_doubles(scalar: ScalarType) -> bool:
    """Whether it consists of x87 numbers."""
    return scalar.kind in "fc" and _unit(scalar) > 8 and np.finfo(np.longdouble).nmant == 63


def _encode(native: Bytes, scalar: ScalarType) -> Bytes:
    flat = np.ascontiguousarray(native).reshape(-1)
    if _has_long_doubles(scalar):
        flat = _quad_of_x87(flat)
    elif scalar.external != scalar.size:
        wide = flat.view(f"{'i' if scalar.kind == 'i' else 'u'}{scalar.size}")
        narrow = wide.astype(f"{wide.dtype.kind}{scalar.external}")
        if (narrow != wide).any():
            bad = wide[narrow != wide][0]
            raise MPIError(C.ERR_CONVERSION, f"{bad} in external32", rule=f"{scalar.external} bytes hold the value")
        return narrow.byteswap().view(np.uint8).reshape(len(native), -1)
    return flat.reshape(-1, _unit(scalar))[:, ::-1].reshape(len(native), -1)


def _decode(rows: Bytes, scalar: ScalarType) -> Bytes:
    flat = np.ascontiguousarray(rows).reshape(-1)
    if scalar.external != scalar.size:
        kind = "i" if scalar.kind == "i" else "u"
        wide = flat.view(f">{kind}{scalar.external}").astype(f"{kind}{scalar.size}")
        return wide.view(np.uint8).reshape(len(rows), -1)
    flat = np.ascontiguousarray(flat.reshape(-1, _unit(scalar))[:, ::-1]).reshape(-1)
    return (_x87_of_quad(flat) if _has_long_doubles(scalar) else flat).reshape(len(rows), -1)


def _quad_of_x87(flat: Bytes) -> Bytes:
    """IEEE numbers of 16 bytes with the same sign, exponent and fraction; all little-endian."""
    words = flat.view(np.uint64).reshape(-1, 2)
    fraction, sign_and_exponent = words[:, 0] & _FRACTION, words[:, 1] & np.uint64(0xFFFF)
    low = fraction << np.uint64(49)
    high = (sign_and_exponent << np.uint64(48)) | (fraction >> np.uint64(15))
    return np.stack([low, high], axis=1).reshape(-1).view(np.uint8)


def _x87_of_quad(flat: Bytes) -> Bytes:
    """The inverse; digits that do not fit are cut off."""
    words = flat.view(np.uint64).reshape(-1, 2)
    low, high = words[:, 0], words[:, 1]
    fraction = ((high & np.uint64((1 << 48) - 1)) << np.uint64(15)) | (low >> np.uint64(49))
    sign_and_exponent = high >> np.uint64(48)
    first_bit = np.where(sign_and_exponent & np.uint64(0x7FFF), np.uint64(1 << 63), np.uint64(0))
    return np.stack([fraction | first_bit, sign_and_exponent], axis=1).reshape(-1).view(np.uint8)
