"""Datatypes: the scalar types of C and Fortran, and types derived from them."""

from __future__ import annotations

from typing import Any, Self

from . import constants as C
from .exception import MPIError
from .packing import TypePacking
from .type_constructors import TypeConstructors

_ADDRESSES = {"HVECTOR": {"stride"}, "RESIZED": {"lb", "extent"}}
_BYTES = ("HINDEXED", "HINDEXED_BLOCK", "STRUCT")


class Datatype(TypeConstructors, TypePacking, family=True):
    """The type of a message's elements."""

    __slots__ = ()

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
        i, a, c, d = ([], [], [], []) if state.combiner == "NAMED" else self.Get_contents()
        return len(i), len(a), len(c), len(d), getattr(C, f"COMBINER_{state.combiner}")

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        """The constructor's integers, addresses, counts and types."""
        state = self._state
        if state.combiner == "NAMED":
            raise MPIError(C.ERR_TYPE, f"contents of {state.name}", rule="predefined types have none")
        integers: list[int] = []
        addresses: list[int] = []
        for key, value in state.params.items():
            if key != "datatypes":
                far = key in _ADDRESSES.get(state.combiner, ()) or (key == "displacements" and state.combiner in _BYTES)
                (addresses if far else integers).extend(value if isinstance(value, list) else [value])
        lists = [v for k, v in state.params.items() if k != "datatypes" and isinstance(v, list)]
        if lists:  # the length of the lists comes first, after size and rank
            integers.insert(2 if state.combiner == "DARRAY" else 0, len(lists[0]))
        types = state.params.get("datatypes") or ([] if state.old is None else [state.old])
        return integers, addresses, [], [Datatype(t) for t in types]

    def decode(self) -> tuple[Datatype, str, dict[str, Any]]:
        """The inner type (null if there is none or several), the constructor's name and its arguments."""
        state = self._state
        if state.combiner == "NAMED":
            return self, "NAMED", {}
        params = {k: list(v) if isinstance(v, list) else v for k, v in state.params.items()}
        if "datatypes" in params:
            params["datatypes"] = [Datatype(t) for t in params["datatypes"]]
        return Datatype(state.old), state.combiner, params

    envelope = property(Get_envelope, doc="The numbers of the constructor's arguments, and its combiner.")
    contents = property(Get_contents, doc="The constructor's arguments.")
    combiner = property(lambda self: self.Get_envelope()[-1], doc="The combiner.")
    is_named = property(lambda self: self._state.combiner == "NAMED", doc="Whether it has a name of MPI.")
    is_predefined = property(
        lambda self: not self or self._state.combiner == "NAMED" or self._state.combiner.startswith("F90"),
        doc="Whether it is predefined.",
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


def _rebuild(cls: type[Datatype], old: Datatype, combiner: str, params: dict[str, Any]) -> Datatype:
    made: Datatype = getattr(old or cls, f"Create_{combiner.lower()}")(**params)
    return cls(made)
