"""Runs pipeline orders on one rank, for training and for evaluation: the tables of a step are found once and kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from ...core.errors import PlanError
from ...schedules.pipeline import Pipeline
from .channels import PipelineChannels
from .messages import MessageTables, forward_only
from .step import StepHooks, PipelineMicroBatch, StepResult, PipelineStep

KEEP = 64
"""Tables that are kept: micro-batches of many shapes come in ever new combinations."""


class PipelineRunner:
    """One rank of a pipeline."""

    def __init__(
        self, channels: PipelineChannels, hooks: StepHooks | None = None, *, batch_on: Literal["all", "first"] = "all", prefetch: int = 1
    ) -> None:
        """`reads`: whether every rank has the batch, or the first stage's alone; `ahead`: actions to receive for."""
        self.channels, self.hooks, self.batch_on, self.prefetch = channels, hooks or StepHooks(), batch_on, prefetch
        self._known: dict[tuple[Any, ...], tuple[Pipeline, MessageTables]] = {}

    def train(self, order: Pipeline, micros: Sequence[PipelineMicroBatch], factor: float) -> StepResult:
        """Forwards and backwards of `factor` times the summed loss; gradients are added to the parameters' `.grad`."""
        return self._step(self._tables(order, micros), micros, factor).run()

    def evaluate(self, order: Pipeline, micros: Sequence[PipelineMicroBatch]) -> StepResult:
        """The forwards of the order alone, without gradients."""
        with torch.no_grad():
            return self._step(self._tables(order, micros, forward=True), micros, None).run()

    def _step(self, tables: MessageTables, micros: Sequence[PipelineMicroBatch], factor: float | None) -> PipelineStep:
        return PipelineStep(self.channels, self.hooks, tables, micros, factor=factor, ahead=self.prefetch)

    def _tables(self, order: Pipeline, micros: Sequence[PipelineMicroBatch], *, forward: bool = False) -> MessageTables:
        """Found once for an order and the shapes of its micro-batches."""
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
            made = MessageTables(forward_only(order) if forward else order, cuts, batch_on=self.batch_on)
            self._known[key] = order, made
            if len(self._known) > KEEP:
                self._known.pop(next(iter(self._known)))
        return self._known[key][1]
