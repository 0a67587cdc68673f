"""Traces a job: its model through forward, backward and optimizer step on fake tensors, into a `Profile`."""

from __future__ import annotations

import functools
import gc
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.errors import DrumlineError, JobError, TraceError
from ..core.job import Job, guard, line_of
from ..models.profile import Affine, Layer, Op, Profile
from .amount import Batch, affine, choose
from .autocast import HALVES, AsOnGpu, as_on
from .draws import MiddleDraws
from .fake import UNTRACEABLE, assumed, call, fake_batch, fake_mode, fake_model, first_sample, untraceable
from .fused import prefer_fused
from .kinds import size_of, tensors
from .layers import LayerSpec, layers_of
from .recorder import LOSS, LayerTrace, Recorder, Seen
from .unseen import seen_around


def trace(job: Job, *, precision: str = "", device: str = "cpu") -> Profile:
    """The profile of a job.

    With a `precision` of a plan, as a device of that kind (`cpu` or `cuda`) computes in it: with every cast. Without,
    all is counted in the types of the model, and other precisions are scaled from it.
    """
    # thousands of small objects come and go; looking for cycles among them costs a tenth of the time
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is worth a warning warns again in the real run
            return _trace(job, precision, device)
    finally:
        if collecting:
            gc.enable()


def _trace(job: Job, precision: str, device: str) -> Profile:
    mode = fake_mode()
    sample = first_sample(job)
    model, notes = fake_model(job, mode)
    model.train()
    specs = layers_of(model)
    way = _Way(precision, device)
    record, batch = _record_any(job, model, specs, mode, sample, way, notes)
    optimizer = _optimizer(job, model, mode)
    inputs = tensors(fake_batch(job, mode, sample=sample, n=batch.size))
    return Profile(
        name=job.name,
        batch_size=job.batch_size,
        layers=tuple(_levelled(_layers(model, specs, record))),
        buffers=sum(size_of(b) for b in model.buffers()),
        input=affine(sum((batch.amount(size_of(t), t.numel()) for t in inputs), 0j)),
        depth=Affine(record.depth),
        parameter_bytes=max(p.element_size() for p in model.parameters()),
        activation_bytes=2 if precision in HALVES else 4,
        precision=precision,
        origin="traced",
        notes=(*notes, *assumed(model)),
        **optimizer,
    )


@dataclass(frozen=True, slots=True)
class _Way:
    """How the operators are computed."""

    precision: str
    device: str


def _record_any(
    job: Job,
    model: nn.Module,
    specs: list[LayerSpec],
    mode: FakeTensorMode,
    sample: tuple[Any, Any],
    way: _Way,
    notes: list[str],
) -> tuple[Recorder, Batch]:
    """One forward and backward; a model that wants its batch to divide by 8 gets such a one."""
    held = [*model.parameters(), *model.buffers(), *tensors(sample)]
    dims = {d for t in held for d in t.shape}

    def of(times: int) -> tuple[Recorder, Batch]:
        batch = choose(dims, job.batch_size, times)
        record = functools.partial(_record, job, model, specs, mode, sample, batch, way)
        return seen_around(model, batch.size, record, notes), batch

    try:
        return of(1)
    except TraceError as first:
        try:
            return of(8)
        except TraceError:
            raise first from None


def _record(
    job: Job,
    model: nn.Module,
    specs: list[LayerSpec],
    mode: FakeTensorMode,
    sample: tuple[Any, Any],
    batch: Batch,
    way: _Way,
) -> Recorder:
    """One forward and backward."""
    n = batch.size
    value, target = fake_batch(job, mode, sample=sample, n=n)
    resident = [*model.parameters(), *model.buffers(), *tensors((value, target))]
    for p in model.parameters():
        p.grad = None
    recorder = Recorder(model, specs, resident, batch, way.device)
    try:
        with mode, recorder, MiddleDraws(), torch.random.fork_rng(devices=[]):
            with as_on(way.device, way.precision), AsOnGpu() if way.device == "cuda" else nullcontext():
                loss = job.loss(call(model, value), target)
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
    except UNTRACEABLE as e:
        raise untraceable(model, e) from e
    except Exception as e:
        raise TraceError(
            f"{type(model).__name__} failed on a batch of {n} samples: {type(e).__name__}: "
            f"{(str(e).strip().splitlines() or [''])[0][:300]}",
            where=line_of(e),
            rule="the model and the loss run on a batch shaped like the dataset's first sample",
        ) from e
    finally:
        recorder.close()
    return recorder


def _layers(model: nn.Module, specs: list[LayerSpec], record: Recorder) -> list[Layer]:
    """The layers in the order in which they ran; what only holds parameters comes last."""
    by_name = {spec.name: spec for spec in specs}
    own = _parameters_by_layer(model, specs)
    layers, kept = [], 0j
    for name in [*record.order, *(name for name in own if name not in record.layers)]:
        spec, seen, mine = by_name.get(name), record.layers.get(name, LayerTrace()), own.get(name, [])
        trained = [p for p in mine if p.requires_grad]
        ops = _ops(seen.forward, "forward", _places(seen)) + _ops(seen.backward, "backward", {})
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
                norms=sum(isinstance(m, _BatchNorm) for m in spec.module.modules()) if spec else 0,
                cast=seen.cast,
                views=seen.forward.views,
                entered=seen.forward.entered,
                composite=bool(spec and spec.composite),
                unit=bool(spec and spec.unit),
            )
        )
    return layers


def _levelled(layers: list[Layer]) -> list[Layer]:
    """Layers with the same forward enter as many functions as the one with the fewest: the first of them may have
    looked things up for all.
    """
    forward = [(x.kind, x.views, *((op.name, op.count) for op in x.ops if op.phase == "forward")) for x in layers]
    fewest: dict[tuple[object, ...], int] = {}
    for x, key in zip(layers, forward, strict=True):
        fewest[key] = min(x.entered, fewest.get(key, x.entered))
    return [replace(x, entered=fewest[key]) for x, key in zip(layers, forward, strict=True)]


def _ops(seen: Seen, phase: str, places: dict[int, _Place]) -> tuple[Op, ...]:
    """The operators of one layer and phase; equal ones are counted, except where their order tells who feeds whom."""
    alone = _Place()
    counts = Counter(
        (
            c.name,
            c.kind,
            c.flops,
            c.bytes,
            c.output,
            places.get(c.number, alone),
            c.dims,
            i if c.dims else -1,
            c.dtype,
            c.shape,
        )
        for i, c in enumerate(seen.calls)
    )
    return tuple(
        Op(
            name,
            kind,
            phase,
            affine(flops),
            affine(moved),
            k,
            output=affine(made + place.more),
            group=place.group,
            again=place.again,
            handed=place.handed,
            dims=shape,
            dtype=dtype,
            shape=tuple(map(affine, sizes)),
        )
        for (name, kind, flops, moved, made, place, shape, _, dtype, sizes), k in counts.items()
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """What recomputation has to know of an operator."""

    group: int = 0
    again: str = ""
    more: complex = 0j
    """Bytes that another one took for what this one writes."""
    handed: bool = False


def _places(seen: LayerTrace) -> dict[int, _Place]:
    """Of the operators in a layer's forward, by their number in its lineage."""
    lineage = seen.lineage
    if lineage is None:
        return {}
    numbers = [c.number for c in seen.forward.calls]
    members = Counter(lineage.group(i) for i in numbers)
    bound = lineage.bound()
    handed = {lineage.group(i) for i in seen.handed}
    bare: dict[int, complex] = {}
    for i, made in seen.bare.items():
        bare[lineage.group(i)] = bare.get(lineage.group(i), 0j) + made
    found = {}
    for i in numbers:
        group = lineage.group(i)
        again = "never" if i >= seen.needed else "always" if group in bound else ""
        found[i] = _Place(group + 1 if members[group] > 1 else 0, again, bare.pop(group, 0j), group in handed)
    return found


def _parameters_by_layer(model: nn.Module, specs: list[LayerSpec]) -> dict[str, list[nn.Parameter]]:
    """Each parameter once, with the layer in which it is met first; what no layer holds is the model's own."""
    seen: set[int] = set()
    own: dict[str, list[nn.Parameter]] = {}
    for name, module in [*((s.name, s.module) for s in specs), ("", model)]:
        fresh = [p for p in module.parameters() if id(p) not in seen]
        seen.update(id(p) for p in fresh)
        if fresh:
            own[name] = fresh
    return own


def _tied(spec: LayerSpec | None, mine: list[nn.Parameter]) -> int:
    """Trained numbers of a layer that are counted with another."""
    if spec is None:
        return 0
    own = {id(p) for p in mine}
    return sum(p.numel() for p in spec.module.parameters() if p.requires_grad and id(p) not in own)


class Moved(TorchDispatchMode):
    """Counts operators and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.bytes, self.calls = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("prim", "profiler"):  # an optimizer names its step for the profiler
            return out
        moved = sum(size_of(t) for t in tensors((args, kwargs or {}))) + sum(size_of(t) for t in tensors(out))
        if out is None:  # a fused kernel writes what it was given
            moved += sum(
                size_of(t) for a, s in zip(args, func._schema.arguments, strict=False) if s.is_write for t in tensors(a)
            )
        self.bytes += moved
        self.calls += 1
        return out


def _optimizer(job: Job, model: nn.Module, mode: FakeTensorMode) -> dict[str, Any]:
    """What the optimizer keeps and moves per trained number, from its second step (the first makes the state).

    Each shape is stepped once and counted as often as it stands in the model.
    """
    shapes = Counter((p.shape, p.dtype) for p in model.parameters() if p.requires_grad)
    numbers = sum(shape.numel() * k for (shape, _), k in shapes.items())
    state = moved = calls = 0.0
    with mode:
        for (shape, dtype), k in shapes.items():
            p = nn.Parameter(torch.empty(shape, dtype=dtype))
            p.grad = torch.empty_like(p)
            optimizer = prefer_fused(guard(job.optimizer, "the job's optimizer()", [p]))
            try:
                optimizer.step()
                with Moved() as counter:
                    optimizer.step()
            except Exception as e:
                raise TraceError(
                    f"the optimizer {type(optimizer).__name__} cannot be traced: {type(e).__name__}: {str(e)[:200]}"
                ) from e
            state += k * sum(size_of(t) for s in optimizer.state.values() for t in tensors(s) if t.dim() > 0)
            moved, calls = moved + k * counter.bytes, calls + k * counter.calls
    return {
        "optimizer": type(optimizer).__name__,
        "state_per_parameter": state / numbers,
        "optimizer_bytes": moved / numbers,
        "optimizer_ops": calls / shapes.total(),
    }
