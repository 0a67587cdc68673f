"""One step of one rank of a pipeline: the actions of its lane, one after the other, and what they read and give.

Before an action, what it reads and what the next one reads is asked for; then what it reads is waited for. A value that
stays on the rank (several stages on one rank) is handed over without a message, and is treated as a received one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...core.errors import PlanError
from ...partition.stage import BatchInput, Port, StagedGraph, StageInput
from ...schedules.pipeline import Action
from .channels import PipelineChannels, StepMessages
from .messages import Key, MessageTables, PipelineMessage, grad_key, leaf_key, value_key
from .stage_pass import StagePass


@dataclass(frozen=True, eq=False)
class PipelineMicroBatch:
    """One micro-batch: the stages for its shapes, and its tensors by name."""

    cut: StagedGraph
    leaves: Mapping[str, torch.Tensor]
    """May be empty on ranks that do not read data."""


@dataclass(frozen=True, slots=True)
class StepHooks:
    """What the caller does at moments of a step."""

    seed: Callable[[int, int], None] = lambda stage, micro: None
    """Before a forward: set the random numbers by (stage, micro-batch), so that no order changes them."""
    around_action: Callable[[Action], AbstractContextManager[Any]] = lambda action: nullcontext()
    """Around the computing of an action: for a recorder, and for a precision."""
    around_wait: Callable[[Action], AbstractContextManager[Any]] = lambda action: nullcontext()
    """Around the wait for what an action reads."""
    last_backward: Callable[[int], None] = lambda stage: None
    """A stage's gradients are complete on this rank: their reduction may begin."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a rank has of a step."""

    losses: tuple[tuple[torch.Tensor, ...], ...]
    """By micro-batch what the last stage gives (sum and weight of the loss first), on its rank; elsewhere nothing."""
    peak: int
    """The most forwards that were held at once for their backwards."""


class PipelineStep:
    """One step of one rank, with backwards where there is a factor for the loss."""

    def __init__(
        self,
        wires: PipelineChannels,
        hooks: StepHooks,
        tables: MessageTables,
        micros: Sequence[PipelineMicroBatch],
        *,
        factor: float | None,
        ahead: int,
    ) -> None:
        self.hooks, self.tables, self.micros, self.factor, self.ahead = hooks, tables, micros, factor, ahead
        self.rank, self.device = wires.rank, wires.device
        self.lane = tables.order.lanes[self.rank]
        self.split = tables.order.splits_backward
        self.exchange = StepMessages(wires, tables.sequences)
        self._store: dict[Key, tuple[torch.Tensor, int]] = {}
        """What is here, and how many are still to read it."""
        self._held: dict[tuple[int, int], StagePass] = {}
        self._losses: dict[int, tuple[torch.Tensor, ...]] = {}
        self._asked = 0
        self._peak = 0

    def run(self) -> StepResult:
        """The whole lane."""
        last = {action.stage: i for i, action in enumerate(self.lane) if action.kind != "F"}
        for i, action in enumerate(self.lane):
            self._receive(i, action)
            outgoing = self.tables.sends[self.rank][i]
            for message in outgoing:
                if message.key[0] == "leaf":
                    self.exchange.send(message, self.micros[action.micro].leaves[str(message.key[1])])
            with self.hooks.around_action(action):
                made = self._act(action)
            for message in outgoing:
                if message.key in made:
                    self.exchange.send(message, made[message.key])
            if last.get(action.stage) == i:
                self.hooks.last_backward(action.stage)
        self.exchange.finish()
        assert not self._store and not self._held, f"{self.tables.order} left values or forwards behind"
        return StepResult(tuple(self._losses[i] for i in sorted(self._losses)), self._peak)

    def _receive(self, i: int, action: Action) -> None:
        receives = self.tables.receives[self.rank]
        while self._asked < min(i + 1 + self.ahead, len(self.lane)):
            for message in receives[self._asked]:
                self.exchange.post_receive(message)
            self._asked += 1
        with self.hooks.around_wait(action):
            for message in receives[i]:
                self._put(message.key, self.exchange.wait_for(message), self._readers(message))

    def _act(self, action: Action) -> dict[Key, torch.Tensor]:
        """Compute; what it gives, by key. What other stages of this rank read is put into the store."""
        if action.kind == "F":
            return self._forward(action)
        if action.kind == "B":
            return self._backward(action)
        self._held.pop((action.stage, action.micro)).weight_gradients()
        return {}

    # -- forward

    def _forward(self, action: Action) -> dict[Key, torch.Tensor]:
        s, micro = action.stage, action.micro
        stage = self.micros[micro].cut.stages[s]
        inputs = [self._input(source, micro) for source in stage.inputs]
        held = StagePass(stage, inputs, split=self.split)
        self.hooks.seed(s, micro)
        outputs = held.forward()
        if self.factor is not None:
            self._held[s, micro] = held
            self._peak = max(self._peak, len(self._held))
        if s == self.tables.order.stages - 1:
            self._losses[micro] = tuple(output.detach() for output in outputs)
            return {}
        made = {}
        for k, (port, output) in enumerate(zip(stage.outputs, outputs, strict=True)):
            _check(port, output, f"output {k} of stage {s} for micro-batch {micro}")
            key = value_key(StageInput(s, k), micro)
            made[key] = output.detach()
            self._put(key, made[key], len(self.tables.readers_on(port, self.rank)))
        return made

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
        held = self._held[s, micro] if self.split else self._held.pop((s, micro))
        gradients = held.backward(self._output_gradients(s, micro))
        made = {}
        for source, gradient in zip(stage.inputs, gradients, strict=True):
            if not isinstance(source, StageInput):
                continue
            port = cut.stages[source.stage].outputs[source.output]
            if port.grad:
                key = grad_key(source, micro, s)
                # a reader that makes no use of a value says so by zeros: the producer waits for an answer
                zeros = torch.zeros(port.shape, dtype=port.dtype, device=self.device) if gradient is None else gradient
                made[key] = zeros
                self._put(key, zeros, int(self.tables.stage_ranks[source.stage] == self.rank))
        return made

    def _output_gradients(self, s: int, micro: int) -> dict[int, torch.Tensor]:
        if s == self.tables.order.stages - 1:
            assert self.factor is not None
            return {0: torch.full_like(self._losses[micro][0], self.factor)}
        found: dict[int, torch.Tensor] = {}
        for k, port in enumerate(self.micros[micro].cut.stages[s].outputs):
            if port.grad:
                # always in the order of the readers, whoever answered first
                first, *others = [self._take(grad_key(StageInput(s, k), micro, t)) for t in port.readers]
                found[k] = sum(others, first)
        return found

    # -- what is here

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
            rule="other ranks make room for what was captured",
            fix="capture the model for every shape of a micro-batch, and under the precision that it runs in",
        )
