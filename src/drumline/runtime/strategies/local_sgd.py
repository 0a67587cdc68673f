"""Local SGD (`sync=local:k`): every replica takes k steps by itself, then weights and optimizer states are averaged.

    step 1 .. k-1   own optimizer step, no message
    step k          own optimizer step, all-reduce of weights, changing buffers and optimizer states, divided by P

`sync_first=n` averages after each of the first n steps. `across=m` averages inside each host after every k-th step and
over all ranks after every m-th. `outer=` applies an outer optimizer to each average over all ranks (outer_optimizer.py)
once the first n steps are over.
"""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist

from ...plans import Plan
from ...schedules.averaging import ALL, HOST, AveragingSchedule
from ..state.buffer_snapshot import BufferSnapshot
from .independent import IndependentReplica
from .outer_optimizer import OuterOptimizer

ONE_HOST = "across={} has no effect: all ranks are on one host"


@final
class LocalSgd(IndependentReplica):
    """A replica that averages with all others every few steps. `host` is the group of its host, if hosts matter."""

    def __init__(self, group: dist.ProcessGroup, plan: Plan, host: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self._host, self._outer_rates = host, plan.outer_rates
        self._outer: OuterOptimizer | None = None
        self._schedule = AveragingSchedule(plan.sync_steps, plan.sync_first, plan.across if host is not None else 0)
        self._plain = True
        """Whether the next average has no outer step: that of the steps at the start."""
        if plan.across and host is None:
            self.remarks = (ONE_HOST.format(plan.across),)

    def attach(self, optimizer: torch.optim.Optimizer, buffers: BufferSnapshot) -> None:
        super().attach(optimizer, buffers)
        if self._outer_rates is not None:
            rate, momentum = self._outer_rates
            self._outer = OuterOptimizer(self._tensors.parameters, rate=rate, momentum=momentum)

    def meets(self, step: int) -> bool:
        return self._schedule.after(step) == ALL

    def _exchange(self, step: int) -> None:
        self._plain = step <= self._schedule.first
        group = self._schedule.after(step)
        if group == ALL:
            self._average_all()
        elif group == HOST and self._host is not None:
            self._average_over(self._host)

    def _average_all(self) -> None:
        super()._average_all()
        if self._outer is not None:
            self._outer.restart() if self._plain else self._outer.step()

    def values_loaded(self) -> None:
        super().values_loaded()
        if self._outer is not None:
            self._outer.restart()

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        """The outer momentum. The last result of the outer optimizer is the weights themselves."""
        return {f"outer/{name}": v for name, v in self._outer.velocities.items()} if self._outer else {}
