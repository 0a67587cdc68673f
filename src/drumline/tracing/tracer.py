"""Traces a job into a `Profile`: forward, backward and optimizer step on fake tensors."""

from __future__ import annotations

import functools
import gc
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..core.errors import DrumlineError, JobError, TraceError
from ..core.job import Job, user_line
from ..models.profile import Affine, Layer, Profile, ProfiledOp
from ..torchkit.fake_tensors import VALUE_REQUESTS, FakeTensorMode
from ..torchkit.modules import BatchNormBase
from .autocast import HALF_DTYPES, GpuOperatorMode, autocast_as_on
from .data_flow import DataFlowRecorder
from .expert_modules import ExpertRouting
from .fake import (
    MedianDraws,
    SampleForm,
    call_model,
    fake_batch,
    fake_mode,
    fake_model,
    first_sample,
    trace_assumptions,
    untraceable_error,
    with_half_parameters,
)
from .layers import LayerSpec, layers_of
from .op_costs import size_of, tensors
from .optimizer import optimizer_costs
from .recorder import LOSS, LayerTrace, PhaseTrace, TraceRecorder
from .skipped_modules import record_with_stand_ins
from .traced_batch import TracedBatch, affine, choose_batch


def trace(job: Job, *, precision: str = "", device: str = "cpu", data_flow: bool = False) -> Profile:
    """Trace a job into its profile.

    With a `precision` of a plan, trace as a device of that kind (`cpu` or `cuda`) computes in it, with every cast.
    Without, count everything in the model's types; other precisions are scaled from that. With `data_flow`, the profile
    also has the graph of the forward.
    """
    # thousands of small objects come and go; searching them for cycles costs a tenth of the time
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # real problems warn again in the real run
            return _trace(job, _Target(precision, device, data_flow))
    finally:
        if collecting:
            gc.enable()


def _trace(job: Job, target: _Target) -> Profile:
    mode = fake_mode()
    sample = first_sample(job)
    model, notes = fake_model(job, mode)
    if target.precision == "bf16-pure":
        with_half_parameters(model)
    model.train()
    specs = layers_of(model)
    routing = ExpertRouting(model)
    with routing.watch():
        record, batch = _record_any(job, model, specs, mode, sample, target, notes)
    optimizer = optimizer_costs(job, model, mode)
    inputs = tensors(fake_batch(mode, sample=sample, n=batch.size))
    return Profile(
        name=job.name,
        batch_size=job.batch_size,
        layers=tuple(_equal_python_calls(_layers(model, specs, record, routing))),
        buffers=sum(size_of(b) for b in model.buffers()),
        input=affine(sum((batch.amount(size_of(t), t.numel()) for t in inputs), 0j)),
        depth=Affine(record.depth),
        parameter_bytes=max(p.element_size() for p in model.parameters()),
        activation_bytes=2 if target.precision in HALF_DTYPES else 4,
        precision=target.precision,
        origin="traced",
        notes=(*notes, *trace_assumptions(model)),
        data_flow=record.flow.data_flow() if record.flow else None,
        **optimizer,
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """Precision and kind of device that a trace imitates, and whether it records the data flow."""

    precision: str
    device: str
    data_flow: bool = False


def _record_any(
    job: Job,
    model: nn.Module,
    specs: list[LayerSpec],
    mode: FakeTensorMode,
    sample: SampleForm,
    target: _Target,
    notes: list[str],
) -> tuple[TraceRecorder, TracedBatch]:
    """Record one forward and backward; if that fails, with a batch size that is divisible by 8."""
    shapes = [t.shape for t in (*model.parameters(), *model.buffers(), *tensors(sample.value))]
    dims = {d for shape in shapes for d in shape}

    def record_multiple(multiple: int) -> tuple[TraceRecorder, TracedBatch]:
        batch = choose_batch(dims, job.batch_size, multiple)
        record = functools.partial(_record, job, model, specs, mode, sample, batch, target)
        return record_with_stand_ins(model, batch.size, record, notes), batch

    try:
        return record_multiple(1)
    except TraceError as first:
        try:
            return record_multiple(8)
        except TraceError:
            raise first from None


def _record(
    job: Job,
    model: nn.Module,
    specs: list[LayerSpec],
    mode: FakeTensorMode,
    sample: SampleForm,
    batch: TracedBatch,
    target: _Target,
) -> TraceRecorder:
    """Record one forward and backward."""
    n = batch.size
    value, labels = fake_batch(mode, sample=sample, n=n)
    resident = [*model.parameters(), *model.buffers(), *tensors((value, labels))]
    for p in model.parameters():
        p.grad = None
    flow = DataFlowRecorder(model, tensors((value, labels)), batch) if target.data_flow else None
    recorder = TraceRecorder(model, specs, resident, batch, target.device, flow)
    try:
        with mode, recorder, MedianDraws(), torch.random.fork_rng(devices=[]):
            with (
                autocast_as_on(target.device, target.precision),
                GpuOperatorMode() if target.device == "cuda" else nullcontext(),
            ):
                loss = job.loss(call_model(model, value), labels)
            if isinstance(loss, tuple | list):
                loss = loss[0]
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise JobError(
                    f"the loss is {tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__}",
                    rule="the loss is one number (the mean over the samples given), or (sum, weight)",
                )
            recorder.start_backward()
            loss.backward()
    except DrumlineError:
        raise
    except VALUE_REQUESTS as e:
        raise untraceable_error(model, e) from e
    except Exception as e:
        raise TraceError(
            f"{type(model).__name__} failed on a batch of {n} samples: {type(e).__name__}: "
            f"{(str(e).strip().splitlines() or [''])[0][:300]}",
            where=user_line(e),
            rule="the model and the loss run on a batch shaped like the dataset's first sample",
        ) from e
    finally:
        recorder.close()
    return recorder


def _layers(model: nn.Module, specs: list[LayerSpec], record: TraceRecorder, routing: ExpertRouting) -> list[Layer]:
    """The layers in the order in which they ran; those that only have parameters come last."""
    by_name = {spec.name: spec for spec in specs}
    own = _parameters_by_layer(model, specs)
    layers, kept = [], 0j
    for name in [*record.order, *(name for name in own if name not in record.layers)]:
        spec, seen, mine = by_name.get(name), record.layers.get(name, LayerTrace()), own.get(name, [])
        trained = [p for p in mine if p.requires_grad]
        ops = _ops(seen.forward, "forward", _recompute_facts(seen)) + _ops(seen.backward, "backward", {})
        kept += seen.saved
        if not ops and not mine:
            continue
        layers.append(
            Layer(
                name=name,
                kind=type(spec.module).__name__ if spec else ("loss" if name == LOSS else type(model).__name__),
                parameters=sum(p.numel() for p in trained),
                frozen=sum(p.numel() for p in mine) - sum(p.numel() for p in trained),
                tensors=len(trained),
                largest=max((p.numel() for p in mine), default=0),
                tied=_tied(spec, mine),
                ops=ops,
                saved=affine(seen.saved),
                output=affine(seen.output),
                live_forward=affine(seen.forward.most_alive),
                live_backward=affine(seen.backward.most_alive),
                local_backward=affine(seen.backward.most_alive - kept),
                depth_forward=seen.forward.depth,
                depth_backward=seen.backward.depth,
                batch_norms=sum(isinstance(m, BatchNormBase) for m in spec.module.modules()) if spec else 0,
                cast=seen.cast,
                views=seen.forward.views,
                python_calls=seen.forward.python_calls,
                composite=bool(spec and spec.composite),
                shard_unit=bool(spec and spec.unit),
                experts=routing.of(spec.module) if spec else None,
            )
        )
    return layers


def _equal_python_calls(layers: list[Layer]) -> list[Layer]:
    """Give layers with equal forwards the smallest count of Python calls among them: the first may fill caches."""
    forward = [(x.kind, x.views, *((op.name, op.count) for op in x.ops if op.phase == "forward")) for x in layers]
    fewest: dict[tuple[object, ...], int] = {}
    for x, key in zip(layers, forward, strict=True):
        fewest[key] = min(x.python_calls, fewest.get(key, x.python_calls))
    return [replace(x, python_calls=fewest[key]) for x, key in zip(layers, forward, strict=True)]


def _ops(seen: PhaseTrace, phase: str, facts: dict[int, _RecomputeFacts]) -> tuple[ProfiledOp, ...]:
    """The operators of one layer and phase; equal ones are counted, except where their order shows the data flow."""
    none = _RecomputeFacts()
    counts = Counter(
        (
            c.name,
            c.kind,
            c.flops,
            c.bytes,
            c.output,
            facts.get(c.number, none),
            c.dims,
            i if c.dims else -1,
            c.dtype,
            c.shape,
        )
        for i, c in enumerate(seen.calls)
    )
    return tuple(
        ProfiledOp(
            name,
            kind,
            phase,
            affine(flops),
            affine(moved),
            k,
            output=affine(made + own.more),
            group=own.group,
            recompute=own.recompute,
            is_output=own.is_output,
            dims=shape,
            dtype=dtype,
            shape=tuple(map(affine, sizes)),
        )
        for (name, kind, flops, moved, made, own, shape, _, dtype, sizes), k in counts.items()
    )


@dataclass(frozen=True, slots=True)
class _RecomputeFacts:
    """Facts about an operator that recomputation needs."""

    group: int = 0
    recompute: str = ""
    more: complex = 0j
    """Bytes allocated by another operator for the values that this one writes."""
    is_output: bool = False


def _recompute_facts(seen: LayerTrace) -> dict[int, _RecomputeFacts]:
    """For each operator in a layer's forward, by its index in the lineage."""
    lineage = seen.lineage
    if lineage is None:
        return {}
    numbers = [c.number for c in seen.forward.calls]
    members = Counter(lineage.group(i) for i in numbers)
    always = lineage.always_recomputed()
    outputs = {lineage.group(i) for i in seen.output_ops}
    unwritten: dict[int, complex] = {}
    for i, made in seen.unwritten.items():
        unwritten[lineage.group(i)] = unwritten.get(lineage.group(i), 0j) + made
    facts = {}
    for i in numbers:
        group = lineage.group(i)
        recompute = "never" if i >= seen.needed else "always" if group in always else ""
        facts[i] = _RecomputeFacts(
            group + 1 if members[group] > 1 else 0, recompute, unwritten.pop(group, 0j), group in outputs
        )
    return facts


def _parameters_by_layer(model: nn.Module, specs: list[LayerSpec]) -> dict[str, list[nn.Parameter]]:
    """Each parameter once, with the first layer that has it; the rest belongs to the model itself."""
    seen: set[int] = set()
    own: dict[str, list[nn.Parameter]] = {}
    for name, module in [*((s.name, s.module) for s in specs), ("", model)]:
        fresh = [p for p in module.parameters() if id(p) not in seen]
        seen.update(id(p) for p in fresh)
        if fresh:
            own[name] = fresh
    return own


def _tied(spec: LayerSpec | None, mine: list[nn.Parameter]) -> int:
    """Trained parameters of a layer that are counted with another layer."""
    if spec is None:
        return 0
    own = {id(p) for p in mine}
    return sum(p.numel() for p in spec.module.parameters() if p.requires_grad and id(p) not in own)
