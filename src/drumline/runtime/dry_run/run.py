"""Runs the engine's own step on tensors without values, on one rank per pipeline stage, in a simulated world."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...comm.environment import RankInfo, device_of
from ...core.errors import DrumlineError, PlanError
from ...core.job import Job, user_line
from ...datasets.sources import load_data, open_source
from ...datasets.stream import RankBatch, RankMicroBatch, split_range
from ...plans import Plan, check
from ...torchkit.fake_tensors import VALUE_REQUESTS, DryRunMode, active_fake_mode
from ...tracing.autocast import HALF_DTYPES, GpuOperatorMode, gpu_autocast_lists
from ...tracing.fake import (
    MedianDraws,
    SampleForm,
    fake_batch,
    fake_model,
    move_model,
    trace_assumptions,
    untraceable_error,
)
from ...tracing.op_costs import tensors
from ..engine import Engine
from .kernel_memory import KernelWorkspaces
from .live_memory import LiveMemory, storage_bytes
from .process_group import MessageLog, RealDdpIntegers, fake_world
from .recurrent_layers import RecurrentStandIns
from .result import DryRun, DryRunRank

EMULATED = "GPU emulated on CPU tensors (its casts, masks and fused kernels): no GPU is available"
RECURRENT = (
    "GPU emulated on CPU tensors: the model is split, and torch cannot run a GPU's recurrent layers without values"
)
NOT_OFFLOADED = "what the plan offloads is counted on the device: a CPU has no other memory to offload to"


def dry_run(
    job: Job, plan: Plan | str, *, device: str | None = None, backend: str | None = None, ranks: list[int] | None = None
) -> DryRun:
    """Run one step of a job under a plan, at any world size, in this process, without allocating its memory.

    `device` is the device type whose operators run, `cpu` or `cuda` (default: the local one); `backend` is the one that
    the groups emulate (default: nccl on GPUs, else the plan's, or shm); `ranks` are the ranks to run (default: one per
    pipeline stage).
    """
    start = time.perf_counter()
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    check(plan)
    kind = device or device_of(RankInfo()).type
    has_gpu = torch.cuda.is_available()
    # the captured graph of a split model would contain the stand-ins
    emulated = kind == "cuda" and (not has_gpu or (plan.splits_model and _has_recurrent_layers(job)))
    emulated_backend = backend or ("nccl" if kind == "cuda" else "shm" if plan.backend == "auto" else plan.backend)
    data = load_data(job)
    source = open_source(job, data)
    sample = SampleForm(source.first_sample(), source)
    not_offloaded = plan.offload != "none" and (emulated or kind == "cpu")
    notes: dict[str, None] = dict.fromkeys(
        [RECURRENT if has_gpu else EMULATED] * emulated + [NOT_OFFLOADED] * not_offloaded
    )
    results = []
    with _without_gc(), _emulate_gpu(plan) if emulated else nullcontext():
        for rank in representative_ranks(plan) if ranks is None else ranks:
            dry_rank = _DryRank(
                replace(job, data=lambda: data),
                plan,
                rank,
                "cpu" if emulated else kind,
                emulated_backend,
                sample,
                min(job.batch_size, source.length or job.batch_size),
                emulated=emulated,
            )
            results.append(dry_rank.run())
            notes.update(dict.fromkeys(dry_rank.notes))
    return DryRun(str(plan), plan.processes, kind, tuple(results), time.perf_counter() - start, tuple(notes))


def _has_recurrent_layers(job: Job) -> bool:
    """Whether the model has torch's recurrent layers."""
    model, _ = fake_model(job, DryRunMode(allow_non_fake_inputs=True))
    return any(isinstance(m, nn.RNNBase) for m in model.modules())


@contextmanager
def _emulate_gpu(plan: Plan) -> Iterator[None]:
    """Emulate GPU-specific behaviour on CPU tensors."""
    with gpu_autocast_lists() if plan.precision in HALF_DTYPES else nullcontext(), GpuOperatorMode():
        yield


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disable garbage collection: with thousands of short-lived objects it costs a tenth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real run warns again
            yield
    finally:
        if collecting:
            gc.enable()
        gc.collect()


def representative_ranks(plan: Plan) -> list[int]:
    """The first rank of every pipeline stage: it has the largest part if parts differ."""
    return [stage * (plan.processes // plan.pp) for stage in range(plan.pp)]


class DryEngine(Engine):
    """An engine without values, which reports its phase to the message log and the memory counter."""

    def __init__(self, log: MessageLog, memory: LiveMemory, *arguments: Any, **named: Any) -> None:
        self._log, self._memory = log, memory
        self.gradients = 0
        """Bytes of the complete gradients of the last step."""
        super().__init__(*arguments, **named)

    def read_numbers(self, tensor: torch.Tensor) -> list[float]:
        """Values of a successful step: loss, weight, number of unreached parameters, norm."""
        gradients = [g for _, g in self.update.gradients()] + [p.grad for p in self.model.parameters()]
        size = storage_bytes([*gradients, *self.strategy.gradient_buffers()], self.device.type)
        # with batches in flight, numbers are read before the update and again when it is complete on all ranks
        self.gradients = size if self.in_flight is None else max(self.gradients, size + self._kept_gradients())
        return [1.0, 1.0, float(self.strategy.unreached()), 1.0]

    def _kept_gradients(self) -> int:
        """Bytes of complete gradients of batches in flight that the pieces do not show."""
        assert self.in_flight is not None
        batches = self.in_flight.stages.batches
        shown = {id(g) for _, g in self.update.gradients()}
        kept = [g for b in batches for _, g in self.in_flight.stages.gradients_of(b) if id(g) not in shown]
        return storage_bytes(kept, self.device.type)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step; messages and memory are attributed to it."""
        before = self._log.phase
        self._log.phase = self._memory.phase = name
        try:
            with super().phase(name):
                yield
        finally:
            self._log.phase = self._memory.phase = before


class _DryRank:
    """The dry run of one rank."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        rank: int,
        device: str,
        backend: str,
        sample: SampleForm,
        samples: int,
        *,
        emulated: bool,
    ) -> None:
        self.plan, self.rank, self.sample, self.samples = plan, rank, sample, samples
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.mode = DryRunMode(allow_non_fake_inputs=True)
        self._workspaces = KernelWorkspaces(self.device) if device == "cuda" else None
        separate = plan.splits_model or plan.zero == 3 or (plan.zero > 0 and plan.processes > 1)
        self._stand_ins = (
            RecurrentStandIns(self.device, plan.precision, separate_weights=separate) if device == "cuda" else None
        )
        self.log, self.memory = (
            MessageLog(backend),
            LiveMemory(device, workspaces=self._workspaces, rnn_reserve=emulated),
        )
        self.notes: list[str] = []
        self._name = "the model"
        self.job, self._original = replace(job, model=self._model), job

    def _model(self) -> nn.Module:
        """The job's model in the active mode: that of the rank, or that of a capture."""
        mode = active_fake_mode()
        if mode is None:  # shapes only, on the meta device
            return self._original.model()
        model, notes = fake_model(self._original, mode)
        self.notes += [*notes, *trace_assumptions(model)]
        self._name = type(model).__name__
        if self._stand_ins:
            self._stand_ins.install(model)
        sharded = self.plan.zero == 3 and (self.plan.processes > 1 or self.plan.offload == "all")
        if sharded or self.plan.splits_model:  # the caller moves it
            return model
        return move_model(model, mode, self.device, None)

    def run(self) -> DryRunRank:
        """Run a few steps; the last one is the result."""
        with torch.random.fork_rng(devices=[]), fake_world(self.rank, self.plan.processes, self.log):
            try:
                with self.mode, self.memory, MedianDraws(), RealDdpIntegers() if self._replicates else nullcontext():
                    return self._steps(self._engine())
            except DrumlineError:
                raise
            except VALUE_REQUESTS as e:
                raise untraceable_error(self._name, e) from e
            except Exception as e:
                raise PlanError(
                    f"the dry run of {self.plan} failed on rank {self.rank}: {type(e).__name__}: "
                    f"{(str(e).strip().splitlines() or [''])[0][:300]}",
                    where=user_line(e),
                    rule="the engine's own step runs on tensors without values",
                ) from e

    def _engine(self) -> DryEngine:
        where = RankInfo(self.rank, self.plan.processes)
        return DryEngine(self.log, self.memory, self.job, self.plan, where=where, device=self.device, dtype=None)

    def _steps(self, engine: DryEngine) -> DryRunRank:
        for _ in range(self._warmup_steps(engine)):
            engine.step(self._batch(engine))
        batch = self._batch(engine)
        self.memory.include(_resident(engine))
        self.memory.start()
        self.log.recording = True
        engine.step(batch)
        self.log.recording = False
        if self._workspaces and self._workspaces.refused:
            self.notes.append(f"workspace memory not counted for: {', '.join(self._workspaces.refused)}")
        kind = self.device.type
        state = engine.update_state()
        host = 0 if kind == "cpu" else storage_bytes([*state, *(p.value for p in engine.pieces)], "cpu")
        return DryRunRank(
            self.rank,
            tuple(self.log.messages),
            storage_bytes(engine.model.parameters(), kind),
            storage_bytes(engine.model.buffers(), kind),
            engine.gradients,
            storage_bytes(state, kind),
            storage_bytes(tensors([(m.input, m.target) for m in batch.micros]), kind),
            self.memory.peak,
            self.memory.peak_phase,
            host,
        )

    def _warmup_steps(self, engine: DryEngine) -> int:
        """Steps before the one that counts: the first creates the optimizer's state; in the second, DDP rebuilds its
        buckets and copies of constant buffers are freed."""
        fill = self.plan.pp if self.plan.keeps_batches_in_flight else 0  # until the pipeline is full
        return fill + (2 if self._replicates or any(True for _ in engine.model.buffers()) else 1)

    @property
    def _replicates(self) -> bool:
        plan = self.plan
        return plan.dp > 1 and not (plan.zero or plan.splits_model or plan.ep > 1)

    def _batch(self, engine: DryEngine) -> RankBatch:
        """This rank's slice of a batch, with samples shaped like the first one."""
        micros = []
        for part in split_range(self.samples, self.plan.micro):
            if part:
                mine = split_range(len(part), engine.data_ranks)[engine.data_index]
                value, target = fake_batch(self.mode, sample=self.sample, n=max(1, len(mine)))
                micros.append(RankMicroBatch(value, target, len(mine), len(part)))
        return RankBatch(engine.position, tuple(micros), self.samples)


def _resident(engine: DryEngine) -> list[Any]:
    """Tensors that exist before the step, besides those that operators of the warm-up created."""
    return [*engine.model.parameters(), *engine.model.buffers(), *engine.update_state()]
