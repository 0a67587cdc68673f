"""Reduction operators: predefined and user-defined."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch

from ..comm.messaging.transport import bytes_of
from ..comm.operators import Operator
from . import constants as C
from .buffers import MessageBuffer, parse_message
from .byte_buffer import buffer
from .datatype import Datatype
from .exception import MPIError
from .handles import Handle
from .type_layout import TypeLayout

_LIMIT = 32
"""The most user-defined operators at a time, as in mpi4py: an error for programs that forget to free them."""
_living: set[OpState] = set()


class OpState:
    """The definition of an operator."""

    __slots__ = ("__weakref__", "array", "commutes", "function", "kinds", "name", "torch", "user_defined")

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        array: Callable[..., Any] | None = None,
        torch_name: str = "",
        kinds: str = "",
        *,
        user_defined: bool = False,
        commutes: bool = True,
    ) -> None:
        self.name, self.function, self.array, self.torch = name, function, array, torch_name
        self.kinds, self.user_defined, self.commutes = kinds, user_defined, commutes


class Op(Handle, family=True):
    """A reduction operator."""

    __slots__ = ("_by_number",)
    _by_number: bool
    _h: OpState | None

    @property
    def _state(self) -> OpState:
        if self._h is None:
            raise MPIError(C.ERR_OP, "OP_NULL", rule="an operator that exists")
        return self._h

    @classmethod
    def Create(cls, function: Callable[..., Any], commute: bool = False) -> Self:
        """An operator of `function(inbuf, inoutbuf, datatype)`, which writes its result to the second buffer."""
        if len(_living) >= _LIMIT:
            raise RuntimeError(f"{_LIMIT} operators are in use: free those that are no longer needed")
        state = OpState(getattr(function, "__name__", "function"), function, user_defined=True, commutes=bool(commute))
        _living.add(state)
        return cls._of(state)

    def Free(self) -> None:
        """Free a user-defined operator."""
        if not self._state.user_defined:
            raise MPIError(C.ERR_OP, f"Free of {self._state.name}", rule="predefined operators cannot be freed")
        _living.discard(self._state)
        self._h = None

    def Is_commutative(self) -> bool:
        """Whether operands may be reordered."""
        return self._state.commutes

    is_commutative = property(Is_commutative, doc="Whether operands may be reordered.")
    is_predefined = property(lambda self: self._h is None or not self._h.user_defined, doc="Whether it is predefined.")

    def __call__(self, x: Any, y: Any) -> Any:
        if self._h is None:
            raise ValueError("OP_NULL computes nothing")
        return self._h.function(x, y, None) if self._h.user_defined else self._h.function(x, y)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._h is not None and self._h.user_defined and not hasattr(self, "_by_number"):
            return (_rebuild, (type(self), self._h.function, self._h.commutes))
        return super().__reduce__()

    @classmethod
    def fromhandle(cls, handle: int) -> Self:
        """The operator with a number; it cannot be pickled, because its function is unknown elsewhere."""
        op = super().fromhandle(handle)
        if op and op._state.user_defined:
            op._by_number = True
        return op

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Reduce two local buffers: the second becomes `first op second`."""
        a, b = parse_message(inbuf, writable=False), parse_message(inoutbuf, writable=True)
        if a.count != b.count or a.type != b.type:
            raise ValueError(
                f"message: {a.count} of {a.type.Get_name()} and {b.count} of {b.type.Get_name()}: both must be equal"
            )
        check_type(self, b)
        combine(self, b.type)(a.raw(), b.raw())
        b.flush()


def _rebuild(cls: type[Op], function: Callable[..., Any], commutes: bool) -> Op:
    return cls.Create(function, commutes)


# -- buffers ----------------------------------------------------------------------------------------------------------


def combine(op: Op, kind: Datatype) -> Callable[[memoryview, memoryview], None]:
    """A function (a, b) on raw memory: b becomes `a op b`."""
    state, layout = op._state, kind._layout
    if state.user_defined:
        return lambda a, b: state.function(buffer(a), buffer(b), kind) and None
    scalar = layout.uniform_scalar
    assert scalar is not None, "checked by check_type"
    if scalar.numpy is None:  # torch has types that numpy lacks
        return _by_torch(state.torch, scalar.torch)
    array, dtype = state.array, scalar.numpy
    assert array is not None

    def on_arrays(a: memoryview, b: memoryview) -> None:
        into = np.frombuffer(b, dtype=dtype)
        with np.errstate(all="ignore"):  # overflow is silent, as in C
            into[...] = array(np.frombuffer(a, dtype=dtype), into)

    return on_arrays


def _by_torch(name: str, dtype: torch.dtype | None) -> Callable[[memoryview, memoryview], None]:
    from ..comm.operators import reduction

    assert dtype is not None
    into = reduction(name, dtype).into

    def on_tensors(a: memoryview, b: memoryview) -> None:
        if len(b):
            second = torch.frombuffer(b, dtype=dtype)
            into(torch.frombuffer(bytearray(a), dtype=dtype), second, second)

    return on_tensors


def tensor_operator(op: Op, region: MessageBuffer) -> tuple[torch.dtype, str | Operator]:
    """(dtype, operator) of a reduction on tensors: by name if torch has the type, else on groups of bytes."""
    check_type(op, region)
    state, layout = op._state, region.layout
    scalar = layout.uniform_scalar
    if not state.user_defined and layout.dense and scalar is not None and scalar.torch is not None and state.torch:
        return scalar.torch, state.torch
    return torch.uint8, _on_bytes(state, region.type._state.layout, region.type)


def _on_bytes(state: OpState, layout: TypeLayout, kind: Datatype) -> Operator:
    step = combine(Op._of(state), kind)

    def function(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        result = second.clone()
        step(_view(first.contiguous()), _view(result))
        return result

    return Operator(function, commutes=state.commutes, unit=max(1, layout.extent), name=state.name)


def _view(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor)


_KIND_NAMES = {
    "i": "integers",
    "u": "integers",
    "f": "floating-point numbers",
    "c": "complex numbers",
    "b": "booleans",
    "B": "bytes",
    "2": "pairs of value and index",
}


def check_type(op: Op, region: MessageBuffer) -> None:
    """Refuse an operator that is not defined for a type."""
    state, scalar = op._state, region.layout.uniform_scalar
    if state.user_defined:
        return
    gaps = not region.layout.dense and region.layout.scalar is None
    if region.count and (scalar is None or scalar.kind not in state.kinds or gaps):
        name = region.type.Get_name() or "a derived datatype"
        takes = ", ".join(dict.fromkeys(_KIND_NAMES[k] for k in state.kinds if k in _KIND_NAMES))
        raise MPIError(
            C.ERR_OP, f"{state.name} of {name}", rule=f"{state.name} takes {takes}", fix="another type, or Op.Create"
        )


# -- predefined operators ---------------------------------------------------------------------------------------------


def _first_or_second(better: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    """Of two (value, index) pairs the better value; for equal values the lower index."""

    def choose(x: Any, y: Any) -> Any:
        if better(x[0], y[0]):
            return x
        if better(y[0], x[0]):
            return y
        return x if x[1] <= y[1] else y

    return choose


def _locate(better: Callable[..., Any]) -> Callable[..., Any]:
    def choose(a: Any, b: Any) -> Any:
        same = a["value"] == b["value"]
        first = better(a["value"], b["value"]) | (same & (a["index"] <= b["index"]))
        return np.where(first, a, b)

    return choose


def _define(
    name: str,
    function: Callable[..., Any],
    array: Callable[..., Any],
    torch_name: str,
    kinds: str,
    commutes: bool = True,
) -> Op:
    return Op._constant(name, OpState(name, function, array, torch_name, kinds, commutes=commutes))


OP_NULL = Op._constant("OP_NULL")
MAX = _define("MAX", lambda x, y: x if not y > x else y, np.maximum, "max", "iufB")
MIN = _define("MIN", lambda x, y: x if not y < x else y, np.minimum, "min", "iufB")
SUM = _define("SUM", operator.add, np.add, "sum", "iufcB")
PROD = _define("PROD", operator.mul, np.multiply, "product", "iufcB")
LAND = _define("LAND", lambda x, y: bool(x) & bool(y), np.logical_and, "land", "iubB")
LOR = _define("LOR", lambda x, y: bool(x) | bool(y), np.logical_or, "lor", "iubB")
LXOR = _define("LXOR", lambda x, y: bool(x) ^ bool(y), np.logical_xor, "lxor", "iubB")
BAND = _define("BAND", operator.and_, np.bitwise_and, "band", "iubB")
BOR = _define("BOR", operator.or_, np.bitwise_or, "bor", "iubB")
BXOR = _define("BXOR", operator.xor, np.bitwise_xor, "bxor", "iubB")
MAXLOC = _define("MAXLOC", _first_or_second(operator.gt), _locate(np.greater), "", "2")
MINLOC = _define("MINLOC", _first_or_second(operator.lt), _locate(np.less), "", "2")
REPLACE = _define("REPLACE", lambda x, y: y, lambda a, b: b, "", "iufcbB2SU", commutes=False)
NO_OP = _define("NO_OP", lambda x, y: x, lambda a, b: a, "", "iufcbB2SU", commutes=False)
