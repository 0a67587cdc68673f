"""What happens between the last backward and the next forward: one norm for all ranks, clipping, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..job import Job, guard
from .memory.offload import Host
from .optimizer import make_optimizer
from .strategies.pieces import Kind, Piece
from .strategies.strategy import Strategy


class Update:
    """The optimizer on this rank's pieces, on the device or in host memory."""

    def __init__(
        self, job: Job, pieces: list[Piece], kinds: Mapping[str, Kind], strategy: Strategy, *, device: torch.device,
        offload: bool,
    ) -> None:  # fmt: skip
        self._clip, self._strategy, self._device = job.clip, strategy, device
        self._here = pieces
        """What the strategy gives gradients to."""
        self._host = Host(pieces) if offload and device.type != "cpu" else None
        self.pieces = self._host.pieces if self._host else pieces
        """What the optimizer updates."""
        self.optimizer = make_optimizer(job, self.pieces, kinds)
        self.schedule = guard(job.schedule, "the job's schedule()", self.optimizer) if job.schedule else None

    def square(self) -> torch.Tensor:
        """The square of the global norm, on the device: the same number on every rank and under every plan."""
        gradients = [g for piece, g in self.gradients() if piece.counts and g.numel()]
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients)).double()
            total = norms.square().sum(0, keepdim=True).to(self._device)
        return self._strategy.add_up(total)

    def apply(self, factor: float, norm: float, ready: Callable[[], None]) -> None:
        """Multiply the gradients by `factor`, clip what then has the norm `norm`, call `ready`, step."""
        if self._clip is not None and norm > self._clip:
            factor *= self._clip / (norm + 1e-6)
        if factor != 1.0:
            torch._foreach_mul_(self._gradients(), factor)
        ready()
        if self._host:
            self._host.gradients_down([p.value.grad for p in self._here])
        self.optimizer.step()
        if self._host:
            self._host.values_up()
        if self.schedule is not None:
            self.schedule.step()
        self._strategy.updated()

    def gradients(self) -> list[tuple[Piece, torch.Tensor]]:
        """The final gradients of the pieces that have one."""
        return [(p, p.value.grad) for p in self._here if p.value.grad is not None]

    def _gradients(self) -> list[torch.Tensor]:
        return [g for _, g in self.gradients() if g.numel()]

