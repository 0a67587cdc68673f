"""Gradients of weights that wait: a backward that gives a stage's input gradients first, and the weights' later.

The cut marks every operator that reads both a value that comes from the stage's inputs and one that comes from
parameters alone. While a `Deferred` records, such an operator reads a leaf in place of the parameter, one leaf for each
use. The backward for the inputs notes the gradient of the operator's result; later the gradient of the leaf is found
from it, through this one operator, and goes on to the parameter. So nothing is computed twice, however often a
parameter is used; and what other operators have saved is let go as soon as the inputs have their gradients.
(torch.distributed.pipelining walks the autograd graph instead. There, as of torch 2.13, a stage without differentiable
inputs gets no gradients of its weights, and a parameter that is used twice, or an output that is a view, is an error.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

_RECORDING: ContextVar[Deferred | None] = ContextVar("deferred", default=None)

_Cell = list[torch.Tensor | None]
"""What holds a tensor that autograd has saved."""


@dataclass(eq=False)
class _Use:
    """One operator that reads parameters: its results, and the leaves that it read."""

    edges: list[GradientEdge] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    """Of the results. The hooks hold this list alone: with the edges too, they would keep the graph alive for good."""
    hooks: list[RemovableHandle] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)

    def leaf_gradients(self) -> list[torch.Tensor | None]:
        """Through this operator alone: nothing else reads its leaves."""
        known = [(e, g) for e, g in zip(self.edges, self.gradients, strict=True) if g is not None]
        edges, gradients = zip(*known, strict=True)
        return list(torch.autograd.grad(edges, self.leaves, gradients, allow_unused=True))


class Deferred:
    """The uses of parameters in one forward of a stage, until their gradients are computed."""

    def __init__(self) -> None:
        self._uses: list[_Use] = []
        self.loose = False
        """Whether what is saved now is for the inputs' gradients alone."""
        self._cells: list[_Cell] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the forward."""
        token = _RECORDING.set(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._saved, _read):
                yield
        finally:
            _RECORDING.reset(token)

    def _saved(self, tensor: torch.Tensor) -> _Cell:
        cell: _Cell = [tensor]
        if self.loose:
            self._cells.append(cell)
        return cell

    def inputs_are_done(self) -> None:
        """After the first backward: let go what the second one does not read."""
        if not self._passed():
            for cell in self._cells:
                cell[0] = None
        self._cells.clear()

    def _passed(self) -> list[_Use]:
        """Operators that the first backward did not come by: no input lies behind them, or nobody reads them."""
        return [u for u in self._uses if all(g is None for g in u.gradients)]

    def add(self, results: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """An operator has read leaves in place of values."""
        read = [(value, leaf) for value, leaf in pairs if leaf is not value]
        made = [r for r in _tensors(results) if r.requires_grad]
        if not read or not made:
            return
        use = _Use(values=[v for v, _ in read], leaves=[leaf for _, leaf in read])
        for i, result in enumerate(made):
            use.edges.append(get_gradient_edge(result))
            use.gradients.append(None)
            use.hooks.append(result.register_hook(_noting(use.gradients, i)))
        self._uses.append(use)

    def backward(
        self, roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Values that come from parameters, and their gradients; `roots` are the stage's outputs."""
        for use in self._uses:
            for hook in use.hooks:
                hook.remove()
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        passed = self._passed()
        if passed and roots:
            leaves = [leaf for u in passed for leaf in u.leaves]
            late = torch.autograd.grad(roots, leaves, gradients, allow_unused=True, retain_graph=True)
            found += zip((v for u in passed for v in u.values), late, strict=True)
        for use in reversed(self._uses):
            if any(g is not None for g in use.gradients):
                found += zip(use.values, use.leaf_gradients(), strict=True)
        self._uses.clear()
        return [v for v, g in found if g is not None], [g for _, g in found if g is not None]


def leaf_of(value: torch.Tensor) -> torch.Tensor:
    """What an operator reads in place of a value that comes from parameters."""
    if _RECORDING.get() is None or not value.requires_grad or not torch.is_grad_enabled():
        return value
    return value.detach().requires_grad_()


def mark(loose: bool) -> None:
    """Before operators that read no parameters but only what comes from inputs, and behind them."""
    deferred = _RECORDING.get()
    if deferred is not None:
        deferred.loose = loose


def watch(results: Any, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """After an operator that read leaves."""
    deferred = _RECORDING.get()
    if deferred is not None:
        deferred.add(results, pairs)


def _read(cell: _Cell) -> torch.Tensor:
    assert cell[0] is not None, "a saved tensor was let go too early"
    return cell[0]


def _noting(gradients: list[torch.Tensor | None], i: int) -> Any:
    def note(gradient: torch.Tensor) -> None:
        gradients[i] = gradient

    return note


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
