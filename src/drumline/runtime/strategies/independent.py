"""Replicas that take optimizer steps by themselves: each runs its slice of the batch and meets the others to average.

A replica normalises the gradient by its own samples, clips it by its own norm, and normalises activations (BatchNorm)
with its own slice. It skips micro-batches of which it has no samples: no other rank waits for it. A step that sends
nothing waits for nothing, so a fast replica may be ahead of a slow one until the next average.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from ...core.errors import JobError
from ...datasets.stream import RankBatch, RankMicroBatch
from ...torchkit.fake_tensors import has_no_values
from ...torchkit.modules import BatchNormBase
from ..state.buffer_snapshot import BufferSnapshot
from .replica_tensors import Message, ReplicaTensors, average, copy_from_first
from .replicate import WholeModel
from .strategy import MicroLoss, StepContext

OWN_STATISTICS = (
    "BatchNorm: each replica normalises with its own slice of the batch; running statistics are averaged with weights"
)


class IndependentReplica(WholeModel):
    """One replica of the model; a subclass decides when it averages, and with whom."""

    steps_alone = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._tensors: ReplicaTensors

    def wrap(self, model: nn.Module) -> nn.Module:
        self.keep(model)
        if self._ranks > 1 and not has_no_values(self._parameters[0]):
            # a model may draw weights from generators that no seed of ours reaches
            copy_from_first([*model.parameters(), *model.buffers()], self._group, self._message_in(self._group))
        if self._ranks > 1 and any(isinstance(m, BatchNormBase) for m in model.modules()):
            self.remarks = (*self.remarks, OWN_STATISTICS)
        return model

    def attach(self, optimizer: torch.optim.Optimizer, buffers: BufferSnapshot) -> None:
        self._tensors = ReplicaTensors(dict(self._model.named_parameters()), optimizer, buffers)

    # -- running a batch

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def samples_of(self, batch: RankBatch) -> int:
        return sum(micro.samples for micro in batch.micros)

    def forward_backward(self, batch: RankBatch, step: StepContext) -> tuple[list[MicroLoss], bool]:
        return super().forward_backward(replace(batch, micros=tuple(m for m in batch.micros if m.samples)), step)

    def loss_of(self, micro: RankMicroBatch) -> tuple[torch.Tensor, torch.Tensor, bool]:
        try:
            return super().loss_of(micro)
        except ValueError as e:
            if "Expected more than 1 value per channel" not in str(e):
                raise
            raise JobError(
                f"BatchNorm cannot normalise a slice of {micro.samples} sample{'s' if micro.samples > 1 else ''}",
                where=f"rank {self._rank} of {self._ranks}",
                rule="replicas that step by themselves normalise with their own slice; it needs two values per channel",
                fix="a batch size and a number of samples whose last batch leaves each rank more, or another norm",
            ) from e

    # -- averages

    def after_step(self, step: int) -> None:
        self.replicas_equal = False
        self._exchange(step)

    @abstractmethod
    def _exchange(self, step: int) -> None:
        """Exchange weights after a step, if it is time."""

    def average(self) -> None:
        if not self.replicas_equal:
            self._average_all()

    def _average_all(self) -> None:
        """Average everything over all ranks."""
        self._average_over(self._group)
        copy_from_first(self._tensors.counters(), self._group, self._message_in(self._group))
        self.replicas_equal = True

    def _average_over(self, group: dist.ProcessGroup) -> None:
        """Average weights, buffers and optimizer states over the ranks of a group."""
        message = self._message_in(group)
        self._tensors.agree(group, self._device, message, states=True)
        average([*self._tensors.weights(), *self._tensors.states()], group, message)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        if self.replicas_equal:
            yield
            return
        message = self._message_in(self._group)
        self._tensors.agree(self._group, self._device, message, states=False)
        weights = self._tensors.weights()
        own = [t.detach().clone() for t in weights]
        average(weights, self._group, message)
        try:
            yield
        finally:
            with torch.no_grad():
                for t, values in zip(weights, own, strict=True):
                    t.copy_(values)

    def values_loaded(self) -> None:
        super().values_loaded()
        self.replicas_equal = True

    # -- messages

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def _message_in(self, group: dist.ProcessGroup) -> Message:
        """Records the collectives of a group. That of all ranks may report them itself; those of hosts do not."""
        return self.record.message if self.record is not None and group is self._group else self._direct_message

    @contextmanager
    def _direct_message(self, name: str, tensor: torch.Tensor) -> Iterator[None]:
        """Records a message that no group reports."""
        started = self.record.start_message(name, float(tensor.nbytes)) if self.record is not None else None
        yield
        if started is not None:
            started.end()
