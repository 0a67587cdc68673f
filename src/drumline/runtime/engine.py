"""The engine: one job under one plan, on this rank. `engine.step(batch)` does the same whatever the plan is.

What a rank holds is made in held.py; the passes of a step are in passes.py, its second half in update.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..comm.environment import Place, connect, device_of
from ..core.errors import PlanError
from ..core.job import Job, guard
from ..datasets.loader import Loader
from ..datasets.stream import Batch, Micro, Stream
from ..plans import Plan, check
from ..tracing.fake import call
from .buffer_snapshot import Moving
from .elementwise import check_elementwise
from .guards.guard import Guard, Guards
from .held import hold
from .own_batch import own_batch
from .passes import read, run_passes
from .precision import to_device
from .scaler import LossScale
from .strategies.pieces import Part, Piece, assemble
from .strategies.strategy import Strategy
from .update import Update
from .weighing import weigh

if TYPE_CHECKING:
    from .checkpoint import Loaded, Saver


def initialize(
    job: Job,
    plan: Plan | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    threads: int | None = None,
    guards: Guards | None = None,
    flops_per_byte: float | None = None,
) -> Engine:
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
    _check_world(job, plan, where.size)
    device = device_of(where)
    if threads and device.type == "cpu":
        torch.set_num_threads(threads)
    return Engine(job, plan, where=where, device=device, dtype=dtype, guards=guards, flops_per_byte=flops_per_byte)


def _check_world(job: Job, plan: Plan, ranks: int) -> None:
    """Refuse a plan that these ranks, or this job's batches, cannot carry out."""
    check(plan)
    n = plan.processes
    if n != ranks:
        raise PlanError(
            f"the plan {plan} is for {n} rank{'s' if n > 1 else ''}, but {ranks} were started",
            rule=f"{plan.equation} != {ranks} ranks" if n == plan.ranks else "backend=threads is one process",
            fix=f"dp={ranks}, or start {n} rank{'s' if n > 1 else ''}",
        )
    if plan.micro > job.batch_size:
        raise PlanError(
            f"micro={plan.micro} for batches of {job.batch_size}",
            rule="every micro-batch has at least one sample",
            fix=f"micro={job.batch_size} or less",
        )


class Engine:
    """A job under a plan. Made by `initialize`."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        *,
        where: Place,
        device: torch.device,
        dtype: torch.dtype | None,
        guards: Guards | None = None,
        flops_per_byte: float | None = None,
    ) -> None:
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
        held = hold(job, plan, where, device, dtype, flops_per_byte)
        built = held.built
        self.strategy, self.group = held.strategy, held.group
        self.record = held.record
        """What the last steps did, and when."""
        self.split = held.split
        """The model, where the plan splits it."""
        self.data_ranks, self.data_index = held.slices
        """How many slices a batch has, and which one is this rank's."""
        self.model, self.module, self._norms = built.model, built.module, built.norms
        """The user's module, under its own names; what is called; norms whose statistics span the ranks."""
        self._parts = built.parts
        self.left_whole = built.left
        """What the plan's `chunk` or `ep` does not cut, by name, and why."""
        self.module.train()
        self.moving = Moving(self.model)
        """The buffers as they were before the step."""
        self.kinds = held.kinds()
        """Every parameter of the user's model, whole."""
        pieces, trained = held.pieces(), held.trained()
        self.frozen = [p for p in pieces if p.name not in trained]
        """What this rank holds of the parameters that are not trained."""
        self.update = Update(
            job,
            [p for p in pieces if p.name in trained],
            {k: v for k, v in self.kinds.items() if k in trained},
            self.strategy,
            device=device,
            offload=plan.offload == "optimizer",
        )
        self.scaler = LossScale() if plan.precision == "fp16" else None
        self.saver: Saver | None = None
        self.stream = Stream(
            job, guard(job.data, "the job's data()"), dp=self.data_ranks, index=self.data_index, micro=plan.micro
        )

    # -- what it has

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

    # -- a step

    def data(self, steps: int | None = None) -> Iterator[Batch]:
        """This rank's slices of the next batches: the job's number of steps unless told otherwise."""
        with Loader(self.stream, workers=self.job.workers, pin=self.device.type == "cuda") as loader:
            for _ in range(self.job.steps if steps is None else steps):
                with self.phase("data"):
                    batch = loader.batch(self.position)
                yield batch

    def step(self, batch: Any) -> float:
        """One optimizer step on this rank's slice; the mean loss over all ranks.

        Takes what `data()` yields, or (input, target) of the caller's own loader.
        """
        batch = batch if isinstance(batch, Batch) else own_batch(self, batch)
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
                self.apply(loss, factor, done=done)
                break
            if self.scaler is None or not math.isfinite(loss):
                self.note = f"skipped: {self.guard.bad(self, batch, loss, self.grad_norm)}"
                break
            self._overflowed(self.scaler)
        self.position += 1
        self.record.end()
        return loss

    def apply(self, loss: float, factor: float, *, done: bool = False) -> None:
        """A good step: look whether the replicas agree, when it is time, and update, unless that is done already."""
        with self.phase("optimizer"):
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
        facts = run_passes(self, batch)
        reached = self.strategy.unseen() == 0 and (self.ranks == 1 or type(self.strategy).unseen is Strategy.unseen)
        if reached:
            with self.phase("optimizer"):
                self.update.apply_if_finite(facts.found, facts.samples, facts.scale)
        loss, factor = read(self, facts)
        return loss, factor, reached

    def _overflowed(self, scaler: LossScale) -> None:
        """The gradients are not finite: in fp16 the scale was too large, and the batch is run again."""
        self.strategy.forget()
        self.moving.undo()
        scaler.overflowed()

    # -- the parts of a step, for those who take it apart or watch it

    def gradients_of(self, batch: Batch) -> tuple[float, float]:
        """Forward and backward of every micro-batch: the mean loss, and what the gradients are to be multiplied by."""
        return read(self, run_passes(self, batch))

    def numbers(self, tensor: torch.Tensor) -> list[float]:
        """What the host must know of a step, read once: a dry run, which has no values, assumes some here."""
        found: list[float] = tensor.tolist()
        return found

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

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Clock a part of the step, and name it in traces."""
        named = torch.profiler.record_function(f"drumline:{name}") if _profiled() else nullcontext()
        with named, self.record.phase(name):
            yield

    def gradients_ready(self) -> None:
        """Called when the gradients are final and before they are applied; `verify` looks at them here."""

    # -- the whole, and what is kept of it

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


def _profiled() -> bool:
    """Whether a profiler is on: names that nobody reads cost time all the same."""
    return torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled
