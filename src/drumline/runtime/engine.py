"""The engine: one job under one plan, on this rank. `engine.step(batch)` does the same whatever the plan is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.environment import Place, connect, device_of
from ..data.loader import Loader
from ..data.stream import Batch, Micro, Stream, split
from ..errors import JobError, PlanError
from ..job import Job, guard
from ..plan import Plan, check
from ..trace.fake import call
from ..trace.running import with_values
from .build import build, choose
from .elementwise import check_elementwise
from .guards.guard import Guard, Guards
from .guards.moving import Moving
from .observe.record import Recorder
from .precision import computing, multiplying, to_device
from .scaler import LossScale
from .strategies.pieces import Kind, Part, Piece, assemble, kinds_of, rename
from .strategies.strategy import Strategy
from .update import Update
from .weights import seed_everything

if TYPE_CHECKING:
    from .build import Built
    from .checkpoint import Loaded, Saver
    from .parallel import SplitModel


def initialize(
    job: Job, plan: Plan | str | None = None, *, dtype: torch.dtype | None = None, threads: int | None = None,
    guards: Guards | None = None, flops_per_byte: float | None = None,
) -> Engine:  # fmt: skip
    """Set a job up on this rank: under `drumline train`, torchrun, srun or mpiexec, in `dl.spawn`, or all alone.

    Without a plan, every rank is a replica. `dtype` casts the model and its data (verification uses float64). `guards`
    say what happens when a number is not finite, and how often replicas are compared. `flops_per_byte` is what a byte
    between two stages of a pipeline costs, in operations of a device, where stages are balanced by counted work.
    """
    if isinstance(plan, str):
        plan = Plan.parse(plan)
    where = connect(backend=plan.backend if plan and plan.backend != "threads" else "auto")
    if plan is None:
        plan = Plan(dp=where.size)
    check(plan)
    if plan.processes != where.size:
        n = plan.processes
        raise PlanError(
            f"the plan {plan} is for {n} rank{'s' if n > 1 else ''}, but {where.size} were started",
            rule=f"{plan.equation} != {where.size} ranks" if n == plan.ranks else "backend=threads is one process",
            fix=f"dp={where.size}, or start {n} rank{'s' if n > 1 else ''}",
        )
    if plan.micro > job.batch_size:
        raise PlanError(
            f"micro={plan.micro} for batches of {job.batch_size}", rule="every micro-batch has at least one sample",
            fix=f"micro={job.batch_size} or less",
        )  # fmt: skip
    device = device_of(where)
    if threads and device.type == "cpu":
        torch.set_num_threads(threads)
    return Engine(job, plan, where=where, device=device, dtype=dtype, guards=guards, flops_per_byte=flops_per_byte)


@dataclass(frozen=True, slots=True, eq=False)
class _Facts:
    """What is known of a step before its update, perhaps by the device alone."""

    found: torch.Tensor
    """The sums of losses and of their weights, parameters that were not reached, the square of the norm."""
    samples: int | None
    """Samples of the batch, where the loss has weights of its own."""
    scale: float
    """What the loss was multiplied by."""


class Engine:
    """A job under a plan. Made by `initialize`."""

    def __init__(
        self, job: Job, plan: Plan, *, where: Place, device: torch.device, dtype: torch.dtype | None,
        guards: Guards | None = None, flops_per_byte: float | None = None,
    ) -> None:  # fmt: skip
        self.job, self.plan, self.device, self.dtype = job, plan, device, dtype
        self.rank, self.ranks = where.rank, where.size
        self.steps = 0
        """Optimizer steps applied so far."""
        self.position = 0
        """Batches of the job's data used so far; those that were skipped are in it."""
        self.guard = Guard(guards or Guards(), plan)
        self.note = ""
        """What a person should know of the last step: that its loss is a spike, or why it was skipped."""
        self.local_loss = torch.zeros(())
        """The sum of this rank's own losses of the last step."""
        self.grad_norm = 0.0
        """Global norm of the last step's gradients, before clipping."""
        if plan.zero or plan.chunk > 1 or plan.ep > 1 or plan.splits_model:
            check_elementwise(job, str(plan))
        self.split: SplitModel | None = None
        """The model, where the plan splits it."""
        self.data_ranks, self.data_index = self.ranks, self.rank
        """How many slices a batch has, and which one is this rank's."""
        if plan.splits_model:
            built = self._split(where, flops_per_byte)
        else:
            with with_values():  # the numbers of ranks are real in a dry run too
                chosen = choose(job, plan, device)
            self.strategy, self.group = chosen.strategy, chosen.group
            self.record = self.strategy.record = Recorder(self.rank, device, self.group)
            """What the last steps did, and when."""
            built = build(job, plan, chosen, device, dtype)
        self.model, self.module, self._norms = built.model, built.module, built.norms
        """The user's module, under its own names; what is called; norms whose statistics span the ranks."""
        self._parts = built.parts
        self.left_whole = built.left
        """What the plan's `chunk` or `ep` does not cut, by name, and why."""
        self.module.train()
        self.moving = Moving(self.model)
        """The buffers as they were before the step."""
        self.kinds = self._kinds(built)
        """Every parameter of the user's model, whole."""
        held = rename(self.strategy.pieces(), built.parts)
        user = self.split.template if self.split else self.model
        trained = built.spread.trained if built.spread else _trained(user, built.parts)
        self.frozen = [p for p in held if p.name not in trained]
        """What this rank holds of the parameters that are not trained."""
        self.update = Update(
            job, [p for p in held if p.name in trained], {k: v for k, v in self.kinds.items() if k in trained},
            self.strategy, device=device, offload=plan.offload == "optimizer",
        )  # fmt: skip
        self.scaler = LossScale() if plan.precision == "fp16" else None
        self.saver: Saver | None = None
        self.stream = Stream(
            job, guard(job.data, "the job's data()"), dp=self.data_ranks, index=self.data_index, micro=plan.micro
        )

    def _split(self, where: Place, flops_per_byte: float | None) -> Built:
        """Set up a plan that splits the model itself."""
        from .parallel import SplitModel, set_up

        built, split, self.strategy, self.group, self.record = set_up(
            self.job, self.plan, where.rank, self.device, self.dtype, weigh, flops_per_byte
        )
        assert isinstance(split, SplitModel)
        self.split = split
        self.data_ranks, self.data_index = split.places.data
        return built

    def _kinds(self, built: Built) -> dict[str, Kind]:
        if built.spread:
            return dict(built.spread.kinds)
        return self.split.places.kinds if self.split else kinds_of(self.model, self._parts)

    @property
    def holds(self) -> frozenset[str] | None:
        """The buffers that this rank answers for; None where every rank has them all."""
        return self.split.places.answers if self.split else None

    @property
    def replica(self) -> bool:
        """Whether this rank is of the first copy of the model."""
        return self.split.places.first_copy if self.split else True

    @property
    def pieces(self) -> list[Piece]:
        """What this rank updates."""
        return self.update.pieces

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The job's optimizer, on the pieces."""
        return self.update.optimizer

    @property
    def schedule(self) -> Any:
        """The job's learning-rate scheduler, or None."""
        return self.update.schedule

    @property
    def clock(self) -> dict[str, float]:
        """Seconds by phase of the last step."""
        return self.record.clock()

    @property
    def skipped(self) -> int:
        """Steps that were not applied, because they were not finite."""
        return self.position - self.steps

    @property
    def spans(self) -> bool:
        """Whether ranks meet inside of a forward: statistics of norms span them, and experts get all ranks' tokens."""
        return (bool(self._norms) or self.plan.ep > 1) and self.ranks > 1

    def part(self, name: str) -> Part:
        """What a parameter of this rank is of the user's."""
        return self._parts[name]

    def own_name(self, name: str) -> str:
        """A parameter's name in the user's model, where the plan has cut it into parts."""
        return self._parts[name].name if name in self._parts else name

    def data(self, steps: int | None = None) -> Iterator[Batch]:
        """This rank's slices of the next batches: the job's number of steps unless told otherwise."""
        with Loader(self.stream, workers=self.job.workers, pin=self.device.type == "cuda") as loader:
            for _ in range(self.job.steps if steps is None else steps):
                with self._phase("data"):
                    batch = loader.batch(self.position)
                yield batch

    def step(self, batch: Any) -> float:
        """One optimizer step on this rank's slice; the mean loss over all ranks.

        Takes what `data()` yields, or (input, target) of the caller's own loader.
        """
        batch = batch if isinstance(batch, Batch) else self._own_batch(batch)
        self.record.begin(batch.step)
        self.moving.keep()
        self.note = ""
        while True:
            done = False
            if self._may_run_ahead():
                loss, factor, done = self._ahead(batch)
            else:
                loss, factor = self.gradients_of(batch)
            if self.guard.finite(loss, self.grad_norm):
                self._apply(loss, factor, done=done)
                break
            if self.scaler is None or not math.isfinite(loss):
                self.note = f"skipped: {self.guard.bad(self, batch, loss, self.grad_norm)}"
                break
            self._overflowed(self.scaler)
        self.position += 1
        self.record.end()
        return loss

    def _apply(self, loss: float, factor: float, *, done: bool = False) -> None:
        """A good step: look whether the replicas agree, when it is time, and update, unless that is done already."""
        with self._phase("optimizer"):
            if not done:
                self.guard.compare(self)
                self.update.apply(factor, self.grad_norm, self.gradients_ready)
            self.update.finish()
        if self.scaler:
            self.scaler.went_well()
        self.steps += 1
        self.note = self.guard.spike(loss)

    def _may_run_ahead(self) -> bool:
        """Whether a GPU may be told of the update before the host knows whether the step is good.

        The GPU decides then by itself. The host must know first where replicas are compared, and where somebody looks
        at the gradients.
        """
        watched = "gradients_ready" in vars(self) or self.guard.compares(self.steps)
        return self.update.decides_on_device and not watched and self.split is None

    def _ahead(self, batch: Batch) -> tuple[float, float, bool]:
        """`gradients_of`, and the update before the host waits; whether there was one, if the step is good.

        There is none where some parameter was not reached: those that no rank has reached are to be left out.
        """
        facts = self._passes(batch)
        reached = self.strategy.unseen() == 0 and (self.ranks == 1 or type(self.strategy).unseen is Strategy.unseen)
        if reached:
            with self._phase("optimizer"):
                self.update.apply_if_finite(facts.found, facts.samples, facts.scale)
        loss, factor = self._read(facts)
        return loss, factor, reached

    def gradients_of(self, batch: Batch) -> tuple[float, float]:
        """Forward and backward of every micro-batch: the mean loss, and what the gradients are to be multiplied by."""
        return self._read(self._passes(batch))

    def _passes(self, batch: Batch) -> _Facts:
        """Forward and backward of every micro-batch, and the norm of the gradients. A GPU is only told to do it."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        scale = self.scaler.scale if self.scaler else 1.0
        weighted = False
        if self.split:
            self.split.begin()
        if self.split and self.split.places.pipelined:
            weighted = self._in_stages(batch, sums, scale)
        for i, micro in enumerate(batch.micros if not self.plan.pp > 1 else ()):
            seed_everything(_mix(self.job.seed, self.position, i, self.data_index))
            with self.strategy.accumulate(last=i == len(batch.micros) - 1), multiplying(self.plan.precision):
                with self._phase("forward"), computing(self.plan.precision, self.device):
                    total, weight, given = self.loss_of(micro)
                weighted |= given
                with self._phase("backward"):
                    # the sum over the ranks is divided by `divides`, so each contributes that many times its own
                    (total * (self.strategy.divides * scale / batch.samples)).backward()
                sums[:2] += torch.stack([total.detach().double(), weight])
        self.local_loss = sums[0].clone()
        if self.split and not self.split.places.counts:
            sums.zero_()  # another rank counts these samples
        with self._phase("communication"):
            unseen = self.strategy.unseen()
            if unseen:
                sums[2] = unseen
            if self.ranks > 1:
                with self.record.message("all_reduce", sums):
                    dist.all_reduce(sums, group=self.group)
            self.strategy.gather_gradients()
            return _Facts(torch.cat([sums, self.update.square()]), batch.samples if weighted else None, scale)

    def _read(self, facts: _Facts) -> tuple[float, float]:
        """The mean loss, and what the gradients are to be multiplied by. The host waits for a GPU only here."""
        with self._phase("communication"):
            loss_sum, weight_sum, unseen, square = self.numbers(facts.found)
            if unseen:
                self.strategy.drop_unseen()
        if not weight_sum:
            raise JobError(f"step {self.steps}: the batch has no weight", rule="the weights of a batch add up to > 0")
        loss = float(loss_sum / weight_sum)
        factor = (1.0 if facts.samples is None else facts.samples / weight_sum) / facts.scale
        self.grad_norm = factor * math.sqrt(square) if square >= 0 else math.nan
        return loss, factor

    def numbers(self, tensor: torch.Tensor) -> list[float]:
        """What the host must know of a step, read once: a dry run, which has no values, assumes some here."""
        read: list[float] = tensor.tolist()
        return read

    def _in_stages(self, batch: Batch, sums: torch.Tensor, scale: float) -> bool:
        """The micro-batches through the stages of a pipeline; whether the loss has weights of its own."""
        assert self.split is not None
        factor = self.strategy.divides * scale / batch.samples

        def seed(stage: int, micro: int) -> None:
            seed_everything(_mix(self.job.seed, self.position, micro, self.data_index, stage))

        with self.strategy.accumulate(last=False), multiplying(self.plan.precision):
            losses, weighted = self.split.train(batch.micros, factor, seed, self._phase)
        for total, weight, *_ in losses:
            sums[:2] += torch.stack([total.double(), weight.double()])
        with self._phase("communication"):
            self.split.finish()
        return weighted

    def _overflowed(self, scaler: LossScale) -> None:
        """The gradients are not finite: in fp16 the scale was too large, and the batch is run again."""
        self.strategy.forget()
        self.moving.undo()
        scaler.overflowed()

    def begin(self, micro: Micro) -> None:
        """Tell the norms whether this rank's slice of a micro-batch counts."""
        for norm in self._norms:
            norm.present = micro.samples > 0

    def loss_of(self, micro: Micro) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Sum and weight of the loss of one micro-batch, and whether the weight is the job's own."""
        if self.split:
            return self.split.loss_of(micro)
        self.begin(micro)
        value = to_device(micro.input, self.device, self.dtype)
        target = to_device(micro.target, self.device, self.dtype)
        loss = self.job.loss(call(self.module, value), target)
        return weigh(self.job, loss, value, target, micro.samples)

    def gradients_ready(self) -> None:
        """Called when the gradients are final and before they are applied; `verify` looks at them here."""

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter under the user's name, whole, on every rank."""
        found = [(p, p.value) for p in [*self.pieces, *self.frozen]]
        return assemble(self.kinds, found, self.strategy.group, self.device)

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by name, whole, on every rank: while they are there, that is in `gradients_ready`."""
        return assemble(self.kinds, self.update.gradients(), self.strategy.group, self.device)

    def evaluate(self, dataset: Any = None) -> dict[str, float]:
        """The loss and the job's metrics, exact however the samples divide over the ranks."""
        from .evaluate import evaluate

        return evaluate(self, dataset)

    def save(self, folder: str | Path, *, keep: int = 2, wait: bool = True) -> Path | None:
        """Save everything to a new checkpoint in `folder`, all ranks together; the newest `keep` stay there.

        Without `wait` this returns when everything is copied, and the training goes on while it is written; what goes
        wrong then is raised by the next save, or by `finish_saves`.
        """
        from .checkpoint import saver_of

        return saver_of(self, folder, keep=keep).save(wait=wait)

    def finish_saves(self) -> None:
        """Wait for what is being written, raise what went wrong, and let other jobs write to the folder."""
        saver, self.saver = self.saver, None
        if saver is not None:
            saver.close()

    def load(self, path: str | Path, *, other_data: bool = False) -> Loaded:
        """Go on from a checkpoint, or from the newest whole one in a folder, whatever plan it was saved under."""
        from .checkpoint import load

        return load(self, path, other_data=other_data)

    def load_weights(self, path: str | Path, *, strict: bool = True) -> None:
        """Take the weights alone: of a checkpoint, a safetensors file, a folder of Hugging Face's, or a .pt file."""
        from .checkpoint.weights import load_weights

        load_weights(self, path, strict=strict)

    def _own_batch(self, batch: Any) -> Batch:
        """A batch of the caller's own loader: this rank's samples, along the first dim."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise JobError(f"a batch is a {type(batch).__name__}", rule="a batch is (input, target), or from data()")
        n = total = _length(batch)
        if self.ranks > 1:
            count = torch.tensor([float(n)], dtype=torch.float64, device=self.device)
            dist.all_reduce(count, group=self.group)
            total = round(count.item() * self.data_ranks / self.ranks)
        parts = [part for part in split(n, self.plan.micro) if part]
        if len(parts) < self.plan.micro:
            raise JobError(
                f"{n} samples for micro={self.plan.micro}",
                rule="each rank gives at least one sample to every micro-batch",
            )
        micros = [Micro(_cut(batch[0], part), _cut(batch[1], part), len(part), 0) for part in parts]
        return Batch(self.steps, tuple(micros), total)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Clock a part of the step, and name it in traces."""
        named = torch.profiler.record_function(f"drumline:{name}") if _profiled() else nullcontext()
        with named, self.record.phase(name):
            yield


def _profiled() -> bool:
    """Whether a profiler is on: names that nobody reads cost time all the same."""
    return torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


def _trained(model: nn.Module, parts: Mapping[str, Part]) -> set[str]:
    """The names of the parameters that are trained; a rank may hold nothing of some."""
    names = (name for name, p in model.named_parameters() if p.requires_grad)
    return {parts[name].name if name in parts else name for name in names}


def weigh(job: Job, loss: Any, value: Any, target: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Sum and weight from what a loss or metric returned; a slice of no samples weighs nothing."""
    if isinstance(loss, tuple | list):
        total, weight, own = loss[0], _number(loss[1], loss[0]), True
    elif job.sample_weight is not None:
        weight, own = _number(job.sample_weight(value, target), loss), True
        # a mean over nothing is not a number, and counts nothing
        total = torch.where(weight.to(loss.device) > 0, loss * weight.to(loss.device, loss.dtype), 0.0)
    else:
        weight, own = _number(float(samples), loss), False
        total = loss * samples
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        what = tuple(total.shape) if isinstance(total, torch.Tensor) else type(total).__name__
        raise JobError(f"the loss is {what}", rule="the loss is one number (a mean), or (sum, weight)")
    if samples == 0:
        total, weight = torch.where(torch.zeros_like(total, dtype=torch.bool), total, 0.0), weight * 0.0
    return total.reshape(()), weight.to(total.device).reshape(()), own


def _number(value: Any, beside: Any) -> torch.Tensor:
    """A number where another tensor is. It is made there: the host would wait for a GPU to have copied it."""
    device = beside.device if isinstance(beside, torch.Tensor) else None
    if isinstance(value, torch.Tensor):
        return value.to(dtype=torch.float64)
    return torch.full((), float(value), dtype=torch.float64, device=device)


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
