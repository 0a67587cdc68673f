"""The interface of a parallelism strategy (DDP, flat shards, FSDP2, model parallelism, ...) below the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...datasets.stream import RankBatch, RankMicroBatch
from ...partition.sharding.layout import Split
from ...reports.split_summary import SplitSummary
from ..numerics.constants import constant
from ..numerics.precision import compute_precision, float32_arithmetic
from ..pipeline.clock import LaneTiming
from ..state.buffer_snapshot import BufferSnapshot
from ..state.pieces import Piece
from ..state.recorder import StepRecorder
from .model_call import ModelCall
from .module_outputs import ModuleHooks, OutputSeen

MicroLoss = tuple[torch.Tensor, torch.Tensor]
"""Sum and weight of one micro-batch's loss on this rank, in double precision."""


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """Settings and functions that the engine provides for the forwards and backwards of one step."""

    precision: str
    device: torch.device
    scale: float
    """The loss scale."""
    loss_of: Callable[[RankMicroBatch], tuple[torch.Tensor, torch.Tensor, bool]]
    """The forward of one micro-batch: the engine's method, which observers replace."""
    phase: Callable[[str], AbstractContextManager[None]]
    """Times a part of the step."""
    seed: Callable[..., None]
    """Seeds the random numbers by micro-batch, and by stage in a pipeline."""


class Strategy(ABC):
    """Holds one model on the ranks of a plan, runs batches through it, and sums its gradients.

    A step is: `forward_backward`; `gather_gradients`, after which `piece.value.grad` of every piece is complete; the
    optimizer; `after_update`. The ranks' gradients are summed, and divided by `gradient_divisor`.
    """

    gradient_divisor: int = 1
    """Divisor of the ranks' summed gradients."""
    group: dist.ProcessGroup | None = None
    """The ranks over which the pieces of a parameter are spread; None where every rank has all of them."""
    record: StepRecorder | None = None
    """Records the strategy's messages."""
    call: ModelCall
    """Runs the user's module; set once it is wrapped. Unused where a captured graph runs instead."""
    counts_unreached: bool = False
    """Whether `unreached` can be more than 0."""
    keeps_gradients: bool = True
    """Whether a parameter's `grad` remains after a backward: not where it is sent at once."""
    holds_parts: bool = False
    """Whether the ranks of one copy of the model hold different parameters, and exchange values in the forward."""
    counts_loss: bool = True
    """Whether this rank's losses enter the sum: of the ranks that share samples, one's do."""
    shows_outputs: bool = True
    """Whether `whole_output` of this rank is the one to look at: of the ranks that share samples, one's is."""
    reads_input: bool = True
    """Whether this rank's part of the model reads the input of the batch."""
    output_order: Sequence[tuple[str, int, int]] | None = None
    """(module, call, which) of all outputs of a micro-batch in order; None where every rank runs every module."""
    summary: SplitSummary | None = None
    """How the plan splits the model; None where it does not."""
    steps_alone: bool = False
    """Whether each rank takes optimizer steps by itself, on its slice of the batch, and ranks exchange weights."""
    replicas_equal: bool = True
    """Whether all replicas are equal now, as far as their ranks know: not between averages of ranks that step alone."""
    remarks: tuple[str, ...] = ()
    """Sentences about this plan and model that a user should read before the first step."""
    staleness: tuple[int, ...] = ()
    """Of the last completed step: updates between the weights of its gradients and the weights they were applied to.

    One number for each stage of a pipeline that does not drain; empty where gradients are of the newest weights.
    """
    _hooks: ModuleHooks | None = None

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Take over the model; returns the module to call."""

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """This rank's parts of all parameters, frozen ones too, in the order of the model's parameters."""

    # -- running a batch

    @abstractmethod
    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward of one micro-batch."""

    def forward_backward(self, batch: RankBatch, step: StepContext) -> tuple[list[MicroLoss], bool]:
        """Run every micro-batch; returns the losses this rank has, and whether the job weights them itself."""
        weighted = False
        # the sum over the ranks is divided by `gradient_divisor`, so each contributes that many times its own
        factor = self.gradient_divisor * step.scale / max(1, self.samples_of(batch))
        losses: list[MicroLoss] = []
        for i, micro in enumerate(batch.micros):
            step.seed(i)
            self._begin_micro(i)
            with self.accumulate(last=i == len(batch.micros) - 1), float32_arithmetic(step.precision, step.device):
                with step.phase("forward"), compute_precision(step.precision, step.device):
                    total, weight, own = step.loss_of(micro)
                weighted |= own
                with step.phase("backward"):
                    total.backward(constant(factor, total, dtype=total.dtype))
                losses.append((total.detach().double(), weight))
        return losses, weighted

    def samples_of(self, batch: RankBatch) -> int:
        """Number of samples over which the gradient of a step is the mean: those of all ranks that step together."""
        return batch.samples

    def _begin_micro(self, i: int) -> None:
        """Called before the forward of micro-batch i of a step."""
        if self._hooks is not None:
            self._hooks.begin(i)

    def loss_of(self, micro: RankMicroBatch) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Forward of one micro-batch: sum and weight of its loss, and whether the job gave the weight."""
        return self.call.loss_of(micro)

    def evaluate(self, micros: Sequence[RankMicroBatch]) -> list[dict[str, torch.Tensor]]:
        """(sum, weight) of the loss and of each metric, to be added up."""
        return [self.call.metrics_of(micro) for micro in micros]

    # -- gradients and the update

    def unreached(self) -> int:
        """Number of trained parameters that this rank's backward did not reach, if the strategy needs to know."""
        return 0

    @abstractmethod
    def gather_gradients(self) -> None:
        """Set the reduced gradient of every piece; zeros, or None, where no rank has one."""

    def drop_unreached(self) -> None:  # noqa: B027  # most strategies have nothing to do
        """Give parameters that no rank has reached None for a gradient."""

    @abstractmethod
    def after_update(self) -> None:
        """The optimizer has run: drop the gradients and make the model whole again."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop the gradients without an update."""

    def values_loaded(self) -> None:
        """The pieces have new values, those of a checkpoint or of pretrained weights, the same on all ranks."""
        self.after_update()

    def gradient_buffers(self) -> list[torch.Tensor]:
        """Gradient buffers that the strategy keeps between steps."""
        return []

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Sum, over the ranks, a number that was computed from each rank's pieces."""
        if self.group is not None and dist.get_world_size(self.group) > 1:
            with self.record.message("all_reduce", value) if self.record else nullcontext():
                dist.all_reduce(value, group=self.group)
        return value

    def follow(self, name: str, work: Any, tensor: torch.Tensor, *, unreported: bool = False) -> Any:
        """Record a message that was started; returns the work to wait for."""
        return work if self.record is None else self.record.track(name, work, tensor, unreported=unreported)

    # -- replicas that take steps by themselves

    def attach(self, optimizer: torch.optim.Optimizer, buffers: BufferSnapshot) -> None:  # noqa: B027
        """Called once, when the optimizer exists: its states are averaged with the weights."""

    def meets(self, step: int) -> bool:
        """Whether all ranks exchange messages at the end of step `step`, counted from 1; only then may they do more."""
        return True

    def after_step(self, step: int) -> None:  # noqa: B027
        """Exchange weights with other replicas, if it is time at the end of step `step`, counted from 1."""

    def average(self) -> None:  # noqa: B027
        """Make all replicas their average, if they differ. All ranks call this together."""

    def averaged(self) -> AbstractContextManager[None]:
        """Around code that reads weights and buffers as one model; then replicas go on as they were."""
        return nullcontext()

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of a checkpoint besides model and optimizer, by the name in it; equal on all ranks."""
        return {}

    # -- observation

    def watch_outputs(self, seen: OutputSeen, skip: Collection[nn.Module] = ()) -> None:
        """Report the outputs of the user's modules, except those to `skip`, until `unwatch_outputs`."""
        self._hooks = ModuleHooks(self.call.model, seen, skip)

    def unwatch_outputs(self) -> None:
        """Report no more outputs."""
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = None

    def whole_output(self, tensor: torch.Tensor, splits: Mapping[str, Split]) -> torch.Tensor:
        """Assemble an output from the parts of the ranks that share samples."""
        return tensor

    def stages_after(self, name: str) -> int:
        """Number of pipeline stages whose backward runs before that of parameter `name`."""
        return 0

    def lanes(self, last: int) -> list[LaneTiming]:
        """Timings of the pipeline's last steps on this rank."""
        return []
