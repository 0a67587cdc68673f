"""Split backward: a stage's input gradients first, the gradients of its weights later.

The graph of a stage marks every operator that reads both a value derived from the stage's inputs and one derived from
parameters alone. While a `DeferredWeightGradients` records, such an operator reads a leaf instead of the parameter, one
leaf per use. The backward for the inputs saves the gradient of the operator's result; later the leaf's gradient is
computed from it, through this one operator, and passed on to the parameter. So nothing is computed twice, however often
a parameter is used, and tensors saved by other operators are freed as soon as the inputs have their gradients.
(torch.distributed.pipelining walks the autograd graph instead. There, as of torch 2.13, a stage without differentiable
inputs gets no weight gradients, and a parameter used twice, or an output that is a view, is an error.)
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

_RECORDING: ContextVar[DeferredWeightGradients | None] = ContextVar("deferred", default=None)

_Cell = list[torch.Tensor | None]
"""A cell for a tensor that autograd has saved."""


@dataclass(eq=False)
class _Use:
    """One operator that reads parameters: its results, and the leaves that it read."""

    edges: list[GradientEdge] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    """Gradients of the results. The hooks reference this list alone: with the edges too, they would keep the graph
    alive."""
    hooks: list[RemovableHandle] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)

    def leaf_gradients(self) -> list[torch.Tensor | None]:
        """Gradients of the leaves, through this operator alone: nothing else reads them."""
        known = [(e, g) for e, g in zip(self.edges, self.gradients, strict=True) if g is not None]
        edges, gradients = zip(*known, strict=True)
        return list(torch.autograd.grad(edges, self.leaves, gradients, allow_unused=True))


class DeferredWeightGradients:
    """The uses of parameters in one forward of a stage, until their gradients are computed."""

    def __init__(self) -> None:
        self._uses: list[_Use] = []
        self.input_only = False
        """Whether tensors saved now serve the inputs' gradients alone."""
        self._cells: list[_Cell] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the forward inside."""
        token = _RECORDING.set(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._saved, _read):
                yield
        finally:
            _RECORDING.reset(token)

    def _saved(self, tensor: torch.Tensor) -> _Cell:
        cell: _Cell = [tensor]
        if self.input_only:
            self._cells.append(cell)
        return cell

    def release_input_only(self) -> None:
        """After the first backward: free tensors that the second one does not read."""
        if not self._unreached():
            for cell in self._cells:
                cell[0] = None
        self._cells.clear()

    def _unreached(self) -> list[_Use]:
        """Operators that the first backward did not reach: no input precedes them, or their results are not read."""
        return [u for u in self._uses if all(g is None for g in u.gradients)]

    def add(self, results: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Record that an operator has read leaves instead of values."""
        read = [(value, leaf) for value, leaf in pairs if leaf is not value]
        outputs = [r for r in _tensors(results) if r.requires_grad]
        if not read or not outputs:
            return
        use = _Use(values=[v for v, _ in read], leaves=[leaf for _, leaf in read])
        for i, result in enumerate(outputs):
            use.edges.append(get_gradient_edge(result))
            use.gradients.append(None)
            use.hooks.append(result.register_hook(_store_gradient(use.gradients, i)))
        self._uses.append(use)

    def backward(
        self, roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Values derived from parameters, and their gradients; `roots` are the stage's outputs."""
        for use in self._uses:
            for hook in use.hooks:
                hook.remove()
        pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        unreached = self._unreached()
        if unreached and roots:
            leaves = [leaf for u in unreached for leaf in u.leaves]
            late = torch.autograd.grad(roots, leaves, gradients, allow_unused=True, retain_graph=True)
            pairs += zip((v for u in unreached for v in u.values), late, strict=True)
        for use in reversed(self._uses):
            if any(g is not None for g in use.gradients):
                pairs += zip(use.values, use.leaf_gradients(), strict=True)
        self._uses.clear()
        return [v for v, g in pairs if g is not None], [g for _, g in pairs if g is not None]


def detached_leaf(value: torch.Tensor) -> torch.Tensor:
    """A leaf to read instead of a value derived from parameters."""
    if _RECORDING.get() is None or not value.requires_grad or not torch.is_grad_enabled():
        return value
    return value.detach().requires_grad_()


def mark_input_only(value: bool) -> None:
    """Mark whether the next operators read only values derived from inputs."""
    deferred = _RECORDING.get()
    if deferred is not None:
        deferred.input_only = value


def record_use(results: Any, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Record an operator that has read leaves."""
    deferred = _RECORDING.get()
    if deferred is not None:
        deferred.add(results, pairs)


def _read(cell: _Cell) -> torch.Tensor:
    assert cell[0] is not None, "a saved tensor was freed too early"
    return cell[0]


def _store_gradient(gradients: list[torch.Tensor | None], i: int) -> Any:
    def store(gradient: torch.Tensor) -> None:
        gradients[i] = gradient

    return store


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
