"""Forwards and backwards of this rank's stages of a pipeline, and the values that pass between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...core.errors import PlanError
from ...partition.stage import BatchInput, Port, StagedGraph, StageInput
from ...schedules.pipeline import Action
from .channels import PipelineChannels
from .messages import Key, grad_key, leaf_key, value_key
from .stage_pass import StagePass


@dataclass(frozen=True, eq=False)
class PipelineMicroBatch:
    """A micro-batch: the stages for its shapes, and its tensors by name."""

    cut: StagedGraph
    leaves: Mapping[str, torch.Tensor]
    """May be empty on ranks that read no data."""


@dataclass(frozen=True, slots=True)
class StepHooks:
    """The caller's hooks into a step."""

    seed: Callable[[int, int], None] = lambda stage, micro: None
    """Before a forward: seed by (stage, micro-batch), so that random numbers do not depend on the order."""
    around_action: Callable[[Action], AbstractContextManager[Any]] = lambda action: nullcontext()
    """Around the computation of an action: for a recorder, and for the precision."""
    around_wait: Callable[[Action], AbstractContextManager[Any]] = lambda action: nullcontext()
    """Around the wait for an action's inputs."""
    last_backward: Callable[[int], None] = lambda stage: None
    """A stage's gradients are complete on this rank: their reduction may begin."""


class StageActions(ABC):
    """The actions of one rank. A value that stays on the rank is passed on without a message."""

    def __init__(
        self,
        channels: PipelineChannels,
        hooks: StepHooks,
        stage_ranks: Mapping[int, int],
        *,
        trains: bool,
        split: bool,
    ) -> None:
        """`stage_ranks`: the rank of every stage; `trains`: backwards follow; `split`: those for weights separately."""
        self.hooks, self.stage_ranks, self.trains, self.split = hooks, stage_ranks, trains, split
        self.rank, self.device = channels.rank, channels.device
        self._store: dict[Key, tuple[torch.Tensor, int]] = {}
        """Values on this rank, each with the number of reads to come."""
        self._open: dict[tuple[int, int], StagePass] = {}
        self._losses: dict[int, tuple[torch.Tensor, ...]] = {}
        self._peak = 0

    @abstractmethod
    def micro_batch(self, micro: int) -> PipelineMicroBatch:
        """A micro-batch by its number."""

    @abstractmethod
    def loss_gradient(self, micro: int, loss: torch.Tensor) -> torch.Tensor:
        """The gradient that the backward of a micro-batch begins with: of the summed loss."""

    def readers_here(self, port: Port) -> int:
        """Number of stages on this rank that read a port."""
        return sum(self.stage_ranks[t] == self.rank for t in port.readers)

    def _act(self, action: Action) -> dict[Key, torch.Tensor]:
        """Compute an action; returns its results by key. Those that stages of this rank read are put into the store."""
        if action.kind == "F":
            return self._forward(action)
        if action.kind == "B":
            return self._backward(action)
        self._open.pop((action.stage, action.micro)).weight_gradients()
        return {}

    # -- forward

    def _forward(self, action: Action) -> dict[Key, torch.Tensor]:
        s, micro = action.stage, action.micro
        stage = self.micro_batch(micro).cut.stages[s]
        inputs = [self._input(source, micro) for source in stage.inputs]
        stage_pass = StagePass(stage, inputs, split=self.split)
        self.hooks.seed(s, micro)
        outputs = stage_pass.forward()
        if self.trains:
            self._open[s, micro] = stage_pass
            self._peak = max(self._peak, len(self._open))
        if s == len(self.stage_ranks) - 1:
            self._losses[micro] = tuple(output.detach() for output in outputs)
            return {}
        results = {}
        for k, (port, output) in enumerate(zip(stage.outputs, outputs, strict=True)):
            _check(port, output, f"output {k} of stage {s} for micro-batch {micro}")
            key = value_key(StageInput(s, k), micro)
            results[key] = output.detach()
            self._put(key, results[key], self.readers_here(port))
        return results

    def _input(self, source: BatchInput | StageInput, micro: int) -> torch.Tensor:
        cut = self.micro_batch(micro).cut
        if isinstance(source, StageInput):
            value = self._take(value_key(source, micro)).detach()
            port = cut.stages[source.stage].outputs[source.output]
            return value.requires_grad_(port.grad and self.trains)
        if leaf_key(source.name, micro) in self._store:
            return self._take(leaf_key(source.name, micro))
        value = self.micro_batch(micro).leaves[source.name]
        _check(cut.batch_inputs[source.name], value, f"{source.name} of micro-batch {micro}")
        return value

    # -- backward

    def _backward(self, action: Action) -> dict[Key, torch.Tensor]:
        s, micro = action.stage, action.micro
        cut = self.micro_batch(micro).cut
        stage = cut.stages[s]
        stage_pass = self._open[s, micro] if self.split else self._open.pop((s, micro))
        gradients = stage_pass.backward(self._output_gradients(s, micro))
        results = {}
        for source, gradient in zip(stage.inputs, gradients, strict=True):
            if not isinstance(source, StageInput):
                continue
            port = cut.stages[source.stage].outputs[source.output]
            if port.grad:
                key = grad_key(source, micro, s)
                # a reader that does not use a value sends zeros: the producer waits for a gradient
                zeros = torch.zeros(port.shape, dtype=port.dtype, device=self.device) if gradient is None else gradient
                results[key] = zeros
                self._put(key, zeros, int(self.stage_ranks[source.stage] == self.rank))
        return results

    def _output_gradients(self, s: int, micro: int) -> dict[int, torch.Tensor]:
        if s == len(self.stage_ranks) - 1:
            return {0: self.loss_gradient(micro, self._losses[micro][0])}
        gradients: dict[int, torch.Tensor] = {}
        for k, port in enumerate(self.micro_batch(micro).cut.stages[s].outputs):
            if port.grad:
                # always in the order of the readers, whichever arrived first
                first, *others = [self._take(grad_key(StageInput(s, k), micro, t)) for t in port.readers]
                gradients[k] = sum(others, first)
        return gradients

    # -- values on this rank

    def _put(self, key: Key, value: torch.Tensor, readers: int) -> None:
        if readers:
            self._store[key] = value, readers

    def _take(self, key: Key) -> torch.Tensor:
        value, readers = self._store.pop(key)
        if readers > 1:
            self._store[key] = value, readers - 1
        return value


def _check(port: Port, value: torch.Tensor, what: str) -> None:
    if (tuple(value.shape), value.dtype) != (port.shape, port.dtype):
        raise PlanError(
            f"{what} is {value.dtype} {list(value.shape)}, and was captured as {port.dtype} {list(port.shape)}",
            rule="other ranks allocate the captured shapes",
            fix="capture the model for every shape of a micro-batch, in the precision that it runs in",
        )
