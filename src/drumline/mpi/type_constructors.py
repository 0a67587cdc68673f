"""The constructors of derived datatypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from . import constants as C
from .darray import distributed_array
from .datatype_base import DatatypeBase, TypeState
from .exception import MPIError
from .handles import PREDEFINED
from .type_layout import TypeLayout, block, spaced, subarray

_by_precision: dict[tuple[object, ...], TypeState] = {}
"""Fortran types by class, precision and range: the same arguments return the same type."""


class TypeConstructors(DatatypeBase):
    """The constructors of datatypes."""

    __slots__ = ()

    def Dup(self) -> Self:
        """A copy."""
        copy = self._new(self._layout, "DUP")
        copy._state.code = self._state.code
        self._copy_attributes_to(copy)
        return copy

    Create_dup = Dup

    def Create_contiguous(self, count: int) -> Self:
        """`count` adjacent elements."""
        return self._new(TypeLayout(block(_whole(count), self._layout)), "CONTIGUOUS", count=count)

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Self:
        """`count` blocks at a distance of `stride` elements."""
        places = [i * stride * self._layout.extent for i in range(_whole(count))]
        layout = TypeLayout(spaced([_whole(blocklength)] * count, places, self._layout))
        return self._new(layout, "VECTOR", count=count, blocklength=blocklength, stride=stride)

    def Create_hvector(self, count: int, blocklength: int, stride: int) -> Self:
        """Create_vector with the stride in bytes."""
        layout = TypeLayout(
            spaced([_whole(blocklength)] * count, [i * stride for i in range(_whole(count))], self._layout)
        )
        return self._new(layout, "HVECTOR", count=count, blocklength=blocklength, stride=stride)

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        """Blocks of any length at displacements in elements."""
        lengths, places = _pairs(blocklengths, displacements)
        layout = TypeLayout(spaced(lengths, [d * self._layout.extent for d in places], self._layout))
        return self._new(layout, "INDEXED", blocklengths=lengths, displacements=places)

    def Create_hindexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        """Create_indexed with displacements in bytes."""
        lengths, places = _pairs(blocklengths, displacements)
        layout = TypeLayout(spaced(lengths, places, self._layout))
        return self._new(layout, "HINDEXED", blocklengths=lengths, displacements=places)

    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
        """Blocks of one length at displacements in elements."""
        places = [int(d) for d in displacements]
        at = [d * self._layout.extent for d in places]
        layout = TypeLayout(spaced([_whole(blocklength)] * len(places), at, self._layout))
        return self._new(layout, "INDEXED_BLOCK", blocklength=blocklength, displacements=places)

    def Create_hindexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
        """Create_indexed_block with displacements in bytes."""
        places = [int(d) for d in displacements]
        layout = TypeLayout(spaced([_whole(blocklength)] * len(places), places, self._layout))
        return self._new(layout, "HINDEXED_BLOCK", blocklength=blocklength, displacements=places)

    @classmethod
    def Create_struct(
        cls, blocklengths: Sequence[int], displacements: Sequence[int], datatypes: Sequence[DatatypeBase]
    ) -> Self:
        """Blocks of several types at displacements in bytes."""
        lengths, places = _pairs(blocklengths, displacements)
        if len(lengths) != len(datatypes):
            raise ValueError(f"{len(lengths)} blocks of {len(datatypes)} types: each block needs one type")
        parts = tuple((d, n, t._layout) for d, n, t in zip(places, lengths, datatypes, strict=True))
        params = {"blocklengths": lengths, "displacements": places, "datatypes": [cls._family(t) for t in datatypes]}
        return cls._of(TypeState(TypeLayout(parts, padded=True), "STRUCT", None, params))

    def Create_subarray(
        self, sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], order: int = C.ORDER_C
    ) -> Self:
        """A box inside an array."""
        dims = list(zip(sizes, subsizes, starts, strict=True))
        if not dims or any(not 0 < sub <= size or not 0 <= start <= size - sub for size, sub, start in dims):
            raise MPIError(C.ERR_ARG, f"subarray {dims}", rule="0 < subsize <= size and 0 <= start <= size - subsize")
        row_major = dims if order == C.ORDER_C else dims[::-1]
        layout = subarray(row_major, self._layout)
        return self._new(
            layout, "SUBARRAY", sizes=list(sizes), subsizes=list(subsizes), starts=list(starts), order=order
        )

    def Create_resized(self, lb: int, extent: int) -> Self:
        """The same type with explicit bounds."""
        layout = TypeLayout(block(1, self._layout), bounds=(lb, extent))
        return self._new(layout, "RESIZED", lb=lb, extent=extent)

    Resized = Create_resized

    def Create_darray(
        self,
        size: int,
        rank: int,
        gsizes: Sequence[int],
        distribs: Sequence[int],
        dargs: Sequence[int],
        psizes: Sequence[int],
        order: int = C.ORDER_C,
    ) -> Self:
        """The part of a distributed array that belongs to one of `size` ranks in a row-major grid."""
        lists = {name: [int(n) for n in values] for name, values in (("gsizes", gsizes), ("distribs", distribs))}
        lists |= {name: [int(n) for n in values] for name, values in (("dargs", dargs), ("psizes", psizes))}
        layout = distributed_array(size, rank, **lists, order=order, old=self._layout)
        return self._new(layout, "DARRAY", size=size, rank=rank, **lists, order=order)

    # -- Fortran's types by precision ---------------------------------------------------------------------------------

    @classmethod
    def Create_f90_integer(cls, r: int) -> Self:
        """The integer type with r decimal digits."""
        size = next((n for n, digits in ((1, 2), (2, 4), (4, 9), (8, 18)) if r <= digits), 0)
        return cls._of_precision("F90_INTEGER", f"INTEGER{size}", r=r)

    @classmethod
    def Create_f90_real(cls, p: int, r: int) -> Self:
        """The floating-point type with p decimal digits and exponents up to r."""
        names = ("REAL4", "REAL8", "LONG_DOUBLE")
        return cls._of_precision("F90_REAL", _with_precision(names, p, r), p=p, r=r)

    @classmethod
    def Create_f90_complex(cls, p: int, r: int) -> Self:
        """The complex type with p decimal digits and exponents up to r."""
        names = ("COMPLEX8", "COMPLEX16", "C_LONG_DOUBLE_COMPLEX")
        return cls._of_precision("F90_COMPLEX", _with_precision(names, p, r), p=p, r=r)

    @classmethod
    def _of_precision(cls, combiner: str, name: str, **params: int) -> Self:
        from .predefined_types import TYPES

        if name not in TYPES:
            text = ", ".join(f"{key} = {n}" for key, n in params.items())
            raise MPIError(C.ERR_ARG, f"{combiner} with {text}", rule="digits and exponents that a type of C has")
        key = (combiner, *params.values())
        if key not in _by_precision:
            like = TYPES[name]._state
            _by_precision[key] = TypeState(like.layout, combiner, None, params, code=like.code)
        return cls._of(_by_precision[key])

    @classmethod
    def Get_value_index(cls, value: DatatypeBase, index: DatatypeBase) -> Self:
        """The pair type for MAXLOC and MINLOC; null if there is none."""
        pair = value._state.name.removeprefix("MPI_") + "_INT"
        return cls(PREDEFINED.get(pair) if index._state.name == "MPI_INT" else None)

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Self:
        """The type of a class with a size in bytes."""
        names = {
            C.TYPECLASS_LOGICAL: "LOGICAL",
            C.TYPECLASS_INTEGER: "INTEGER",
            C.TYPECLASS_REAL: "REAL",
            C.TYPECLASS_COMPLEX: "COMPLEX",
        }
        from .predefined_types import TYPES

        match = TYPES.get(f"{names.get(typeclass, '')}{size}")
        if not match:
            raise MPIError(C.ERR_ARG, f"type class {typeclass} of {size} bytes", rule="a size that C has")
        return cls(match)


def _with_precision(names: tuple[str, str, str], p: int, r: int) -> str:
    for name, code in zip(names, "fdg", strict=True):
        limits: Any = np.finfo(np.dtype(code).type)
        range_of = int(np.log10(limits.max))
        if (p == C.UNDEFINED or p <= limits.precision) and (r == C.UNDEFINED or r <= range_of):
            return name
    return ""


def _whole(n: int) -> int:
    if n < 0:
        raise MPIError(C.ERR_ARG, f"{n} elements", rule="at least 0")
    return int(n)


def _pairs(lengths: Sequence[int], places: Sequence[int]) -> tuple[list[int], list[int]]:
    if len(lengths) != len(places):
        raise ValueError(f"{len(lengths)} blocks at {len(places)} displacements")
    return [_whole(n) for n in lengths], [int(d) for d in places]
