"""The predefined datatypes, and their type codes."""

from __future__ import annotations

import numpy as np
import torch

from .datatype import Datatype
from .datatype_base import TypeState
from .type_layout import ScalarType, TypeLayout

# names of the same type, its numpy code, its torch dtype
_NUMBERS: list[tuple[str, str, torch.dtype | None]] = [
    ("CHAR", "c", None),
    ("SIGNED_CHAR", "b", torch.int8),
    ("SHORT SIGNED_SHORT", "h", torch.int16),
    ("INT SIGNED_INT", "i", torch.int32),
    ("LONG SIGNED_LONG", "l", torch.int64),
    ("LONG_LONG SIGNED_LONG_LONG", "q", torch.int64),
    ("UNSIGNED_CHAR", "B", torch.uint8),
    ("UNSIGNED_SHORT", "H", torch.uint16),
    ("UNSIGNED UNSIGNED_INT", "I", torch.uint32),
    ("UNSIGNED_LONG", "L", torch.uint64),
    ("UNSIGNED_LONG_LONG", "Q", torch.uint64),
    ("FLOAT", "f", torch.float32),
    ("DOUBLE", "d", torch.float64),
    ("LONG_DOUBLE", "g", None),
    ("C_BOOL BOOL CXX_BOOL", "?", torch.bool),
    ("C_FLOAT_COMPLEX C_COMPLEX CXX_FLOAT_COMPLEX", "F", torch.complex64),
    ("C_DOUBLE_COMPLEX CXX_DOUBLE_COMPLEX", "D", torch.complex128),
    ("C_LONG_DOUBLE_COMPLEX CXX_LONG_DOUBLE_COMPLEX", "G", None),
    ("INT8_T SINT8_T", "i1", torch.int8),
    ("INT16_T SINT16_T", "i2", torch.int16),
    ("INT32_T SINT32_T", "i4", torch.int32),
    ("INT64_T SINT64_T", "i8", torch.int64),
    ("UINT8_T", "u1", torch.uint8),
    ("UINT16_T", "u2", torch.uint16),
    ("UINT32_T", "u4", torch.uint32),
    ("UINT64_T", "u8", torch.uint64),
    ("FLOAT16_T", "e", torch.float16),
    ("FLOAT32_T", "f4", torch.float32),
    ("FLOAT64_T", "f8", torch.float64),
    ("AINT", "p", torch.int64),
    ("OFFSET COUNT", "q", torch.int64),
    ("WCHAR", "U1", None),
    ("CHARACTER", "S1", None),
    ("LOGICAL F_BOOL LOGICAL4", "i4", torch.int32),
    ("LOGICAL1", "i1", torch.int8),
    ("LOGICAL2", "i2", torch.int16),
    ("LOGICAL8", "i8", torch.int64),
    ("INTEGER F_INT INTEGER4", "i4", torch.int32),
    ("INTEGER1", "i1", torch.int8),
    ("INTEGER2", "i2", torch.int16),
    ("INTEGER8", "i8", torch.int64),
    ("REAL F_FLOAT REAL4", "f4", torch.float32),
    ("DOUBLE_PRECISION F_DOUBLE REAL8", "f8", torch.float64),
    ("COMPLEX F_COMPLEX F_FLOAT_COMPLEX COMPLEX8", "c8", torch.complex64),
    ("DOUBLE_COMPLEX F_DOUBLE_COMPLEX COMPLEX16", "c16", torch.complex128),
]
_ABSENT = "LOGICAL16 INTEGER16 REAL2 REAL16 COMPLEX4 COMPLEX32"
_PAIRS = {
    "SHORT_INT": "h",
    "INT_INT TWOINT": "i",
    "LONG_INT": "l",
    "FLOAT_INT": "f",
    "DOUBLE_INT": "d",
    "LONG_DOUBLE_INT": "g",
}
_CLASS = {"i": 1, "u": 2, "f": 3, "c": 4, "b": 5, "S": 1, "U": 6}

_EXTERNAL = {"l": 4, "L": 4, "U1": 2}
"""Bytes in the portable format, by code, where they differ."""

TYPES: dict[str, Datatype] = {}
CODES: dict[str, Datatype] = {}
"""By type code, and by kind and size."""


def _define(names: str, scalar: ScalarType, code: str) -> Datatype:
    first, *others = names.split()
    made = Datatype._constant(first, TypeState(TypeLayout(scalar=scalar), name=f"MPI_{first}", code=code))
    for name in (first, *others):
        TYPES[name] = made
    return made


def _number(names: str, code: str, kind: torch.dtype | None) -> None:
    dtype = np.dtype({"p": "q", "c": "S1"}.get(code, code))
    align = dtype.alignment
    check = _CLASS[dtype.kind] * 32 + dtype.itemsize.bit_length()
    external = _EXTERNAL.get(code, dtype.itemsize)
    made = _define(names, ScalarType(dtype.itemsize, align, dtype.kind, dtype, kind, check, external), code)
    CODES.setdefault(code, made)
    if dtype.kind in "iufcb":
        CODES.setdefault(f"{dtype.kind}{dtype.itemsize}", made)


def _pair(names: str, code: str) -> None:
    value = np.dtype(code)
    dtype = np.dtype([("value", value), ("index", np.dtype("i"))], align=True)
    _define(names, ScalarType(value.itemsize + 4, dtype.alignment, "2", dtype, None, 7 * 32 + value.num % 32), "")


for _names, _code, _kind in _NUMBERS:
    _number(_names, _code, _kind)
for _names, _code in _PAIRS.items():
    _pair(_names, _code)
_define("BFLOAT16_T", ScalarType(2, 2, "f", None, torch.bfloat16, 8 * 32 - 1, 2), "")
BYTE = _define("BYTE", ScalarType(1, 1, "B", np.dtype("u1"), torch.uint8, external=1), "B")
_define("PACKED", ScalarType(1, 1, "B", np.dtype("u1"), torch.uint8, external=1), "B")
CODES["B"] = BYTE
CODES |= {f"Z{_code}": CODES[_code.upper()] for _code in "fdg"}  # memoryview's codes of complex numbers
DATATYPE_NULL = TYPES["DATATYPE_NULL"] = Datatype._constant("DATATYPE_NULL")
for _name in _ABSENT.split():
    TYPES[_name] = DATATYPE_NULL


def of_torch(dtype: torch.dtype) -> Datatype:
    """The datatype of a tensor's elements."""
    return _BY_TORCH[dtype]


_BY_TORCH: dict[torch.dtype, Datatype] = {}
for _made in TYPES.values():
    if _made and (_basic := _made._layout.scalar) is not None and _basic.torch is not None and _basic.kind != "B":
        _BY_TORCH.setdefault(_basic.torch, _made)
