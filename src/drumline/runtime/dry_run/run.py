"""Runs the engine's own step on tensors without values, for one rank of each kind, in a world that is not there."""

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

from ...comm.environment import Place, device_of
from ...core.errors import DrumlineError, PlanError
from ...core.job import Job, guard, line_of
from ...datasets.stream import Batch, Micro, check_dataset, split
from ...plans import Plan, check
from ...tracing.autocast import HALVES, AsOnGpu, as_gpu_casts
from ...tracing.draws import MiddleDraws
from ...tracing.fake import UNTRACEABLE, assumed, fake_batch, fake_model, moved, untraceable
from ...tracing.kinds import tensors
from ...tracing.running import RunningMode, active_mode
from ..engine import Engine
from .alive import Alive, storage_bytes
from .group import Book, fake_world
from .integers import RealIntegers
from .kernels import Kernels
from .recurrent import StandIns
from .value import DryRun, Rank

EMULATED = "as on a GPU: its casts, masks and fused kernels, on tensors of the CPU, because no GPU is here"
RECURRENT = (
    "as on a GPU, on tensors of the CPU: the model is split, and torch has no recurrent layers of a GPU without values"
)
STAYS = "what the plan offloads is counted here: on a CPU there is nowhere to take it"


def dry_run(
    job: Job, plan: Plan | str, *, device: str | None = None, backend: str | None = None, ranks: list[int] | None = None
) -> DryRun:
    """One step of a job under a plan, at any world size, in this process, without its memory.

    `device` is the kind whose operators run, `cpu` or `cuda` (default: what is here); `backend` what the groups stand
    for (default: nccl on GPUs, else what the plan says or shm); `ranks` are looked at (default: one of each kind).
    """
    start = time.perf_counter()
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    check(plan)
    kind = device or device_of(Place()).type
    here = torch.cuda.is_available()
    # of a model that is split the graph is captured, which would show stand-ins
    emulated = kind == "cuda" and (not here or (plan.splits_model and _recurs(job)))
    stands_for = backend or ("nccl" if kind == "cuda" else "shm" if plan.backend == "auto" else plan.backend)
    data = check_dataset(guard(job.data, "the job's data()"))
    sample = guard(data.__getitem__, "sample 0 of the dataset", 0)
    stays = plan.offload != "none" and (emulated or kind == "cpu")
    notes: dict[str, None] = dict.fromkeys([RECURRENT if here else EMULATED] * emulated + [STAYS] * stays)
    found = []
    with _quietly(), _as_gpu(plan) if emulated else nullcontext():
        for rank in kinds_of_ranks(plan) if ranks is None else ranks:
            one = _One(
                replace(job, data=lambda: data),
                plan,
                rank,
                "cpu" if emulated else kind,
                stands_for,
                sample,
                min(job.batch_size, len(data)),
                emulated=emulated,
            )
            found.append(one.run())
            notes.update(dict.fromkeys(one.notes))
    return DryRun(str(plan), plan.processes, kind, tuple(found), time.perf_counter() - start, tuple(notes))


def _recurs(job: Job) -> bool:
    """Whether a model has torch's own recurrent layers."""
    model, _ = fake_model(job, RunningMode(allow_non_fake_inputs=True))
    return any(isinstance(m, nn.RNNBase) for m in model.modules())


@contextmanager
def _as_gpu(plan: Plan) -> Iterator[None]:
    """Without a GPU: what one does in its own way, on tensors of the CPU."""
    with as_gpu_casts() if plan.precision in HALVES else nullcontext(), AsOnGpu():
        yield


@contextmanager
def _quietly() -> Iterator[None]:
    """Thousands of small objects come and go; looking for cycles among them costs a tenth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is worth a warning warns again in the real run
            yield
    finally:
        if collecting:
            gc.enable()
        gc.collect()


def kinds_of_ranks(plan: Plan) -> list[int]:
    """One rank of each kind: the first of every stage of a pipeline. It has the larger part wherever parts differ."""
    return [stage * (plan.processes // plan.pp) for stage in range(plan.pp)]


class DryEngine(Engine):
    """An engine that has no numbers to read, and says in which phase it is."""

    def __init__(self, book: Book, alive: Alive, *arguments: Any, **named: Any) -> None:
        self._book, self._alive = book, alive
        self.gradients = 0
        """Bytes of the memory in which the complete gradients of the last step lay."""
        super().__init__(*arguments, **named)

    def numbers(self, tensor: torch.Tensor) -> list[float]:
        """As after a step in which all went well: a loss, a weight, what the backward did not reach, a norm."""
        found = [g for _, g in self.update.gradients()] + [p.grad for p in self.model.parameters()]
        self.gradients = storage_bytes([*found, *self.strategy.buffers()], self.device.type)
        return [1.0, 1.0, float(self.strategy.unseen()), 1.0]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Clock a part of the step; messages and memory know it too."""
        before = self._book.phase
        self._book.phase = self._alive.phase = name
        try:
            with super().phase(name):
                yield
        finally:
            self._book.phase = self._alive.phase = before


class _One:
    """One rank."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        rank: int,
        device: str,
        backend: str,
        sample: tuple[Any, Any],
        samples: int,
        *,
        emulated: bool,
    ) -> None:
        self.plan, self.rank, self.sample, self.samples = plan, rank, sample, samples
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.mode = RunningMode(allow_non_fake_inputs=True)
        self._kernels = Kernels(self.device) if device == "cuda" else None
        placed = plan.splits_model or plan.zero == 3 or (plan.zero > 0 and plan.processes > 1)
        self._stand_ins = StandIns(self.device, plan.precision, apart=placed) if device == "cuda" else None
        self.book, self.alive = Book(backend), Alive(device, kernels=self._kernels, reserves=emulated)
        self.notes: list[str] = []
        self._name = "the model"
        self.job, self._plain = replace(job, model=self._model), job

    def _model(self) -> nn.Module:
        """The job's model in the mode of whoever asks: of the rank, or of those who capture it."""
        mode = active_mode()
        if mode is None:  # its shape alone, on the meta device
            return self._plain.model()
        model, notes = fake_model(self._plain, mode)
        self.notes += [*notes, *assumed(model)]
        self._name = type(model).__name__
        if self._stand_ins:
            self._stand_ins.place(model)
        sharded = self.plan.zero == 3 and (self.plan.processes > 1 or self.plan.offload == "all")
        if sharded or self.plan.splits_model:  # whoever asks moves it
            return model
        return moved(model, mode, self.device, None)

    def run(self) -> Rank:
        """The rank after a few steps."""
        with torch.random.fork_rng(devices=[]), fake_world(self.rank, self.plan.processes, self.book):
            try:
                with self.mode, self.alive, MiddleDraws(), RealIntegers() if self._replicates else nullcontext():
                    return self._steps(self._engine())
            except DrumlineError:
                raise
            except UNTRACEABLE as e:
                raise untraceable(self._name, e) from e
            except Exception as e:
                raise PlanError(
                    f"the dry run of {self.plan} failed on rank {self.rank}: {type(e).__name__}: "
                    f"{(str(e).strip().splitlines() or [''])[0][:300]}",
                    where=line_of(e),
                    rule="the engine's own step runs on tensors without values",
                ) from e

    def _engine(self) -> DryEngine:
        where = Place(self.rank, self.plan.processes)
        return DryEngine(self.book, self.alive, self.job, self.plan, where=where, device=self.device, dtype=None)

    def _steps(self, engine: DryEngine) -> Rank:
        for _ in range(self._warm(engine)):
            engine.step(self._batch(engine))
        batch = self._batch(engine)
        self.alive.include(_resident(engine))
        self.alive.start()
        self.book.open = True
        engine.step(batch)
        self.book.open = False
        if self._kernels and self._kernels.refused:
            self.notes.append(f"what these take for themselves is not counted: {', '.join(self._kernels.refused)}")
        kind = self.device.type
        state = [t for values in engine.optimizer.state.values() for t in tensors(values)]
        host = 0 if kind == "cpu" else storage_bytes([*state, *(p.value for p in engine.pieces)], "cpu")
        return Rank(
            self.rank,
            tuple(self.book.messages),
            storage_bytes(engine.model.parameters(), kind),
            storage_bytes(engine.model.buffers(), kind),
            engine.gradients,
            storage_bytes(state, kind),
            storage_bytes(tensors([(m.input, m.target) for m in batch.micros]), kind),
            self.alive.most,
            self.alive.most_phase,
            host,
        )

    def _warm(self, engine: DryEngine) -> int:
        """Steps before the one that is looked at: the first makes the optimizer's state. In the second, DDP settles its
        buckets, and copies of buffers that do not move are given back."""
        return 2 if self._replicates or any(True for _ in engine.model.buffers()) else 1

    @property
    def _replicates(self) -> bool:
        plan = self.plan
        return plan.dp > 1 and not (plan.zero or plan.splits_model or plan.ep > 1)

    def _batch(self, engine: DryEngine) -> Batch:
        """This rank's slice of a batch, of samples like the first one."""
        micros = []
        for part in split(self.samples, self.plan.micro):
            if part:
                mine = split(len(part), engine.data_ranks)[engine.data_index]
                value, target = fake_batch(self.job, self.mode, sample=self.sample, n=max(1, len(mine)))
                micros.append(Micro(value, target, len(mine), len(part)))
        return Batch(engine.position, tuple(micros), self.samples)


def _resident(engine: DryEngine) -> list[Any]:
    """What is there before the step, beside what operators of the warm-up made."""
    state = [t for values in engine.optimizer.state.values() for t in tensors(values)]
    return [*engine.model.parameters(), *engine.model.buffers(), *state]
