"""The engine: one job under one plan, on this rank. `engine.step(batch)` does the same whatever the plan is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..comm.environment import Place, connect, device_of
from ..data.stream import Batch, Micro, Stream, split
from ..errors import GaveUp, JobError, PlanError
from ..job import Job, guard
from ..plan import Plan, check
from ..trace.fake import call
from .batchnorm import span_statistics
from .elementwise import check_elementwise
from .precision import computing, to_device
from .recompute import recompute
from .replicate import Replicate
from .strategy import Strategy
from .unused import unused_parameters
from .weights import fill, seed_everything, seeded_model, shape_of_model
from .zero import Shard


def initialize(
    job: Job, plan: Plan | str | None = None, *, dtype: torch.dtype | None = None, threads: int | None = None
) -> Engine:
    """Set a job up on this rank: under `drumline train`, torchrun, srun or mpiexec, in `dl.spawn`, or all alone.

    Without a plan, every rank is a replica. `dtype` casts the model and its data (verification uses float64).
    """
    if isinstance(plan, str):
        plan = Plan.parse(plan)
    where = connect(backend=plan.backend if plan else "auto")
    if plan is None:
        plan = Plan(dp=where.size)
    if plan.ranks != where.size:
        raise PlanError(
            f"the plan {plan} is for {plan.ranks} rank{'s' if plan.ranks > 1 else ''}, but {where.size} were started",
            rule=f"{plan.equation} != {where.size} ranks",
            fix=f"dp={where.size}, or start {plan.ranks} ranks",
        )
    check(plan)
    if plan.micro > job.batch_size:
        raise PlanError(
            f"micro={plan.micro} for batches of {job.batch_size}", rule="every micro-batch has at least one sample",
            fix=f"micro={job.batch_size} or less",
        )  # fmt: skip
    device = device_of(where)
    if threads and device.type == "cpu":
        torch.set_num_threads(threads)
    return Engine(job, plan, where=where, device=device, dtype=dtype)


class Engine:
    """A job under a plan. Made by `initialize`."""

    def __init__(self, job: Job, plan: Plan, *, where: Place, device: torch.device, dtype: torch.dtype | None) -> None:
        self.job, self.plan, self.device, self.dtype = job, plan, device, dtype
        self.rank, self.ranks = where.rank, where.size
        self.steps = 0
        """Optimizer steps applied so far."""
        self.clock: dict[str, float] = {}
        """Seconds by phase of the last step."""
        self.grad_norm = 0.0
        """Global norm of the last step's gradients, before clipping."""
        mesh = init_device_mesh(device.type, (where.size,), mesh_dim_names=("dp",))
        self.group = mesh.get_group()
        self.strategy: Strategy
        if plan.zero == 3:
            check_elementwise(job, str(plan))
            self.strategy = Shard(mesh, precision=plan.precision)
        else:
            unused = where.size > 1 and unused_parameters(job)
            self.strategy = Replicate(self.group, bucket=plan.bucket, unused=unused)
        self.model = self._build()
        """The user's module, under its own names."""
        self.module.train()
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._held = [_held(p, self.strategy) for p in self._trained]
        """What this rank holds of each: a sharded optimizer works on plain tensors, which costs far less per call."""
        self.optimizer = guard(job.optimizer, "the job's optimizer()", self._held)
        if not hasattr(self.optimizer, "param_groups"):
            raise JobError(
                f"the job's optimizer() gave {type(self.optimizer).__name__}", rule="it returns a torch.optim.Optimizer"
            )
        self.schedule = guard(job.schedule, "the job's schedule()", self.optimizer) if job.schedule else None
        self.stream = Stream(
            job, guard(job.data, "the job's data()"), dp=where.size, index=where.rank, micro=plan.micro
        )

    def _build(self) -> nn.Module:
        """Make the model with the serial model's weights, then apply the plan's choices to it."""
        job, plan = self.job, self.plan
        sharded = plan.zero == 3 and self.ranks > 1
        source = seeded_model(job, self.dtype) if not sharded or self.rank == 0 else None
        model = shape_of_model(job, self.dtype) if sharded else source
        assert model is not None
        if not sharded:
            model.to(self.device)
        # torch's own BatchNorm refuses the bf16 weights that a sharded bf16 plan gathers
        own = self.ranks > 1 or (plan.zero == 3 and plan.precision == "bf16")
        self._norms = span_statistics(model, self.group) if own else []
        if plan.recompute == "full":
            recompute(model)
        self.module = self.strategy.wrap(model)
        if sharded:
            fill(model, source, self.group, self.device)
        return model

    def data(self, steps: int | None = None) -> Iterator[Batch]:
        """This rank's slices of the next batches: the job's number of steps unless told otherwise."""
        for _ in range(self.job.steps if steps is None else steps):
            with self._phase("data"):
                batch = self.stream.batch(self.steps)
            yield batch

    def step(self, batch: Any) -> float:
        """One optimizer step on this rank's slice; the mean loss over all ranks.

        Takes what `data()` yields, or (input, target) of the caller's own loader.
        """
        batch = batch if isinstance(batch, Batch) else self._own_batch(batch)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        weighted = False
        for i, micro in enumerate(batch.micros):
            seed_everything(_mix(self.job.seed, self.steps, i, self.rank))
            with self.strategy.accumulate(last=i == len(batch.micros) - 1):
                with self._phase("forward"), computing(self.plan.precision, self.device):
                    total, weight, given = self.loss_of(micro)
                weighted |= given
                with self._phase("backward"):
                    # the ranks' gradients are averaged, so each contributes its sum times their number
                    (total * (self.ranks / batch.samples)).backward()
                sums += torch.stack([total.detach().double(), weight])
        with self._phase("communication"):
            if self.ranks > 1:
                dist.all_reduce(sums, group=self.group)
            loss_sum, weight_sum = sums.tolist()
        if not weight_sum:
            raise JobError(f"step {self.steps}: the batch has no weight", rule="the weights of a batch add up to > 0")
        loss = float(loss_sum / weight_sum)
        if not math.isfinite(loss):  # before the update, so that the weights are those of the last good step
            raise GaveUp(f"the loss is {loss} at step {self.steps}", rule="training goes on while the loss is finite")
        with self._phase("optimizer"):
            self._update(batch.samples / weight_sum if weighted else 1.0)
        return loss

    def begin(self, micro: Micro) -> None:
        """Tell the norms whether this rank's slice of a micro-batch counts."""
        for norm in self._norms:
            norm.present = micro.samples > 0

    def loss_of(self, micro: Micro) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Sum and weight of the loss of one micro-batch, and whether the weight is the job's own."""
        self.begin(micro)
        value = to_device(micro.input, self.device, self.dtype)
        target = to_device(micro.target, self.device, self.dtype)
        loss = self.job.loss(call(self.module, value), target)
        return weigh(self.job, loss, value, target, micro.samples)

    def _update(self, correction: float) -> None:
        """Scale, measure and clip the gradients; step; forget them."""
        gradients = [self.strategy.local(p.grad) for p in self._trained if p.grad is not None]
        if correction != 1.0:
            torch._foreach_mul_(gradients, correction)
        norms = torch.stack([n.double() for n in torch._foreach_norm(gradients)])
        self.grad_norm = float(self.strategy.add_up(norms.square().sum()).sqrt())
        if self.job.clip is not None and self.grad_norm > self.job.clip:
            torch._foreach_mul_(gradients, self.job.clip / (self.grad_norm + 1e-6))
        self.gradients_ready()
        for p, held in zip(self._trained, self._held, strict=True):
            held.grad = None if p.grad is None else self.strategy.local(p.grad)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        for p, held in zip(self._trained, self._held, strict=True):
            p.grad = held.grad = None
        self.steps += 1

    def gradients_ready(self) -> None:
        """Called when the gradients are final and before they are applied; `verify` looks at them here."""

    def evaluate(self, dataset: Any = None) -> dict[str, float]:
        """The loss and the job's metrics, exact however the samples divide over the ranks."""
        from .evaluate import evaluate

        return evaluate(self, dataset)

    def _own_batch(self, batch: Any) -> Batch:
        """A batch of the caller's own loader: this rank's samples, along the first dim."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise JobError(f"a batch is a {type(batch).__name__}", rule="a batch is (input, target), or from data()")
        n = _length(batch)
        total = torch.tensor([float(n)], dtype=torch.float64, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(total, group=self.group)
        parts = [part for part in split(n, self.plan.micro) if part]
        if len(parts) < self.plan.micro:
            raise JobError(
                f"{n} samples for micro={self.plan.micro}",
                rule="each rank gives at least one sample to every micro-batch",
            )
        micros = [Micro(_cut(batch[0], part), _cut(batch[1], part), len(part), 0) for part in parts]
        return Batch(self.steps, tuple(micros), int(total.item()))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Clock a part of the step, and name it in traces."""
        if name == "data":
            self.clock = {}
        start = time.perf_counter()
        with torch.profiler.record_function(f"drumline:{name}"):
            yield
        if self.device.type == "cuda" and name in ("communication", "optimizer"):
            torch.cuda.synchronize(self.device)
        self.clock[name] = self.clock.get(name, 0.0) + time.perf_counter() - start


def _held(p: nn.Parameter, strategy: Strategy) -> nn.Parameter:
    local = strategy.local(p)
    return p if local is p else nn.Parameter(local.detach())


def weigh(job: Job, loss: Any, value: Any, target: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Sum and weight from what a loss or metric returned; a slice of no samples weighs nothing."""
    if isinstance(loss, tuple | list):
        total, weight, own = loss[0], torch.as_tensor(loss[1], dtype=torch.float64), True
    elif job.sample_weight is not None:
        weight, own = torch.as_tensor(job.sample_weight(value, target), dtype=torch.float64), True
        # a mean over nothing is not a number, and counts nothing
        total = torch.where(weight.to(loss.device) > 0, loss * weight.to(loss.device, loss.dtype), 0.0)
    else:
        weight, own = torch.tensor(float(samples), dtype=torch.float64), False
        total = loss * samples
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        what = tuple(total.shape) if isinstance(total, torch.Tensor) else type(total).__name__
        raise JobError(f"the loss is {what}", rule="the loss is one number (a mean), or (sum, weight)")
    if samples == 0:
        total, weight = torch.where(torch.zeros_like(total, dtype=torch.bool), total, 0.0), weight * 0.0
    return total.reshape(()), weight.to(total.device).reshape(()), own


def _mix(*numbers: int) -> int:
    """A seed of its own for every (seed, step, micro-batch, rank)."""
    seed = 0
    for n in numbers:
        seed = (seed * 6364136223846793005 + n + 1442695040888963407) % 2**63
    return seed


def _length(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.shape[0]
    for item in batch.values() if isinstance(batch, dict) else batch:
        if isinstance(item, torch.Tensor | dict | tuple | list):
            return _length(item)
    raise JobError("a batch holds no tensor", rule="a batch is (input, target)")


def _cut(value: Any, part: range) -> Any:
    if isinstance(value, torch.Tensor):
        return value[part.start : part.stop]
    if isinstance(value, dict):
        return {k: _cut(v, part) for k, v in value.items()}
    return type(value)(_cut(v, part) for v in value) if isinstance(value, tuple | list) else value
