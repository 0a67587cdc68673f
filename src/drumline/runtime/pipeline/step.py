"""Runs pipeline orders on one rank: the actions of its lane one by one, with the messages between them.

Before an action, the receives of its inputs and of the next action's are posted; then its own inputs are waited for. A
value that stays on the rank (several stages on one rank) is passed on without a message, and treated as a received one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...core.errors import PlanError
from ...partition.stage import BatchInput, Port, StagedGraph, StageInput
from ...schedules.pipeline import Action, Pipeline
from .channels import PipelineChannels, StepMessages
from .messages import Key, MessageTables, PipelineMessage, forward_only, grad_key, leaf_key, value_key
from .stage_pass import StagePass

KEPT_TABLES = 64
"""Message tables that are kept: micro-batches of many shapes come in ever new combinations."""


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


@dataclass(frozen=True, slots=True)
class StepResult:
    """One rank's result of a step."""

    losses: tuple[tuple[torch.Tensor, ...], ...]
    """By micro-batch the outputs of the last stage (sum and weight of the loss first), on its rank; elsewhere empty."""
    peak: int
    """Peak number of forwards waiting for their backwards."""


class PipelineStep:
    """One step of one rank, with backwards if the loss has a factor."""

    def __init__(
        self,
        channels: PipelineChannels,
        hooks: StepHooks,
        tables: MessageTables,
        micros: Sequence[PipelineMicroBatch],
        *,
        factor: float | None,
        prefetch: int,
    ) -> None:
        self.hooks, self.tables, self.micros, self.factor, self.prefetch = hooks, tables, micros, factor, prefetch
        self.rank, self.device = channels.rank, channels.device
        self.lane = tables.order.lanes[self.rank]
        self.split = tables.order.splits_backward
        self.messages = StepMessages(channels, tables.sequences)
        self._store: dict[Key, tuple[torch.Tensor, int]] = {}
        """Values on this rank, each with the number of reads to come."""
        self._open: dict[tuple[int, int], StagePass] = {}
        self._losses: dict[int, tuple[torch.Tensor, ...]] = {}
        self._posted = 0
        self._peak = 0

    def run(self) -> StepResult:
        """Run the whole lane."""
        last = {action.stage: i for i, action in enumerate(self.lane) if action.kind != "F"}
        for i, action in enumerate(self.lane):
            self._receive(i, action)
            outgoing = self.tables.sends[self.rank][i]
            for message in outgoing:
                if message.key[0] == "leaf":
                    self.messages.send(message, self.micros[action.micro].leaves[str(message.key[1])])
            with self.hooks.around_action(action):
                results = self._act(action)
            for message in outgoing:
                if message.key in results:
                    self.messages.send(message, results[message.key])
            if last.get(action.stage) == i:
                self.hooks.last_backward(action.stage)
        self.messages.finish()
        assert not self._store and not self._open, f"{self.tables.order} left values or forwards behind"
        return StepResult(tuple(self._losses[i] for i in sorted(self._losses)), self._peak)

    def _receive(self, i: int, action: Action) -> None:
        receives = self.tables.receives[self.rank]
        while self._posted < min(i + 1 + self.prefetch, len(self.lane)):
            for message in receives[self._posted]:
                self.messages.post_receive(message)
            self._posted += 1
        with self.hooks.around_wait(action):
            for message in receives[i]:
                self._put(message.key, self.messages.wait_for(message), self._readers(message))

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
        stage = self.micros[micro].cut.stages[s]
        inputs = [self._input(source, micro) for source in stage.inputs]
        stage_pass = StagePass(stage, inputs, split=self.split)
        self.hooks.seed(s, micro)
        outputs = stage_pass.forward()
        if self.factor is not None:
            self._open[s, micro] = stage_pass
            self._peak = max(self._peak, len(self._open))
        if s == self.tables.order.stages - 1:
            self._losses[micro] = tuple(output.detach() for output in outputs)
            return {}
        results = {}
        for k, (port, output) in enumerate(zip(stage.outputs, outputs, strict=True)):
            _check(port, output, f"output {k} of stage {s} for micro-batch {micro}")
            key = value_key(StageInput(s, k), micro)
            results[key] = output.detach()
            self._put(key, results[key], len(self.tables.readers_on(port, self.rank)))
        return results

    def _input(self, source: BatchInput | StageInput, micro: int) -> torch.Tensor:
        cut = self.micros[micro].cut
        if isinstance(source, StageInput):
            value = self._take(value_key(source, micro)).detach()
            port = cut.stages[source.stage].outputs[source.output]
            return value.requires_grad_(port.grad and self.factor is not None)
        if leaf_key(source.name, micro) in self._store:
            return self._take(leaf_key(source.name, micro))
        value = self.micros[micro].leaves[source.name]
        _check(cut.batch_inputs[source.name], value, f"{source.name} of micro-batch {micro}")
        return value

    # -- backward

    def _backward(self, action: Action) -> dict[Key, torch.Tensor]:
        s, micro = action.stage, action.micro
        cut = self.micros[micro].cut
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
                self._put(key, zeros, int(self.tables.stage_ranks[source.stage] == self.rank))
        return results

    def _output_gradients(self, s: int, micro: int) -> dict[int, torch.Tensor]:
        if s == self.tables.order.stages - 1:
            assert self.factor is not None
            return {0: torch.full_like(self._losses[micro][0], self.factor)}
        gradients: dict[int, torch.Tensor] = {}
        for k, port in enumerate(self.micros[micro].cut.stages[s].outputs):
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

    def _readers(self, message: PipelineMessage) -> int:
        return 1 if message.key[0] == "grad" else len(self.tables.readers_on(message.port, self.rank))


def _check(port: Port, value: torch.Tensor, what: str) -> None:
    if (tuple(value.shape), value.dtype) != (port.shape, port.dtype):
        raise PlanError(
            f"{what} is {value.dtype} {list(value.shape)}, and was captured as {port.dtype} {list(port.shape)}",
            rule="other ranks allocate the captured shapes",
            fix="capture the model for every shape of a micro-batch, in the precision that it runs in",
        )


class PipelineRunner:
    """Runs the steps of one rank, in training and evaluation; keeps the message tables of each order and shape."""

    def __init__(
        self,
        channels: PipelineChannels,
        hooks: StepHooks | None = None,
        *,
        batch_on: Literal["all", "first"] = "all",
        prefetch: int = 1,
    ) -> None:
        """`batch_on`: the ranks that have the batch, all or the first stage's; `prefetch`: actions to receive ahead."""
        self.channels, self.hooks, self.batch_on, self.prefetch = channels, hooks or StepHooks(), batch_on, prefetch
        self._known: dict[tuple[Any, ...], tuple[Pipeline, MessageTables]] = {}

    def train(self, order: Pipeline, micros: Sequence[PipelineMicroBatch], factor: float) -> StepResult:
        """Run forwards and backwards of `factor` times the summed loss; adds gradients to the parameters' `.grad`."""
        return self._step(self._tables(order, micros), micros, factor).run()

    def evaluate(self, order: Pipeline, micros: Sequence[PipelineMicroBatch]) -> StepResult:
        """Run the forwards of the order only, without gradients."""
        with torch.no_grad():
            return self._step(self._tables(order, micros, forward=True), micros, None).run()

    def _step(self, tables: MessageTables, micros: Sequence[PipelineMicroBatch], factor: float | None) -> PipelineStep:
        return PipelineStep(self.channels, self.hooks, tables, micros, factor=factor, prefetch=self.prefetch)

    def _tables(self, order: Pipeline, micros: Sequence[PipelineMicroBatch], *, forward: bool = False) -> MessageTables:
        """The message tables for an order and the shapes of its micro-batches."""
        if len(order.lanes) != self.channels.ranks or len(micros) != order.micros:
            raise PlanError(
                f"{order} for {self.channels.ranks} ranks and {len(micros)} micro-batches",
                rule="an order has a lane for every rank and is made for the number of micro-batches",
            )
        for i, micro in enumerate(micros):
            if len(micro.cut.stages) != order.stages:
                raise PlanError(
                    f"micro-batch {i} is cut into {len(micro.cut.stages)} stages, the order has {order.stages}",
                    rule="one cut for each stage of the order",
                )
        cuts = [m.cut for m in micros]
        key = (id(order), forward, *cuts)  # cuts are compared by identity, and kept alive by the tables
        if key not in self._known:
            tables = MessageTables(forward_only(order) if forward else order, cuts, batch_on=self.batch_on)
            self._known[key] = order, tables
            if len(self._known) > KEPT_TABLES:
                self._known.pop(next(iter(self._known)))
        return self._known[key][1]
