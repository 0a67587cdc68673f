"""Forward and backward of one stage: the backward all at once, or inputs first and weights later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...core.errors import PlanError
from ...partition.stage import Stage, StageProgram
from ...partition.weight_gradients import DeferredWeightGradients


class StagePass:
    """One micro-batch in one stage, from its forward to its last backward.

    Keeps the outputs' edges in the autograd graph, not the outputs: once sent they may be freed.
    """

    def __init__(self, stage: Stage, inputs: Sequence[torch.Tensor], *, split: bool) -> None:
        if split and not isinstance(stage.module, StageProgram):
            raise PlanError(
                f"stage {stage.index} runs a {type(stage.module).__name__}",
                rule="an order with W actions needs stages that were cut from a graph",
                fix="schedule=1f1b, or cut the stages from a captured graph",
            )
        self._stage, self._inputs = stage, list(inputs)
        self._deferred = DeferredWeightGradients() if split else None
        self._edges: dict[int, GradientEdge] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Run the stage; returns its outputs."""
        module = self._stage.module
        assert module is not None, f"stage {self._stage.index} is on another rank"
        if self._deferred is None:
            outputs = module(*self._inputs)
        else:
            with self._deferred.recording():
                outputs = module(*self._inputs)
        for k, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                self._edges[k] = get_gradient_edge(output)
        return tuple(outputs)

    def backward(self, gradients: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of the inputs from those of the outputs; weights get theirs too, or later by `weight_gradients`."""
        known = {k: g for k, g in gradients.items() if k in self._edges}
        if self._deferred is None:
            if known:
                torch.autograd.backward([self._edges[k] for k in known], list(known.values()))
            gradients_in = [x.grad for x in self._inputs]
            self._release()
            return gradients_in
        self._gradients = known
        gradients_in = self._input_gradients()
        self._deferred.release_input_only()
        return gradients_in

    def _input_gradients(self) -> list[torch.Tensor | None]:
        wanted = [x for x in self._inputs if x.requires_grad]
        if not wanted or not self._gradients:
            return [None] * len(self._inputs)
        roots = [self._edges[k] for k in self._gradients]
        results = torch.autograd.grad(
            roots, wanted, list(self._gradients.values()), retain_graph=True, allow_unused=True
        )
        by_input = dict(zip(map(id, wanted), results, strict=True))
        return [by_input.get(id(x)) for x in self._inputs]

    def weight_gradients(self) -> None:
        """Compute the gradients of the weights, which `backward` deferred."""
        assert self._deferred is not None
        edges = [self._edges[k] for k in self._gradients]
        values, gradients = self._deferred.backward(edges, list(self._gradients.values()))
        roots = [get_gradient_edge(value) for value in values]
        for k, gradient in self._gradients.items():
            if k in self._stage.weights_only:
                roots.append(self._edges[k])
                gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, gradients)
        self._release()

    def _release(self) -> None:
        self._inputs.clear()
        self._edges.clear()
        self._gradients = {}
