"""The update after the last backward: one gradient norm for all ranks, clipping, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...core.errors import JobError, nearest
from ...core.job import Job, call_user_code
from ...torchkit.fused_adam import FusedAdam
from ...torchkit.operators import find_nonfinite_and_multiply_, foreach_mul_, foreach_norm
from ...torchkit.optimizers import can_skip_on_device
from ..memory.offload import HostCopy, values_up
from ..numerics.constants import constant
from ..numerics.stochastic_rounding import StochasticRounding
from ..state.optimizer import make_optimizer, waits_for_metric
from ..state.pieces import ParameterSpec, Piece
from ..state.weight_average import WeightAverage
from ..strategies.strategy import Strategy


class Update:
    """The optimizer on this rank's pieces, on the device or in host memory."""

    def __init__(
        self,
        job: Job,
        pieces: list[Piece],
        specs: Mapping[str, ParameterSpec],
        strategy: Strategy,
        *,
        device: torch.device,
        offload: bool,
        applied: Callable[[], int] | None = None,
    ) -> None:
        """`applied` gives the number of steps so far where bf16 weights are rounded stochastically; else it is None."""
        self.clip, self._strategy, self._device = job.clip, strategy, device
        """`clip`: the largest gradient norm, or None."""
        self._device_pieces = pieces
        """The strategy gives these their gradients."""
        self._host = HostCopy(pieces) if offload and device.type != "cpu" else None
        self.pieces = self._host.pieces if self._host else pieces
        """The optimizer updates these."""
        self._on_gpu = device.type == "cuda" and all(p.value.device.type == "cuda" for p in self.pieces)
        self.optimizer = make_optimizer(job, self.pieces, specs)
        self.average = WeightAverage(self.pieces, job.ema) if job.ema is not None else None
        """The averaged weights of a job with `ema`."""
        self._fused = FusedAdam(self.optimizer)
        self._applied = applied
        self._rounding: StochasticRounding | None = None
        if applied is not None:
            self._rounding = StochasticRounding(self.optimizer, {p.value: _place(p) for p in self.pieces}, job.seed)
        self._exact = any(p.value.dtype == torch.float64 for p in self.pieces)
        """Fused kernels take the divisor of the gradients in float32; plans are verified in float64."""
        self.schedule = call_user_code(job.schedule, "the job's schedule()", self.optimizer) if job.schedule else None

    def square(self) -> torch.Tensor:
        """The squared global norm, on the device: the same on every rank and under every plan."""
        return self._strategy.sum_over_ranks(self.own_square())

    def own_square(self) -> torch.Tensor:
        """The part of the squared norm that this rank answers for."""
        gradients = [g for p in self._device_pieces if (g := p.value.grad) is not None and p.owned and g.numel()]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        # a norm of numbers in half precision would be rounded to it
        narrow = [g for g in gradients if g.dtype in (torch.bfloat16, torch.float16)]
        if narrow:
            gradients = [g for g in gradients if g.dtype not in (torch.bfloat16, torch.float16)]
        parts = [
            *(foreach_norm(narrow, 2, torch.float32) if narrow else ()),
            *(foreach_norm(gradients) if gradients else ()),
        ]
        norms = torch.stack([part.double() for part in parts] if narrow else parts)
        norm: torch.Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
        return norm.square().to(self._device)

    def apply(self, factor: float, norm: float, ready: Callable[[], None]) -> None:
        """Multiply the gradients by `factor`, which gives the norm `norm`, clip, call `ready`, step. Then `finish`."""
        if self.clip is not None and norm > self.clip:
            factor *= self.clip / (norm + 1e-6)
        if factor != 1.0:
            foreach_mul_(self._gradients(), factor)
        ready()
        if self._host:
            self._host.gradients_down([p.value.grad for p in self._device_pieces])
        if self._rounding is not None and self._applied is not None:
            self._rounding.step(self._applied())
        elif not self._fused.step():
            self.optimizer.step()
        self.follow_weights()
        if self._host:
            self._host.values_up()

    def follow_weights(self) -> None:
        """Let the averaged weights follow the updated ones."""
        if self.average is not None:
            self.average.follow()

    @property
    def decides_on_device(self) -> bool:
        """Whether a number on the device can make the optimizer skip its step."""
        optimizer = self.optimizer
        fused = all(group.get("fused") for group in optimizer.param_groups) and self._rounding is None
        return fused and self._on_gpu and can_skip_on_device(optimizer)

    def apply_if_finite(self, sums: torch.Tensor, samples: int | None, scale: float) -> None:
        """As `apply`, without the host knowing the numbers: the fused kernel divides by a scale, and does nothing if a
        flag says that a number is not finite. Torch's own loss scaling uses the same.

        `sums` are the values that the engine reads afterwards: loss, weight, unreached parameters, squared norm.
        """
        divide: Any = scale if samples is None else sums[1] * (scale / samples)
        bad = torch.zeros((), device=sums.device)
        checked = [sums] if samples is None else [sums, sums[1].reciprocal()]  # a batch without weight is bad, too
        find_nonfinite_and_multiply_(checked, bad, constant(1.0, sums, dtype=torch.float32))
        if self.clip is not None:
            # (norm / divide + 1e-6) / clip is the norm after the division over its limit; below 1 nothing is clipped.
            # All of it times `divide`, in as few operators as possible: the host launches each of them
            least = divide * (1e-6 / self.clip)
            least = least if isinstance(least, torch.Tensor) else constant(least, sums)
            divide = torch.add(least, sums[3].sqrt(), alpha=1.0 / self.clip).clamp(min=divide)
        if self._exact and isinstance(divide, torch.Tensor):
            foreach_mul_(self._gradients(), divide.reciprocal())
            divide = 1.0
        divisor = None if _is_one(divide) else _single(divide, sums.device)
        if self._fused.step(divisor, bad):
            return
        optimizer: Any = self.optimizer
        optimizer.grad_scale, optimizer.found_inf = divisor, bad
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def rest(self) -> None:
        """Leave the weights as they are for one step. Then `finish`."""
        self._strategy.drop_gradients()
        self.optimizer.step()  # nothing to do without gradients; a schedule warns if no step came before its own

    def finish(self) -> None:
        """After the update: step the learning-rate schedule, and drop the gradients."""
        self.advance_schedule()
        self._strategy.after_update()

    def advance_schedule(self) -> None:
        """Step the learning-rate schedule, if the job has one that advances by steps."""
        if self.schedule is not None and not waits_for_metric(self.schedule):
            self.schedule.step()

    def advance_on(self, metrics: Mapping[str, float], name: str) -> None:
        """Step a schedule that waits for a metric of an evaluation (`ReduceLROnPlateau`), if the job has one."""
        if not waits_for_metric(self.schedule):
            return
        if name not in metrics:
            raise JobError(
                f"Job.monitor is {name!r}, and the evaluation has {', '.join(metrics)}",
                rule="ReduceLROnPlateau waits for one of them",
                fix=nearest(name, metrics) or "monitor='loss'",
            )
        assert self.schedule is not None
        self.schedule.step(metrics[name])

    def gradients(self) -> list[tuple[Piece, torch.Tensor]]:
        """The final gradients of the pieces that have one."""
        return [(p, p.value.grad) for p in self._device_pieces if p.value.grad is not None]

    def _gradients(self) -> list[torch.Tensor]:
        return [g for _, g in self.gradients() if g.numel()]


def _place(piece: Piece) -> str:
    """The elements that a piece has, in words: the same on every rank that has them."""
    part = "" if piece.slice is None else f"{piece.slice.split.dim}.{piece.slice.index}"
    return f"{piece.name}/{piece.start}/{part}"


def show_values(pieces: list[Piece], strategy: Strategy) -> None:
    """The pieces have new values: copy them to where the model reads them, as after an update."""
    if any(p.device_value is not None for p in pieces):
        values_up(pieces)
    strategy.values_loaded()


def _is_one(value: object) -> bool:
    """Whether it is a 1 that the host knows."""
    return isinstance(value, float) and value == 1.0


def _single(value: Any, device: torch.device) -> torch.Tensor:
    """A number in float32 on the device."""
    return value.float() if isinstance(value, torch.Tensor) else torch.full((), value, device=device)
