"""Sums a few numbers of every batch over the stages of a pipeline while later batches are in flight.

The first stage is the last to have the gradients of a batch. So the others send it their numbers when they have theirs,
it sends back the sums, and no rank waits for a rank that is behind it. A collective would not do: it may wait for all
ranks when it starts, and the last stage starts it long before the first.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from .channels import PipelineChannels, naming_peer


class OpenSum:
    """The numbers of one batch on their way."""

    def __init__(self, work: Any, total: torch.Tensor, sent: torch.Tensor | None = None, send: Any = None) -> None:
        self._work, self._total, self._sent, self._send = work, total, sent, send

    def wait(self) -> torch.Tensor:
        """The sums, once the first stage has them."""
        if self._work is not None:
            with naming_peer("the numbers of a batch did not come back", 0):
                self._work.wait()
                self._send.wait()  # what came back contains it
            self._work = self._send = self._sent = None
        return self._total


class BatchSums:
    """One rank's side of the sums, over channels of their own. Ranks start them in the order of the batches."""

    def __init__(self, channels: PipelineChannels) -> None:
        self._channels = channels
        self._count = 0
        self._answers: deque[tuple[int, int, Any, torch.Tensor]] = deque()
        """On the first rank: batch, receiver, the work to wait for, and the tensor, which must live until then."""

    def start(self, values: torch.Tensor) -> OpenSum:
        """Start to sum the numbers of the next batch."""
        tag, self._count = self._count, self._count + 1
        if self._channels.rank > 0:
            total = torch.empty_like(values)
            with naming_peer("the numbers of a batch cannot be summed", 0):
                work = self._channels.receive(total, 0, tag)
                send = self._channels.send(values, 0, tag, "numbers")
            return OpenSum(work, total, values, send)
        total = values.clone()
        for rank in range(1, self._channels.ranks):
            part = torch.empty_like(values)
            with naming_peer("the numbers of a batch did not arrive", rank):
                self._channels.receive(part, rank, tag).wait()
            total += part
        self._release(tag)
        for rank in range(1, self._channels.ranks):
            with naming_peer("the sums of a batch cannot be sent", rank):
                work = self._channels.send(total, rank, tag, "numbers")
            self._answers.append((tag, rank, work, total))
        return OpenSum(None, total)

    def finish(self) -> None:
        """No batch is in flight: all sums have been read."""
        self._release(None)

    def _release(self, tag: int | None) -> None:
        """Release sums that have been read: a rank reads those of a batch before its own numbers of `rank` later ones
        are complete."""
        kept = deque[tuple[int, int, Any, torch.Tensor]]()
        for answer in self._answers:
            batch, rank, work, _ = answer
            if tag is None or batch < tag - rank:
                with naming_peer("the sums of a batch were not received", rank):
                    work.wait()
            else:
                kept.append(answer)
        self._answers = kept
