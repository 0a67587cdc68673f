"""`graph=true`: the step of a GPU as CUDA graphs, captured once and replayed.

A small model's GPU waits for its host, which launches kernel after kernel. A graph is launched as a whole:

    first     forward and backward of the first micro-batch; begins with the copy of the buffers
    more      the same for each later micro-batch, added to the gradients and to the losses
    update    norm of the gradients, clipping, the check for finite values, the optimizer

Random numbers are seeded on the host before each micro-batch, and a graph reads the seed when it is replayed, so masks
are those of the plain engine. The learning rate is a number on the device, written before a replay when it has changed.
All else is fixed: a step is captured again when its loss scale, another number of the optimizer, or the optimizer's
states have changed. The first steps run plainly, which sets up libraries and the optimizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.errors import JobError, PlanError
from ...core.job import Job
from ...datasets.seeding import mix_seed
from ...datasets.stream import RankBatch, RankMicroBatch
from ...plans import Plan
from ...torchkit.optimizers import mark_fused
from ...torchkit.pytree import tree_flatten, tree_unflatten
from ..numerics.precision import to_device
from ..state.weights import seed_everything
from ..strategies.strategy import StepContext
from .forward_backward import StepSums

if TYPE_CHECKING:
    from .engine_core import EngineCore

PLAIN_STEPS = 3
"""Good steps in a row before a capture: libraries choose kernels, and it is known which buffers change."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers whose fused kernels skip a step that is not finite, and read the learning rate from the device."""
_NOT_CAPTURED = ("params", "lr", "initial_lr", "capturable")


class StepGraph:
    """The captured step of one engine."""

    def __init__(self, engine: EngineCore) -> None:
        check_capture(engine)
        self._engine = engine
        self._stream = torch.cuda.Stream(engine.device)
        self._plain = 0
        """Good plain steps in a row since the last change."""
        self._rates = [torch.zeros((), device=engine.device) for _ in engine.optimizer.param_groups]
        self._written: list[float] = []
        """The learning rates on the device."""
        self._exact = any(p.value.dtype == torch.float64 for p in engine.pieces)
        """Fused kernels read float32 rates; for float64, in which plans are verified, rates are captured instead."""
        self._captured: _Captured | None = None
        self._update: tuple[object, torch.cuda.CUDAGraph, StepSums] | None = None
        engine.optimizer.register_load_state_dict_post_hook(lambda _: self.reset())

    def reset(self) -> None:
        """Forget what was captured: tensors of the model or of the optimizer are others now."""
        self._captured = self._update = None
        self._plain = 0

    @property
    def is_captured(self) -> bool:
        """Whether the next step is replayed: it copies the buffers itself."""
        return self._captured is not None

    @contextmanager
    def plain_step(self) -> Iterator[None]:
        """Around a step before the capture: on the stream of the capture, so that autograd meets no other."""
        current = torch.cuda.current_stream(self._engine.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def note_step(self, *, good: bool) -> None:
        """Count a plain step that has ended."""
        self._plain = self._plain + 1 if good else 0

    @property
    def is_ready(self) -> bool:
        """Whether a step can be captured, or is."""
        return self._captured is not None or self._plain >= PLAIN_STEPS

    def run(self, batch: RankBatch, *, update: bool) -> StepSums:
        """Forward and backward of a batch, and the update unless the host decides: captured first if need be."""
        engine = self._engine
        scale = engine.scaler.scale if engine.scaler else 1.0
        if self._captured is None or self._captured.scale != scale:
            self._captured = self._update = None
            self._captured = _Captured(engine, batch, scale, self._stream)
        captured = self._captured
        captured.check(batch)
        with engine.phase("graph"):
            for i, micro in enumerate(batch.micros):
                captured.load(micro)
                seed_everything(mix_seed(engine.job.seed, engine.position, i, engine.data_index))
                captured.graphs[min(i, 1)].replay()
        if not update:
            captured.show_gradients()
            return captured.sums(engine)
        with engine.phase("optimizer"):
            return self._replay_update(captured)

    def show_gradients(self) -> None:
        """Give the parameters the gradients of the replayed step, for callers that look at them."""
        if self._captured is not None:
            self._captured.show_gradients()

    def _replay_update(self, captured: _Captured) -> StepSums:
        groups = self._engine.optimizer.param_groups
        rates = [float(group["lr"]) for group in groups]
        fixed = [{k: v for k, v in group.items() if k not in _NOT_CAPTURED} for group in groups]
        key = fixed, rates if self._exact else None
        if self._update is None or self._update[0] != key:
            self._update = None
            self._update = (key, *self._capture_update(captured))
        if rates != self._written:
            for tensor, rate in zip(self._rates, rates, strict=True):
                tensor.fill_(rate)
            self._written = rates
        _, graph, sums = self._update
        graph.replay()
        return sums

    def _capture_update(self, captured: _Captured) -> tuple[torch.cuda.CUDAGraph, StepSums]:
        engine, graph = self._engine, torch.cuda.CUDAGraph()
        captured.show_gradients()
        with _captures(engine, graph, captured.pool, self._stream), self._capturable(engine.optimizer):
            sums = captured.sums(engine)
            engine.update.apply_if_finite(sums.values, sums.samples, sums.scale)
        engine.strategy.drop_gradients()
        return graph, sums

    @contextmanager
    def _capturable(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """The optimizer as a capture needs it: it reads the learning rates from the device."""
        before = [dict(group) for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            if "capturable" in group:
                group["capturable"] = True
            group["lr"] = float(group["lr"]) if self._exact else rate
        try:
            yield
        finally:
            for group, old in zip(optimizer.param_groups, before, strict=True):
                group.update({k: old[k] for k in ("lr", "capturable") if k in old})


class _Captured:
    """Forward and backward of one step, captured for batches of one form."""

    def __init__(self, engine: EngineCore, batch: RankBatch, scale: float, stream: torch.cuda.Stream) -> None:
        self.scale, self._samples = scale, batch.samples
        self._micros = len(batch.micros)
        self._device, self._dtype = engine.device, engine.dtype
        self._weighted = False
        self._form = _form(batch.micros[0])
        self.check(batch)
        placed, self._tree = tree_flatten((batch.micros[0].input, batch.micros[0].target))
        self._inputs = [_own(value, engine) for value in placed]
        self.pool = torch.cuda.graph_pool_handle()
        self._totals: torch.Tensor
        """Sum of the losses, sum of their weights, and 0 for the number of unreached parameters."""
        self.graphs = [self._capture(engine, batch, stream, begins=True)]
        if len(batch.micros) > 1:
            self.graphs.append(self._capture(engine, batch, stream, begins=False))
        self._gradients = [(p.value, p.value.grad) for p in engine.pieces]
        engine.strategy.drop_gradients()

    def check(self, batch: RankBatch) -> None:
        """Refuse a batch of another form: it would be computed with a step captured for the first."""
        forms = [_form(micro) for micro in batch.micros]
        if (len(forms), batch.samples) == (self._micros, self._samples) and all(f == self._form for f in forms):
            return
        other = next((f for f in forms if f != self._form), forms[0])
        raise JobError(
            f"graph=true: step {batch.step} has {batch.samples} samples in {len(forms)} micro-batches of {other[1:]}",
            rule=f"a captured step has fixed shapes: {self._samples} samples, {self._micros} x {self._form[1:]}",
            fix="batches of one size (drop the last of an epoch), or graph=false",
        )

    def load(self, micro: RankMicroBatch) -> None:
        """Copy a micro-batch to where the graph reads it."""
        values, _ = tree_flatten((micro.input, micro.target))
        for own, value in zip(self._inputs, values, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(value, non_blocking=True)

    def sums(self, engine: EngineCore) -> StepSums:
        """The sums of the step, with the norm of the gradients."""
        values = torch.cat([self._totals, engine.update.square().reshape(1)])
        return StepSums(values, self._samples if self._weighted else None, self.scale)

    def show_gradients(self) -> None:
        """Give the parameters the gradients that the graphs write."""
        for p, gradient in self._gradients:
            p.grad = gradient

    def _capture(self, engine: EngineCore, batch: RankBatch, stream: torch.cuda.Stream, *, begins: bool) -> Any:
        value, target = tree_unflatten(self._inputs, self._tree)
        micro = replace(batch.micros[0], input=value, target=target)
        context = StepContext(
            engine.plan.precision, engine.device, self.scale, engine.loss_of, lambda _: nullcontext(), lambda *_: None
        )
        graph = torch.cuda.CUDAGraph()
        if begins:
            engine.strategy.drop_gradients()
        with _same_random_numbers(engine), _captures(engine, graph, self.pool, stream):
            if begins:
                engine.buffer_snapshot.save()
            losses, self._weighted = engine.strategy.forward_backward(replace(batch, micros=(micro,)), context)
            ((total, weight),) = losses
            totals = torch.stack([total, weight, total.new_zeros(())])
            if begins:
                self._totals, engine.local_loss = totals, totals[0]
            else:
                self._totals.add_(totals)
        return graph


def check_capture(engine: EngineCore) -> None:
    """Refuse, by name, a device, a job or an optimizer whose step cannot be captured."""
    plan, optimizer = engine.plan, engine.optimizer
    if engine.device.type != "cuda":
        raise _refused(plan, f"on a {engine.device.type}", "a CUDA graph is launched on a GPU")
    check_batches(engine.job, plan, engine.stream.source.length)
    prefer_fused_kernel(optimizer)
    if not engine.update.decides_on_device:
        kinds = ", ".join(kind.__name__ for kind in _FUSED)
        raise _refused(
            plan,
            f"with the optimizer {type(optimizer).__name__}",
            "the captured update is a fused kernel, which skips a step that is not finite: "
            f"{kinds} without foreach=True, fused=False or differentiable=True",
            "one of these",
        )


def check_batches(job: Job, plan: Plan, samples: int | None) -> None:
    """Refuse a job whose batches of a dataset of `samples` have several shapes; None: their number is unknown."""
    batch = job.batch_size
    if batch % plan.micro:
        fewer = next(m for m in range(plan.micro, 0, -1) if batch % m == 0)
        raise _refused(
            plan,
            f"with micro={plan.micro} for batches of {batch}",
            f"a captured step has fixed shapes: micro divides the batch, {batch} % {plan.micro} != 0",
            f"micro={fewer}",
        )
    if samples and samples % batch and job.steps > samples // batch:
        raise _refused(
            plan,
            f"with {samples} samples in batches of {batch}",
            f"a captured step has fixed shapes, and the last batch of an epoch has {samples % batch} samples",
            f"a dataset of {samples - samples % batch} samples" if samples > batch else f"batches of {samples}",
        )


def _refused(plan: Plan, what: str, rule: str, fix: str = "") -> PlanError:
    nearest = f"the nearest plan that runs: {replace(plan, graph=False)}"
    return PlanError(
        f"graph=true {what}", where=f"plan {plan}", rule=rule, fix=f"{fix}, or {nearest}" if fix else nearest
    )


def prefer_fused_kernel(optimizer: torch.optim.Optimizer) -> None:
    """Make torch's SGD use its fused kernel, unless the user has chosen how it steps; Adam and AdamW do already."""
    groups = optimizer.param_groups
    if type(optimizer) is torch.optim.SGD and not any(g["fused"] is not None or g["foreach"] for g in groups):
        if any(g["differentiable"] for g in groups):
            return
        for group in groups:
            group["fused"] = True
        mark_fused(optimizer)


@contextmanager
def _captures(engine: EngineCore, graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what is launched, or say why that is not possible."""
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:
        cause: BaseException = e
        while cause.__context__ is not None:  # torch ends the capture, which fails as well
            cause = cause.__context__
        engine.strategy.drop_gradients()
        _end_capture_of_random_numbers(engine.device)
        if not isinstance(cause, RuntimeError):
            raise cause from None
        raise PlanError(
            f"graph=true: this step cannot be captured: {str(cause).strip().splitlines()[0][:200]}",
            where=f"plan {engine.plan}",
            rule="while a step is captured its host reads no number of the GPU (.item(), float(), if tensor, "
            "boolean indexing), and moves nothing from unpinned host memory",
            fix=f"the nearest plan that runs: {replace(engine.plan, graph=False)}",
        ) from cause


def _end_capture_of_random_numbers(device: torch.device) -> None:
    """A capture that failed leaves the GPU's generator waiting for a replay: give it a state of its own."""
    generator = torch.cuda.default_generators[device.index or 0]
    fresh = torch.Generator(device)
    fresh.manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh)


@contextmanager
def _same_random_numbers(engine: EngineCore) -> Iterator[None]:
    """Refuse a model that draws random numbers on the host: a replay would repeat the first ones forever."""
    draws: dict[str, Callable[[], object]] = {
        "Python's random": random.getstate,
        "torch's CPU generator": lambda: torch.default_generator.get_state().tolist(),
        "numpy": lambda: [str(x) for x in np.random.get_state()],
    }
    before = {name: state() for name, state in draws.items()}
    yield
    drawn = [name for name, state in draws.items() if state() != before[name]]
    if drawn:
        raise PlanError(
            f"graph=true: the model draws random numbers on the host, from {' and '.join(drawn)}",
            where=f"plan {engine.plan}",
            rule="what the host draws is fixed when a step is captured",
            fix="draw them on the GPU (torch.rand(..., device=x.device)), or the nearest plan that runs: "
            f"{replace(engine.plan, graph=False)}",
        )


def _own(value: Any, engine: EngineCore) -> Any:
    """A tensor of the graph's own for an input."""
    return to_device(value, engine.device, engine.dtype).clone() if isinstance(value, torch.Tensor) else value


def _form(micro: RankMicroBatch) -> tuple[object, ...]:
    """Properties equal in all micro-batches: samples, the shapes and types of all tensors, other values."""
    values, _ = tree_flatten((micro.input, micro.target))
    return micro.samples, *((tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for v in values)
