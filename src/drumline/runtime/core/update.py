"""What happens between the last backward and the next forward: one norm for all ranks, clipping, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...core.job import Job, call_user_code
from ...torchkit.operators import foreach_mul_, foreach_norm
from ..memory.offload import HostCopy
from ..state.optimizer import make_optimizer
from ..state.pieces import ParameterSpec, Piece
from ..strategies.strategy import Strategy


class Update:
    """The optimizer on this rank's pieces, on the device or in host memory."""

    def __init__(
        self,
        job: Job,
        pieces: list[Piece],
        kinds: Mapping[str, ParameterSpec],
        strategy: Strategy,
        *,
        device: torch.device,
        offload: bool,
    ) -> None:
        self._clip, self._strategy, self._device = job.clip, strategy, device
        self._here = pieces
        """What the strategy gives gradients to."""
        self._host = HostCopy(pieces) if offload and device.type != "cpu" else None
        self.pieces = self._host.pieces if self._host else pieces
        """What the optimizer updates."""
        self._on_gpu = device.type == "cuda" and all(p.value.device.type == "cuda" for p in self.pieces)
        self.optimizer = make_optimizer(job, self.pieces, kinds)
        self.schedule = call_user_code(job.schedule, "the job's schedule()", self.optimizer) if job.schedule else None

    def square(self) -> torch.Tensor:
        """The square of the global norm, on the device: the same number on every rank and under every plan."""
        gradients = [g for piece, g in self.gradients() if piece.owned and g.numel()]
        if not gradients:
            return self._strategy.sum_over_ranks(torch.zeros(1, dtype=torch.float64, device=self._device))
        norms = torch.stack(foreach_norm(gradients)).double()
        return self._strategy.sum_over_ranks(torch.dot(norms, norms).reshape(1).to(self._device))

    def apply(self, factor: float, norm: float, ready: Callable[[], None]) -> None:
        """Multiply the gradients by `factor`, clip what then has the norm `norm`, call `ready`, step. Then `finish`."""
        if self._clip is not None and norm > self._clip:
            factor *= self._clip / (norm + 1e-6)
        if factor != 1.0:
            foreach_mul_(self._gradients(), factor)
        ready()
        if self._host:
            self._host.gradients_down([p.value.grad for p in self._here])
        self.optimizer.step()
        if self._host:
            self._host.values_up()

    @property
    def decides_on_device(self) -> bool:
        """Whether the optimizer can be told to do nothing by a number that only the device knows."""
        optimizer = self.optimizer
        fused = all(group.get("fused") for group in optimizer.param_groups)
        return fused and self._on_gpu and getattr(optimizer, "_step_supports_amp_scaling", False)

    def apply_if_finite(self, found: torch.Tensor, samples: int | None, scale: float) -> None:
        """What `apply` does, without the host knowing the numbers: the fused kernel divides by the scale that it is
        given, and does nothing where it is told that something is not finite. Torch's own loss scaling works so.

        `found` is what the engine reads afterwards: loss, weight, parameters that were not reached, square of the norm.
        """
        divide: Any = scale if samples is None else found[1] * (scale / samples)
        every = found.sum()
        if samples is not None:
            every = every + found[1].reciprocal()  # a batch without weight is bad, too
        if self._clip is not None:
            # (norm / divide + 1e-6) / clip is what the norm is after the division over what it may be; below 1 nothing
            # is clipped. All of it times `divide`, in as few operators as there can be: a host starts each of them
            divide = (found[3].sqrt() / self._clip + divide * (1e-6 / self._clip)).clamp(min=divide)
        optimizer: Any = self.optimizer
        optimizer.grad_scale = None if _is_one(divide) else _single(divide, found.device)
        optimizer.found_inf = (every * 0.0).ne(0.0).float()  # of what is not finite, nothing makes a zero
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def finish(self) -> None:
        """The update is applied: the learning rate moves on, and the gradients are forgotten."""
        if self.schedule is not None:
            self.schedule.step()
        self._strategy.after_update()

    def gradients(self) -> list[tuple[Piece, torch.Tensor]]:
        """The final gradients of the pieces that have one."""
        return [(p, p.value.grad) for p in self._here if p.value.grad is not None]

    def _gradients(self) -> list[torch.Tensor]:
        return [g for _, g in self.gradients() if g.numel()]


def _is_one(value: object) -> bool:
    """Whether the host knows that it is 1."""
    return isinstance(value, float) and value == 1.0


def _single(value: Any, device: torch.device) -> torch.Tensor:
    """A number in single precision on the device."""
    return value.float() if isinstance(value, torch.Tensor) else torch.full((), value, device=device)
