"""The schema of an operator: its arguments, which of them it writes, and the name of its overload.

Written for torch 2.13. Missing public API: an operator gives its schema and the name of its overload only by private
attributes (`overloadpacket` is public).
"""

from __future__ import annotations

from typing import Any

__all__ = ["argument_names", "overload_name", "schema_of", "schema_or_none", "writes_in_place"]


def schema_of(operator: Any) -> Any:
    """The schema of an operator: `name`, `arguments`, `returns`, `is_mutable`."""
    return operator._schema


def schema_or_none(target: Any) -> Any:
    """The schema of a graph node's target; None for Python functions, which have none."""
    return getattr(target, "_schema", None)


def argument_names(operator: Any) -> list[str]:
    """The names of an operator's arguments, in order."""
    return [argument.name for argument in operator._schema.arguments]


def overload_name(operator: Any) -> str:
    """`Tensor` of `aten.add.Tensor`."""
    return str(operator._overloadname)


def writes_in_place(operator: Any) -> bool:
    """Whether an operator writes into one of its arguments."""
    return bool(operator._schema.is_mutable)
