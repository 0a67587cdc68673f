"""One job under one plan on this rank: its state, the gradients of a batch, and the update.

Guards and checkpoints work on this class; the engine adds them to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ...comm.environment import RankInfo
from ...comm.rank_status import rank_status
from ...core.errors import JobError
from ...core.job import Job
from ...datasets.sources import load_data, load_validation
from ...datasets.stream import RankBatch, RankMicroBatch, Stream
from ...plans import Plan
from ...torchkit.fake_tensors import has_no_values
from ...torchkit.profiler import spans_are_recorded
from ...tracing.op_costs import tensors
from ..numerics.elementwise import check_elementwise
from ..numerics.loss_scale import LossScale
from ..numerics.precision import float32_arithmetic
from ..parallel.model_parallel import ModelParallel
from ..state.buffer_snapshot import BufferSnapshot
from ..state.pieces import ParameterPart, Piece, assemble
from ..state.recorder import OpenPhase
from ..state.weight_average import WeightAverage
from .batches_in_flight import BatchesInFlight, refuse_clipping
from .callback_list import CallbackList
from .data_agreement import check_same_data
from .forward_backward import forward_backward, read_sums
from .job_checks import check_job
from .rank_state import build_rank_state
from .update import Update, show_values


class EngineCore:
    """A job under a plan, without guards and checkpoints."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        *,
        where: RankInfo,
        device: torch.device,
        dtype: torch.dtype | None,
        flops_per_byte: float | None = None,
    ) -> None:
        self.job, self.plan, self.device, self.dtype = job, plan, device, dtype
        self.rank, self.ranks = where.rank, where.size
        self.steps = 0
        """Optimizer steps applied so far."""
        self.position = 0
        """Batches of the job's data used so far, skipped ones too."""
        self.batches_missing: frozenset[int] = frozenset()
        """Batches that a loaded checkpoint has not used although it has used later ones: workers did not wait."""
        self.local_loss = torch.zeros(())
        """Sum of this rank's own losses of the last step."""
        self.grad_norm = 0.0
        """Norm of the last step's gradients, before clipping: over all ranks, or of this one where ranks step alone."""
        self.loss_weight = 0.0
        """Weight of the last step's loss: number of samples, unless the job weights them itself."""
        refuse_clipping(job, plan)
        in_parts = plan.chunk > 1 or plan.ep > 1 or plan.splits_model or plan.server_processes > 1
        cuts_tensors = bool(plan.zero) or in_parts
        if cuts_tensors or plan.precision == "bf16-pure":
            check_elementwise(job, str(plan))
        state = build_rank_state(job, plan, where, device, dtype, flops_per_byte)
        self.state = state
        self.strategy, self.group, self.record = state.strategy, state.group, state.record
        self.data_ranks, self.data_index = state.slices
        """Number of slices of a batch, and the index of this rank's."""
        self.model, self.module, self.template = state.model, state.module, state.template
        """This rank's part of the user's module; the module to call; the whole module, perhaps without values."""
        self.left_whole = state.left_whole
        """Modules that the plan's `chunk` or `ep` does not cut, and why."""
        self.module.train()
        self.buffer_snapshot = BufferSnapshot(self.model)
        """The buffers as they were before the step."""
        self.parameter_specs = state.specs
        """Every parameter of the user's model, whole."""
        if cuts_tensors:
            names = {k: len(v.shape) for k, v in self.parameter_specs.items() if k in state.trained}
            check_elementwise(job, str(plan), names)
        pieces = state.pieces()
        self.frozen = [p for p in pieces if p.name not in state.trained]
        """This rank's pieces of the parameters that are not trained."""
        self.update = Update(
            job,
            [p for p in pieces if p.name in state.trained],
            {k: v for k, v in self.parameter_specs.items() if k in state.trained},
            self.strategy,
            device=device,
            offload=plan.offload == "optimizer",
            applied=(lambda: self.steps) if plan.precision == "bf16-pure" else None,
        )
        check_job(job, plan, self.update.schedule)
        self.callbacks = CallbackList(job)
        self.strategy.attach(self.update.optimizer, self.buffer_snapshot)
        self.scaler = LossScale() if plan.precision == "fp16" else None
        self.in_flight: BatchesInFlight | None = None
        """The batches of a pipeline that does not drain between steps."""
        if plan.keeps_batches_in_flight:
            assert isinstance(self.strategy, ModelParallel)
            self.in_flight = BatchesInFlight(self, self.strategy)
        self.stream = Stream(
            job,
            load_data(job),
            dp=self.data_ranks,
            index=self.data_index,
            micro=plan.micro,
        )
        if not plan.has_coordinator and not any(has_no_values(p.value) for p in pieces):
            check_same_data(self)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces that this rank updates."""
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
        return self.record.phase_seconds()

    @property
    def meets_in_forward(self) -> bool:
        """Whether ranks exchange values inside a forward: statistics of norms, tokens of experts, parts of layers."""
        return (bool(self.state.norms) and self.ranks > 1) or self.strategy.holds_parts

    @property
    def step_ranks(self) -> int:
        """Number of ranks whose losses and gradients make one step."""
        return 1 if self.strategy.steps_alone else self.ranks

    def part(self, name: str) -> ParameterPart:
        """Range of a parameter of this rank within the user's parameter."""
        return self.state.parts[name]

    def user_name(self, name: str) -> str:
        """A parameter's name in the user's model, where the plan has cut it into parts."""
        return self.state.parts[name].name if name in self.state.parts else name

    def owns_buffer(self, name: str) -> bool:
        """Whether this rank answers for a buffer, in a checkpoint for example."""
        owned = self.state.owned_buffers
        return self.rank == 0 if owned is None else name in owned

    # -- the parts of a step, for callers that run or watch them one by one

    def gradients_of(self, batch: RankBatch) -> tuple[float, float]:
        """Forward and backward of every micro-batch: the mean loss, and the factor to multiply the gradients by."""
        self.drain()
        return read_sums(self, forward_backward(self, batch))

    def loss_of(self, micro: RankMicroBatch) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Forward of one micro-batch: sum and weight of its loss, and whether the job gave the weight."""
        return self.strategy.loss_of(micro)

    def read_numbers(self, tensor: torch.Tensor) -> list[float]:
        """Read the results of a step once; a dry run, which has no values, assumes some here."""
        values: list[float] = tensor.tolist()
        return values

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the step, and name it in traces and in this rank's status: `with engine.phase(name)`."""
        rank_status().phase(name)
        return self._profiled_phase(name) if spans_are_recorded() else OpenPhase(self.record, name)

    @contextmanager
    def _profiled_phase(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(f"drumline:{name}"), self.record.phase(name):
            yield

    @property
    def steps_in_flight(self) -> int:
        """Steps that were begun and are not applied on every rank yet; 0 unless the pipeline does not drain."""
        return self.in_flight.count if self.in_flight is not None else 0

    def drain(self) -> None:
        """Complete the steps that are in flight: afterwards all ranks have the weights after the last batch.

        Evaluation, checkpoints and whole tensors do so by themselves. All ranks call it together.
        """

    def losses_ready(self, losses: list[torch.Tensor]) -> None:
        """Called with this rank's loss of each micro-batch before they are summed; guards replace it."""

    def gradients_ready(self) -> None:
        """Called when the gradients are final and before they are applied; `verify` replaces it."""

    @torch.no_grad()
    def evaluate(self, dataset: Any = None, *, ema: bool = True) -> dict[str, float]:
        """The loss and the job's metrics over a dataset (the job's validation data, else its training data).

        Exact: every sample counts once, even if the samples do not divide over the ranks. Replicas that differ are
        evaluated as their average, and go on as they were. A job with `ema` is evaluated with its averaged weights,
        unless `ema` is false.
        """
        job = self.job
        self.drain()
        averaged = self.averaged_weights() if ema and self.average is not None else nullcontext()
        if dataset is None:
            dataset = load_validation(job) if job.validation else self.stream.dataset
        stream = Stream(job, dataset, dp=self.data_ranks, index=self.data_index, micro=self.plan.micro)
        sums: dict[str, torch.Tensor] = {}
        self.module.eval()
        try:
            with self.strategy.averaged(), averaged, float32_arithmetic(self.plan.precision, self.device):
                for samples in stream.source.one_pass():
                    micros = stream.cut(samples, self.steps).micros
                    rank_status().phase("evaluation")
                    for measured in self.strategy.evaluate(micros):
                        for name, pair in measured.items():
                            sums[name] = sums.get(name, torch.zeros_like(pair)) + pair
        finally:
            self.module.train()
        names = sorted(sums)
        table = torch.stack([sums[name] for name in names])
        if self.ranks > 1:
            dist.all_reduce(table, group=self.group)
        rank_status().phase("")
        pairs = zip(names, table.tolist(), strict=True)
        return {name: total / weight if weight else math.nan for name, (total, weight) in pairs}

    @property
    def average(self) -> WeightAverage | None:
        """The averaged weights of a job with `ema`."""
        return self.update.average

    def update_state(self) -> list[torch.Tensor]:
        """The tensors that the update keeps: the optimizer's state, and averaged weights."""
        states = [t for s in self.optimizer.state.values() for t in tensors(s)]
        return states + (self.average.tensors() if self.average is not None else [])

    def average_replicas(self) -> None:
        """Make all replicas their average, where each steps by itself; all ranks together. Otherwise nothing to do."""
        self.strategy.average()
        if self.average is not None and self.strategy.steps_alone:
            self.average.over_ranks(self.group)

    def weights_changed(self) -> None:
        """The pieces have new values: copy them to where the model reads them, as after an update."""
        show_values(self.pieces, self.strategy)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Around code that reads the averaged weights (`Job.ema`) in the place of the newest. All ranks together."""
        average = self.average
        assert average is not None, "Job.ema is not set"
        alone = self.strategy.steps_alone  # its pieces are the model's parameters themselves
        if alone:
            average.over_ranks(self.group)
        with average.shown((lambda: None) if alone else self.weights_changed):
            yield

    # -- whole tensors

    def whole_parameters(self, *, ema: bool = False) -> dict[str, torch.Tensor]:
        """Every parameter under the user's name, whole, on every rank; `ema`: the averaged weights (`Job.ema`)."""
        self.drain()
        values: list[tuple[Piece, torch.Tensor]] = [(p, p.value) for p in [*self.pieces, *self.frozen]]
        if ema:
            if self.average is None:
                raise JobError("the job has no averaged weights", rule="Job.ema is their decay", fix="ema=0.999")
            if self.strategy.steps_alone:
                self.average.over_ranks(self.group)
            values = [(p, self.average.of(p)) for p in self.pieces] + [(p, p.value) for p in self.frozen]
        return assemble(self.parameter_specs, values, self.strategy.group, self.device)

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by name, whole, on every rank; available inside `gradients_ready`."""
        return assemble(self.parameter_specs, self.update.gradients(), self.strategy.group, self.device)
