"""The base of datatypes: their state, and their sizes."""

from __future__ import annotations

from typing import Any, Self

from . import constants as C
from .attributes import Attributes
from .exception import MPIError
from .type_layout import TypeLayout


class TypeState:
    """The layout of a datatype, and its constructor with arguments."""

    __slots__ = ("__weakref__", "attributes", "code", "combiner", "layout", "name", "old", "params")

    def __init__(
        self,
        layout: TypeLayout,
        combiner: str = "NAMED",
        old: DatatypeBase | None = None,
        params: dict[str, Any] | None = None,
        *,
        name: str = "",
        code: str = "",
    ) -> None:
        self.layout, self.combiner, self.old, self.params = layout, combiner, old, params or {}
        self.name, self.code = name, code
        self.attributes: dict[int, Any] = {}


class DatatypeBase(Attributes):
    """A datatype's state and sizes."""

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
