"""The reference of replicas that step by themselves: all of them in one process, mixed as the algorithm is defined.

It shares no code with the strategies: each replica is a plain loop over its slices, an average is a mean of copies,
gossip is a product with the mixing matrix W (w_i <- sum_j W_ij w_j), and the outer optimizer is torch's own SGD.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ...core.job import Job
from ...datasets.sources import load_data
from ...datasets.stream import RankBatch, Stream
from ...plans import Plan
from ...schedules import random_partner
from ...tracing.fake import call_model
from ..numerics.precision import compute_precision, float32_arithmetic, to_device
from ..state.optimizer import waits_for_metric
from ..state.weights import seeded_model


class ReferenceReplica:
    """One replica: its model, its optimizer, and its slices of the batches."""

    def __init__(
        self, job: Job, plan: Plan, index: int, *, device: torch.device, dtype: torch.dtype | None, precision: str
    ) -> None:
        self.job, self.device, self.dtype, self.precision = job, device, dtype, precision
        self.model = seeded_model(job, dtype).to(device).train()
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = job.optimizer_on(self.trained.items())
        self.schedule = job.schedule(self.optimizer) if job.schedule else None
        self.stream = Stream(job, load_data(job), dp=plan.dp, index=index, micro=plan.micro)
        self.first_gradients: dict[str, torch.Tensor] = {}
        self.largest: dict[str, torch.Tensor] = {}
        """The largest absolute gradient over all steps, per element."""

    def step(self, batch: RankBatch) -> tuple[float, float]:
        """One optimizer step on the replica's slice of a batch; the sum and the weight of its loss."""
        loss_sum = weight_sum = 0.0
        for micro in batch.micros:
            if micro.samples:
                total, weight = self._loss(micro.input, micro.target, micro.samples)
                with float32_arithmetic(self.precision, self.device):
                    total.backward()
                loss_sum, weight_sum = loss_sum + float(total.detach()), weight_sum + weight
        if weight_sum:
            self._prepare_gradients(weight_sum)
        else:
            self.model.zero_grad()
        self.optimizer.step()
        if self.schedule is not None and not waits_for_metric(self.schedule):
            self.schedule.step()
        self.model.zero_grad()
        return loss_sum, weight_sum

    def _loss(self, given: Any, wanted: Any, samples: int) -> tuple[torch.Tensor, float]:
        value, target = (to_device(part, self.device, self.dtype) for part in (given, wanted))
        with float32_arithmetic(self.precision, self.device), compute_precision(self.precision, self.device):
            loss = self.job.loss(call_model(self.model, value), target)
        if isinstance(loss, tuple | list):
            return loss[0], float(loss[1])
        weight = float(self.job.sample_weight(value, target)) if self.job.sample_weight else float(samples)
        return torch.where(torch.tensor(weight > 0, device=loss.device), loss * weight, 0.0), weight

    def _prepare_gradients(self, weight: float) -> None:
        """Divide by the weight of the slice, and clip by its own norm."""
        gradients = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        for g in gradients.values():
            g.div_(weight)
        if self.job.clip is not None:
            norm = math.sqrt(sum(float(g.abs().double().square().sum()) for g in gradients.values()))
            for g in gradients.values():
                g.mul_(min(1.0, self.job.clip / (norm + 1e-6)))
        self.first_gradients = self.first_gradients or {k: g.cpu().clone() for k, g in gradients.items()}
        for name, g in gradients.items():
            size = g.abs().cpu()
            self.largest[name] = torch.maximum(size, self.largest.get(name, size))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Trained parameters and floating-point buffers."""
        buffers = {name: b for name, b in self.model.named_buffers() if b.is_floating_point()}
        return {**{name: p.detach() for name, p in self.trained.items()}, **buffers}

    def state(self, name: str) -> dict[str, Any]:
        """The optimizer's state of a parameter."""
        state: dict[str, Any] = self.optimizer.state[self.trained[name]]
        return state


@torch.no_grad()
def mix(replicas: Sequence[ReferenceReplica], matrix: torch.Tensor) -> None:
    """Replace the weights of replica i by the sum over j of matrix[i, j] times those of j."""
    for name in replicas[0].weights:
        copies = [replica.weights[name].clone() for replica in replicas]
        for i, replica in enumerate(replicas):
            parts = [copy * float(matrix[i, j]) for j, copy in enumerate(copies) if matrix[i, j]]
            replica.weights[name].copy_(torch.stack(parts).sum(0))


@torch.no_grad()
def average(replicas: Sequence[ReferenceReplica]) -> None:
    """Give replicas the mean of their weights and optimizer states, and the step counters of the furthest."""
    n = len(replicas)
    mix(replicas, torch.full((n, n), 1.0 / n, dtype=torch.float64))
    for name in replicas[0].trained:
        states = [replica.state(name) for replica in replicas]
        for key in {key for state in states for key in state}:
            values = [state[key] for state in states if isinstance(state.get(key), torch.Tensor)]
            if key == "step":
                furthest = max(float(value) for value in values)
                for state in states:
                    state[key] = torch.full_like(values[0], furthest)
            elif values:
                mean = torch.stack(values).sum(0) / n  # one that lacks it counts as zero
                for state in states:
                    state[key] = mean.clone()


class OuterReference:
    """The outer optimizer, as torch's SGD on the weights that all replicas start from."""

    def __init__(self, replica: ReferenceReplica, rates: tuple[float, float]) -> None:
        rate, momentum = rates
        self._start = {name: nn.Parameter(p.detach().clone()) for name, p in replica.trained.items()}
        self._sgd = torch.optim.SGD(self._start.values(), lr=rate, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def step(self, replicas: Sequence[ReferenceReplica]) -> None:
        """Step from the average that all replicas are, and give them the result."""
        for name, start in self._start.items():
            start.grad = start.detach() - replicas[0].trained[name]
        self._sgd.step()
        for replica in replicas:
            for name, p in replica.trained.items():
                p.copy_(self._start[name])


class ReplicaReference:
    """All replicas of a plan. `hosts` are their numbers by host."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        hosts: Sequence[Sequence[int]],
        *,
        device: torch.device,
        dtype: torch.dtype | None,
        precision: str,
    ) -> None:
        self.job, self.plan, self.hosts = job, plan, hosts
        self.replicas = [
            ReferenceReplica(job, plan, i, device=device, dtype=dtype, precision=precision) for i in range(plan.dp)
        ]
        self._outer = OuterReference(self.replicas[0], plan.outer_rates) if plan.outer_rates else None
        self._averaged = True

    def run(self, steps: int, computing: Callable[[], AbstractContextManager[None]]) -> list[float]:
        """Train; the mean loss of every step. `computing` is entered around each replica's step.

        In the end all replicas are averaged, if they are not equal already.
        """
        losses = []
        for number in range(steps):
            sums = []
            for replica in self.replicas:
                batch = replica.stream.batch(number)
                with computing():
                    sums.append(replica.step(batch))
            losses.append(sum(loss for loss, _ in sums) / sum(weight for _, weight in sums))
            self._averaged = False
            self._after_gossip(number + 1) if self.plan.sync_mode == "gossip" else self._after_local(number + 1)
        if not self._averaged:
            self._average_all(plain=False)
        return losses

    def _after_local(self, step: int) -> None:
        """Average after step `step`, counted from 1."""
        plan = self.plan
        apart = plan.across > 0 and len(self.hosts) > 1
        if step <= plan.sync_first:
            self._average_all(plain=True)
        elif step % (plan.across if apart else plan.sync_steps) == 0:
            self._average_all(plain=False)
        elif apart and step % plan.sync_steps == 0:
            for host in self.hosts:
                average([self.replicas[i] for i in host])

    def _average_all(self, *, plain: bool) -> None:
        average(self.replicas)
        first = dict(self.replicas[0].model.named_buffers())
        for replica in self.replicas[1:]:
            for name, buffer in replica.model.named_buffers():  # counters are those of the first replica
                buffer.copy_(first[name])
        self._averaged = True
        if self._outer is not None and self.plan.outer_rates is not None:
            if plain:  # the outer optimizer begins after the first steps
                self._outer = OuterReference(self.replicas[0], self.plan.outer_rates)
            else:
                self._outer.step(self.replicas)

    def _after_gossip(self, step: int) -> None:
        n = self.plan.dp
        matrix = torch.zeros(n, n, dtype=torch.float64)
        for i in range(n):
            if self.plan.sync == "gossip:random":
                partner = random_partner(i, n, seed=self.job.seed, step=step)
                others = {i} if partner is None else {i, partner}
            else:
                others = {i, (i + 1) % n, (i - 1) % n}
            for j in others:
                matrix[i, j] = 1.0 / len(others)
        assert torch.allclose(matrix, matrix.T) and torch.allclose(matrix.sum(0), torch.ones(n, dtype=torch.float64))
        mix(self.replicas, matrix)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters and floating-point buffers of the first replica."""
        return {name: t.detach().cpu() for name, t in self.replicas[0].weights.items()}

    @property
    def largest(self) -> dict[str, torch.Tensor]:
        """The largest absolute gradient of any replica in any step, per element."""
        tables = [replica.largest for replica in self.replicas]
        names = {name for table in tables for name in table}
        return {name: torch.stack([t[name] for t in tables if name in t]).amax(0) for name in names}
