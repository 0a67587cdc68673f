"""Runs pipeline orders on one rank: the actions of its lane one by one, with the messages between them.

Before an action, the receives of its inputs and of the next action's are posted; then its own inputs are waited for. A
value that stays on the rank (several stages on one rank) is passed on without a message, and treated as a received one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...core.errors import PlanError
from ...schedules.pipeline import Action, Pipeline
from .channels import PipelineChannels, StepMessages
from .messages import MessageTables, PipelineMessage, forward_only
from .stage_actions import PipelineMicroBatch, StageActions, StepHooks

KEPT_TABLES = 64
"""Message tables that are kept: micro-batches of many shapes come in ever new combinations."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One rank's result of a step."""

    losses: tuple[tuple[torch.Tensor, ...], ...]
    """By micro-batch the outputs of the last stage (sum and weight of the loss first), on its rank; elsewhere empty."""
    peak: int
    """Peak number of forwards waiting for their backwards."""


class PipelineStep(StageActions):
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
        split = tables.order.splits_backward
        super().__init__(channels, hooks, tables.stage_ranks, trains=factor is not None, split=split)
        self.tables, self.micros, self.factor, self.prefetch = tables, micros, factor, prefetch
        self.lane = tables.order.lanes[self.rank]
        self.messages = StepMessages(channels, tables.sequences)
        self._posted = 0

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

    def micro_batch(self, micro: int) -> PipelineMicroBatch:
        return self.micros[micro]

    def loss_gradient(self, micro: int, loss: torch.Tensor) -> torch.Tensor:
        assert self.factor is not None
        return torch.full_like(loss, self.factor)

    def _readers(self, message: PipelineMessage) -> int:
        return 1 if message.key[0] == "grad" else self.readers_here(message.port)


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
