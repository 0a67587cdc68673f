"""Reduction operators: the named ones, and any function of two tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import InputError, nearest

BinaryFunction = Callable[[Tensor, Tensor], Tensor]
ReduceInto = Callable[[Tensor, Tensor, Tensor], None]
"""(first, second, out): out may alias either operand."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A binary function on tensors of one shape, for reductions: `comm.all_reduce(t, op=Operator(torch.fmax))`."""

    function: BinaryFunction
    """Associative; takes operands of shape (k,) or (k, unit) and returns a tensor of that shape."""
    commutes: bool = True
    """Whether operands may be reordered; if not, only algorithms that keep the rank order run."""
    unit: int = 1
    """Elements that are never split between chunks, such as 4 for packed 2 x 2 matrices."""
    name: str = ""

    def __post_init__(self) -> None:
        if self.unit < 1:
            raise InputError(f"an operator of {self.unit} elements at a time", rule="unit >= 1")

    def __str__(self) -> str:
        return self.name or getattr(self.function, "__qualname__", repr(self.function))

    def into(self, first: Tensor, second: Tensor, out: Tensor) -> None:
        """Compute and write the result to `out`."""
        if self.unit > 1:
            first, second, out = (t.view(-1, self.unit) for t in (first, second, out))
        result = self.function(first, second)
        if result.shape != out.shape or result.dtype != out.dtype:
            raise InputError(
                f"operator {self} made {dtype_name(result.dtype)} {tuple(result.shape)} "
                f"of two {dtype_name(out.dtype)} {tuple(out.shape)}",
                rule="an operator keeps shape and type",
            )
        out.copy_(result)


@dataclass(frozen=True, slots=True)
class Reduction:
    """An operator, resolved for one dtype, as the executor runs it."""

    name: str
    into: ReduceInto
    commutes: bool = True
    unit: int = 1
    named: bool = False
    """Whether it is one of OPERATORS, which transports may support natively."""
    mean: bool = False
    """Whether the result is divided by the number of ranks at the end."""


def _by_torch(function: Callable[..., Tensor]) -> ReduceInto:
    def into(first: Tensor, second: Tensor, out: Tensor) -> None:
        function(first, second, out=out)

    return into


_NUMBERS, _ORDERED, _INTEGRAL = "numbers", "ordered numbers", "integers and booleans"
_KINDS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "sum": (torch.add, _NUMBERS),
    "product": (torch.mul, _NUMBERS),
    "max": (torch.maximum, _ORDERED),
    "min": (torch.minimum, _ORDERED),
    "avg": (torch.add, "floating-point numbers"),
    "land": (torch.logical_and, _NUMBERS),
    "lor": (torch.logical_or, _NUMBERS),
    "lxor": (torch.logical_xor, _NUMBERS),
    "band": (torch.bitwise_and, _INTEGRAL),
    "bor": (torch.bitwise_or, _INTEGRAL),
    "bxor": (torch.bitwise_xor, _INTEGRAL),
}
OPERATORS = tuple(_KINDS)
"""The named operators."""

_INTO = {name: _by_torch(function) for name, (function, _) in _KINDS.items()}
# torch has few operators for these three: compute on the signed type with the same bits
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SIGNED)
_ALLOWED = {
    _NUMBERS: {*_FLOATS, *_COMPLEX, *_INTEGERS},
    _ORDERED: {*_FLOATS, *_INTEGERS},
    _INTEGRAL: set(_INTEGERS),
    "floating-point numbers": {*_FLOATS, *_COMPLEX},
}


def reduction(op: str | Operator | BinaryFunction, dtype: torch.dtype) -> Reduction:
    """Resolve an operator for a dtype; refuse it if the dtype does not support it."""
    if isinstance(op, Operator):
        return Reduction(str(op), op.into, op.commutes, op.unit)
    if not isinstance(op, str):
        if callable(op):
            return reduction(Operator(op), dtype)
        raise InputError(f"the operator {op!r}", rule="a name, an Operator or a function of two tensors")
    if op not in _KINDS:
        raise InputError(f"unknown operator {op!r}", rule=f"known: {', '.join(_KINDS)}", fix=nearest(op, _KINDS))
    kind = _KINDS[op][1]
    if dtype not in _ALLOWED[kind]:
        raise InputError(
            f"{op} of {dtype_name(dtype)}", rule=f"{op} takes {kind}", fix="convert the tensor, or give an Operator"
        )
    into = _unsigned(op, _SIGNED[dtype]) if dtype in _SIGNED else _INTO[op]
    return Reduction(op, into, named=True, mean=op == "avg")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` of torch.float32."""
    return str(dtype).removeprefix("torch.")


def _unsigned(op: str, signed: torch.dtype) -> ReduceInto:
    """Compute on the signed type with the same bits; max and min flip the top bit to get the order right."""
    function = _KINDS[op][0]
    if op not in ("max", "min"):
        return lambda first, second, out: _INTO[op](first.view(signed), second.view(signed), out.view(signed))
    top = torch.iinfo(signed).min

    def into(first: Tensor, second: Tensor, out: Tensor) -> None:
        torch.bitwise_xor(function(first.view(signed) ^ top, second.view(signed) ^ top), top, out=out.view(signed))

    return into
