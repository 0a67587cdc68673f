"""Datatypes: the scalar types of C and Fortran, and types derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from . import constants as C
from .exception import MPIError
from .handles import PREDEFINED, Attributes
from .type_layout import TypeLayout, block, spaced, subarray

if TYPE_CHECKING:
    from .comm import Comm


class TypeState:
    """The layout of a datatype, and its constructor with arguments."""

    __slots__ = ("__weakref__", "attributes", "code", "combiner", "layout", "name", "old", "params")

    def __init__(
        self,
        layout: TypeLayout,
        combiner: str = "PREDEFINED",
        old: Datatype | None = None,
        params: dict[str, Any] | None = None,
        *,
        name: str = "",
        code: str = "",
    ) -> None:
        self.layout, self.combiner, self.old, self.params = layout, combiner, old, params or {}
        self.name, self.code = name, code
        self.attributes: dict[int, Any] = {}


_ADDRESSES = {"HVECTOR": {"stride"}, "RESIZED": {"lb", "extent"}}
_BYTES = ("HINDEXED", "HINDEXED_BLOCK", "STRUCT")


class Datatype(Attributes, family=True):
    """The type of a message's elements."""

    __slots__ = ()
    _h: TypeState | None

    @property
    def _state(self) -> TypeState:
        if self._h is None:
            raise MPIError(C.ERR_TYPE, "DATATYPE_NULL", rule="a datatype that exists")
        return self._h

    @property
    def _layout(self) -> TypeLayout:
        return self._state.layout

    def _new(self, layout: TypeLayout, combiner: str, **params: Any) -> Self:
        return type(self)._of(TypeState(layout, combiner, type(self)(self), params))

    # -- sizes --------------------------------------------------------------------------------------------------------

    def Get_size(self) -> int:
        """Bytes of data in one element."""
        return self._layout.size

    def Get_extent(self) -> tuple[int, int]:
        """Lower bound and extent."""
        return self._layout.lb, self._layout.extent

    def Get_true_extent(self) -> tuple[int, int]:
        """True lower bound and true extent: of the data alone."""
        return self._layout.true_lb, self._layout.true_ub - self._layout.true_lb

    size = property(Get_size, doc="Bytes of data in one element.")
    lb = property(lambda self: self._layout.lb, doc="The lower bound.")
    ub = property(lambda self: self._layout.ub, doc="The upper bound.")
    extent = property(lambda self: self._layout.extent, doc="The distance between elements.")
    true_lb = property(lambda self: self._layout.true_lb, doc="The true lower bound.")
    true_ub = property(lambda self: self._layout.true_ub, doc="The true upper bound.")
    true_extent = property(lambda self: self.Get_true_extent()[1], doc="The true extent.")

    # -- constructors -------------------------------------------------------------------------------------------------

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
        cls, blocklengths: Sequence[int], displacements: Sequence[int], datatypes: Sequence[Datatype]
    ) -> Self:
        """Blocks of several types at displacements in bytes."""
        lengths, places = _pairs(blocklengths, displacements)
        if len(lengths) != len(datatypes):
            raise ValueError(f"{len(lengths)} blocks of {len(datatypes)} types: each block needs one type")
        parts = tuple((d, n, t._layout) for d, n, t in zip(places, lengths, datatypes, strict=True))
        params = {"blocklengths": lengths, "displacements": places, "datatypes": [Datatype(t) for t in datatypes]}
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

    def Create_darray(self, *_: Any, **__: Any) -> Self:
        """Not supported: distributed arrays, and Fortran types by precision and range."""
        raise NotImplementedError("not supported: use Create_subarray, or a predefined type")

    Create_f90_integer = Create_f90_real = Create_f90_complex = Create_darray

    @classmethod
    def Get_value_index(cls, value: Datatype, index: Datatype) -> Self:
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

    def Commit(self) -> Self:
        """Commit it; here every type can be used at once."""
        _ = self._state
        return self

    def Free(self) -> None:
        """Free a derived type."""
        if self.is_predefined:
            raise MPIError(C.ERR_TYPE, f"Free of {self._state.name}", rule="predefined types cannot be freed")
        self._delete_attributes()
        self._h = None

    # -- decoding -----------------------------------------------------------------------------------------------------

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        """Numbers of integers, addresses, counts and types of the constructor, and its combiner."""
        state = self._state
        i, a, c, d = ([], [], [], []) if state.combiner == "PREDEFINED" else self.Get_contents()
        return len(i), len(a), len(c), len(d), getattr(C, f"COMBINER_{state.combiner}")

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        """The constructor's integers, addresses, counts and types."""
        state = self._state
        if state.combiner == "PREDEFINED":
            raise MPIError(C.ERR_TYPE, f"contents of {state.name}", rule="predefined types have none")
        integers: list[int] = []
        addresses: list[int] = []
        values = [v for k, v in state.params.items() if k != "datatypes"]
        if any(isinstance(v, list) for v in values):
            integers.append(next(len(v) for v in values if isinstance(v, list)))
        for key, value in state.params.items():
            if key != "datatypes":
                far = key in _ADDRESSES.get(state.combiner, ()) or (key == "displacements" and state.combiner in _BYTES)
                (addresses if far else integers).extend(value if isinstance(value, list) else [value])
        types = state.params.get("datatypes") or [state.old]
        return integers, addresses, [], [Datatype(t) for t in types]

    def decode(self) -> tuple[Datatype, str, dict[str, Any]]:
        """The inner type, the constructor's name and its arguments."""
        state = self._state
        params = {k: list(v) if isinstance(v, list) else v for k, v in state.params.items()}
        if "datatypes" in params:
            params["datatypes"] = [Datatype(t) for t in params["datatypes"]]
        if state.combiner == "PREDEFINED":
            return self, "PREDEFINED", {}
        return Datatype(state.old), state.combiner, params

    envelope = property(Get_envelope, doc="The numbers of the constructor's arguments, and its combiner.")
    contents = property(Get_contents, doc="The constructor's arguments.")
    combiner = property(lambda self: self.Get_envelope()[-1], doc="The combiner.")
    is_named = property(lambda self: self._state.combiner == "PREDEFINED", doc="Whether it is predefined.")
    is_predefined = property(
        lambda self: not self or self._state.combiner == "PREDEFINED", doc="Whether it is predefined."
    )

    def __reduce__(self) -> tuple[Any, ...]:
        if not self or self.is_named:
            return super().__reduce__()
        old, combiner, params = self.decode()
        return (_rebuild, (type(self), old, combiner, params))

    # -- names and codes ----------------------------------------------------------------------------------------------

    def Get_name(self) -> str:
        """Its name."""
        return self._h.name if self._h is not None else "MPI_DATATYPE_NULL"

    def Set_name(self, name: str) -> None:
        """Set its name."""
        self._state.name = name

    name = property(Get_name, Set_name, doc="Its name.")

    def tocode(self) -> str:
        """Its type code in `array` and `struct`."""
        if self._h is None or not self._h.code:
            raise ValueError(f"{self.Get_name() or 'this datatype'} has no type code")
        return self._h.code

    @classmethod
    def fromcode(cls, code: str) -> Self:
        """The type with a type code."""
        from .predefined_types import CODES

        if code not in CODES:
            raise ValueError(f"{code!r} is no type code")
        return cls(CODES[code])

    @property
    def typechar(self) -> str:
        """Its numpy character; V for derived types."""
        scalar = self._layout.scalar
        return scalar.numpy.char if scalar is not None and scalar.numpy is not None else "V"

    @property
    def typestr(self) -> str:
        """Its numpy kind and size."""
        scalar = self._layout.scalar
        if scalar is None or scalar.numpy is None:
            return f"V{self._layout.extent}"
        return f"{scalar.numpy.kind}{scalar.numpy.itemsize}"

    # -- packing ------------------------------------------------------------------------------------------------------

    def Pack_size(self, count: int, comm: Comm) -> int:
        """Bytes of `count` packed elements."""
        return count * self._layout.size

    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: Comm) -> int:
        """Pack elements at a position; returns the end position."""
        from .buffers import parse_message
        from .memory import memory_of

        data = parse_message([inbuf, self], writable=False).data()
        memory_of(outbuf, writable=True)[position : position + len(data)] = data
        return position + len(data)

    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: Comm) -> int:
        """Unpack elements from a position; returns the end position."""
        from .buffers import parse_message
        from .memory import memory_of

        out = parse_message([outbuf, self], writable=True)
        data = memory_of(inbuf, writable=False)[position : position + out.nbytes]
        out.fill(data)
        return position + len(data)

    def Pack_external_size(self, datarep: str, count: int) -> int:
        """Not supported: packing in the external32 format."""
        raise NotImplementedError("external32")


def _whole(n: int) -> int:
    if n < 0:
        raise MPIError(C.ERR_ARG, f"{n} elements", rule="at least 0")
    return int(n)


def _pairs(lengths: Sequence[int], places: Sequence[int]) -> tuple[list[int], list[int]]:
    if len(lengths) != len(places):
        raise ValueError(f"{len(lengths)} blocks at {len(places)} displacements")
    return [_whole(n) for n in lengths], [int(d) for d in places]


def _rebuild(cls: type[Datatype], old: Datatype, combiner: str, params: dict[str, Any]) -> Datatype:
    made: Datatype = getattr(cls if combiner == "STRUCT" else old, f"Create_{combiner.lower()}")(**params)
    return cls(made)
