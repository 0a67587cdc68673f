"""Tensors of an old graph as one rank has them in a new one, and how they stand among an operator's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .layout import Layout, Split


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor of the old graph, as this rank has it in the new one."""

    node: Node
    """In the new graph; its meta["val"] has the local shape."""
    layout: Layout
    whole: torch.Size

    @property
    def split(self) -> Split:
        """Its split, where it has one."""
        assert self.layout is not None
        return self.layout

    @property
    def fake(self) -> torch.Tensor:
        """Its local shape and type."""
        val = self.node.meta["val"]
        assert isinstance(val, torch.Tensor)
        return val

    @property
    def dim(self) -> int:
        """How many dims it has."""
        return len(self.whole)


def filled(args: Any, values: Mapping[Node, Any]) -> Any:
    """A node's arguments, with what stands for each node in its place."""
    slot: Any = lambda n: _Slot(values[n])  # noqa: E731  # fx types it too narrowly
    return _open(map_arg(args, slot))


def each(args: Any, do: Callable[[Value], Any]) -> Any:
    """Arguments, with every value among them replaced."""
    if isinstance(args, Value):
        return do(args)
    if isinstance(args, tuple | list):
        return tuple(each(a, do) for a in args) if isinstance(args, tuple) else [each(a, do) for a in args]
    if isinstance(args, dict):
        return {k: each(a, do) for k, a in args.items()}
    return args


def nodes_of(args: Any) -> Any:
    """Values -> their nodes."""
    return each(args, lambda v: v.node)


def values_in(args: Any) -> list[Value]:
    """All values among arguments."""
    found: list[Value] = []
    each(args, found.append)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Keeps fx from walking into a Value."""

    value: Any


def _open(args: Any) -> Any:
    if isinstance(args, _Slot):
        return args.value
    if isinstance(args, tuple | list):
        return type(args)(_open(a) for a in args) if type(args) in (tuple, list) else tuple(_open(a) for a in args)
    if isinstance(args, dict):
        return {k: _open(a) for k, a in args.items()}
    return args
