"""Runs a pipeline that does not drain between batches, on one rank: the actions of its lane, as batches come.

Micro-batches are numbered from 0 since the pipeline was empty. Before an action, the receives of its inputs and of the
next action's are posted, as in a step of any other schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...schedules.pipeline import Action
from .channels import PipelineChannels
from .stage_actions import PipelineMicroBatch, StageActions, StepHooks
from .stream_messages import StreamMessages, messages_from, messages_to


class PipelineStream(StageActions):
    """The micro-batches in flight on one rank, which has the stage of its number."""

    def __init__(
        self, channels: PipelineChannels, total_weight: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight
    ) -> None:
        """`total_weight`: the weight of a micro-batch over all replicas, from this replica's."""
        ranks = {stage: stage for stage in range(channels.ranks)}
        super().__init__(channels, StepHooks(), ranks, trains=True, split=False)
        self.stage = self.rank
        self._total_weight = total_weight
        self._messages = StreamMessages(channels)
        self._micros: dict[int, PipelineMicroBatch] = {}
        self._factors: dict[int, float | None] = {}

    def feed(self, first: int, micros: Sequence[PipelineMicroBatch], factor: float | None) -> None:
        """Add the micro-batches of a batch, from number `first` on.

        The backward is that of `factor` times the summed loss, or, without a factor, of the loss over its weight.
        """
        for i, micro in enumerate(micros, first):
            self._micros[i], self._factors[i] = micro, factor

    def run(self, actions: Sequence[Action], done: Callable[[Action], None], hooks: StepHooks) -> None:
        """Run forwards and backwards, and call `done` after each; an update is `done` itself."""
        self.hooks = hooks
        passes = [action for action in actions if action.kind != "U"]
        position = 0
        for action in actions:
            if action.kind != "U":
                position += 1
                self._run(action, passes[position : position + 1])
            done(action)

    def losses(self, micros: range) -> list[tuple[torch.Tensor, ...]]:
        """On the last rank: the outputs of the last stage (sum and weight of the loss first), by micro-batch."""
        return [self._losses.pop(i) for i in micros if i in self._losses]

    def confirm(self, micro: int) -> None:
        """All ranks have run all micro-batches up to this one."""
        self._messages.confirm_all(micro)

    def finish(self) -> None:
        """The pipeline is empty."""
        self._messages.finish()
        assert not self._store and not self._open and not self._micros, "values or forwards are left behind"

    def micro_batch(self, micro: int) -> PipelineMicroBatch:
        return self._micros[micro]

    def loss_gradient(self, micro: int, loss: torch.Tensor) -> torch.Tensor:
        factor = self._factors[micro]
        if factor is not None:
            return torch.full_like(loss, factor)
        return self._total_weight(self._losses[micro][1]).to(loss.dtype).reciprocal().expand_as(loss).clone()

    def _run(self, action: Action, following: Sequence[Action]) -> None:
        for ahead in (action, *following):
            for message in messages_to(ahead, self._micros[ahead.micro].cut):
                self._messages.post_receive(message)
        cut = self._micros[action.micro].cut
        with self.hooks.around_wait(action):
            for message in messages_to(action, cut):
                self._put(message.key, self._messages.wait_for(message), 1)
                self._confirm(action, message.src)
        with self.hooks.around_action(action):
            results = self._act(action)
        for message in messages_from(action, cut):
            self._messages.send(message, results[message.key], action.micro)
        if action.kind == "F":  # the backward has what it needs
            self._micros[action.micro] = PipelineMicroBatch(cut, {})
        else:
            del self._micros[action.micro], self._factors[action.micro]

    def _confirm(self, action: Action, src: int) -> None:
        """A message shows what its sender has read.

        A gradient: the values of its micro-batch. A value: of the gradients, all but those of the micro-batches that
        its lane keeps in flight.
        """
        read = action.micro if action.kind == "B" else action.micro - (len(self.stage_ranks) - src)
        self._messages.confirm(src, read)
