"""Operators of reductions: predefined, and made of a function."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch

from ..comm.mail.transport import bytes_of
from ..comm.ops import Operator
from . import constants as C
from .buffers import Spot, simple
from .datatype import Datatype
from .exception import MPIError
from .handle import Handle
from .layout import Layout
from .memory import buffer

_LIMIT = 32
"""How many made operators may live at once, as mpi4py has it: a program that forgets to free them is told."""
_living: set[OpState] = set()


class OpState:
    """An operator."""

    __slots__ = ("__weakref__", "array", "commutes", "function", "kinds", "made", "name", "torch")

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        array: Callable[..., Any] | None = None,
        torch_name: str = "",
        kinds: str = "",
        *,
        made: bool = False,
        commutes: bool = True,
    ) -> None:
        self.name, self.function, self.array, self.torch = name, function, array, torch_name
        self.kinds, self.made, self.commutes = kinds, made, commutes


class Op(Handle, family=True):
    """How two contributions become one."""

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
        """An operator of `function(inbuf, inoutbuf, datatype)`, which leaves its result in the second buffer."""
        if len(_living) >= _LIMIT:
            raise RuntimeError(f"{_LIMIT} operators are in use: free those that are not needed any more")
        state = OpState(getattr(function, "__name__", "function"), function, made=True, commutes=bool(commute))
        _living.add(state)
        return cls._of(state)

    def Free(self) -> None:
        """Let go of an operator that was made."""
        if not self._state.made:
            raise MPIError(C.ERR_OP, f"Free of {self._state.name}", rule="predefined operators stay")
        _living.discard(self._state)
        self._h = None

    def Is_commutative(self) -> bool:
        """Whether the order of ranks may change."""
        return self._state.commutes

    is_commutative = property(Is_commutative, doc="Whether the order of ranks may change.")
    is_predefined = property(lambda self: self._h is None or not self._h.made, doc="Whether it was not made.")

    def __call__(self, x: Any, y: Any) -> Any:
        if self._h is None:
            raise ValueError("OP_NULL computes nothing")
        return self._h.function(x, y, None) if self._h.made else self._h.function(x, y)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._h is not None and self._h.made and not hasattr(self, "_by_number"):
            return (_rebuild, (type(self), self._h.function, self._h.commutes))
        return super().__reduce__()

    @classmethod
    def fromhandle(cls, handle: int) -> Self:
        """The operator of a number; a number does not say what function to send along."""
        made = super().fromhandle(handle)
        if made and made._state.made:
            made._by_number = True
        return made

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Combine two buffers of this rank: the second becomes `first op second`."""
        a, b = simple(inbuf, writable=False), simple(inoutbuf, writable=True)
        if a.count != b.count or a.type != b.type:
            raise ValueError(
                f"message: {a.count} of {a.type.Get_name()} and {b.count} of {b.type.Get_name()}: both sides alike"
            )
        check_type(self, b)
        combine(self, b.type)(a.raw(), b.raw())
        b.flush()


def _rebuild(cls: type[Op], function: Callable[..., Any], commutes: bool) -> Op:
    return cls.Create(function, commutes)


# -- on buffers -------------------------------------------------------------------------------------------------


def combine(op: Op, kind: Datatype) -> Callable[[memoryview, memoryview], None]:
    """`function(a, b)` on raw memory: b becomes `a op b`."""
    state, layout = op._state, kind._layout
    if state.made:
        return lambda a, b: state.function(buffer(a), buffer(b), kind) and None
    basic = layout.alike
    assert basic is not None, "check_type has seen to it"
    if basic.numpy is None:  # torch has types that numpy has not
        return _by_torch(state.torch, basic.torch)
    array, dtype = state.array, basic.numpy
    assert array is not None

    def on_arrays(a: memoryview, b: memoryview) -> None:
        into = np.frombuffer(b, dtype=dtype)
        with np.errstate(all="ignore"):  # numbers that run over do so silently, as in C
            into[...] = array(np.frombuffer(a, dtype=dtype), into)

    return on_arrays


def _by_torch(name: str, dtype: torch.dtype | None) -> Callable[[memoryview, memoryview], None]:
    from ..comm.ops import reduction

    assert dtype is not None
    into = reduction(name, dtype).into

    def on_tensors(a: memoryview, b: memoryview) -> None:
        if len(b):
            second = torch.frombuffer(b, dtype=dtype)
            into(torch.frombuffer(bytearray(a), dtype=dtype), second, second)

    return on_tensors


def plan(op: Op, spot: Spot) -> tuple[torch.dtype, str | Operator]:
    """How a reduction runs on tensors: by name where torch knows the type, else on bytes that stay together."""
    check_type(op, spot)
    state, layout = op._state, spot.layout
    basic = layout.alike
    if not state.made and layout.dense and basic is not None and basic.torch is not None and state.torch:
        return basic.torch, state.torch
    return torch.uint8, _on_bytes(state, spot.type._state.layout, spot.type)


def _on_bytes(state: OpState, layout: Layout, kind: Datatype) -> Operator:
    step = combine(Op._of(state), kind)

    def function(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        result = second.clone()
        step(_view(first.contiguous()), _view(result))
        return result

    return Operator(function, commutes=state.commutes, unit=max(1, layout.extent), name=state.name)


def _view(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor)


_WORDS = {
    "i": "whole numbers",
    "u": "whole numbers",
    "f": "numbers with fractions",
    "c": "complex numbers",
    "b": "truth values",
    "B": "bytes",
    "2": "pairs of value and index",
}


def check_type(op: Op, spot: Spot) -> None:
    """Refuse an operator that means nothing for a type."""
    state, basic = op._state, spot.layout.alike
    if state.made:
        return
    gaps = not spot.layout.dense and spot.layout.basic is None
    if spot.count and (basic is None or basic.kind not in state.kinds or gaps):
        name = spot.type.Get_name() or "a made datatype"
        takes = ", ".join(dict.fromkeys(_WORDS[k] for k in state.kinds if k in _WORDS))
        raise MPIError(
            C.ERR_OP, f"{state.name} of {name}", rule=f"{state.name} takes {takes}", fix="another type, or Op.Create"
        )


# -- the predefined ones ----------------------------------------------------------------------------------------


def _first_or_second(better: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    """Of two pairs the better value; of equal ones the lower index."""

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
