"""Locates the origin of a non-finite number: rank, samples, module, parameter.

After the ranks have summed their gradients, every rank has the same bad numbers. So the step runs once more, with
hooks that see each rank's own values before the sum: weights, inputs, module outputs, loss, gradients. Faults that do
not reproduce are reported as transient, with the rank unknown.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...datasets.stream import RankBatch, split_range
from ...tracing.op_costs import tensors
from ..core.engine_core import EngineCore
from ..state.json_exchange import gather_json
from .observers import StepObserver, is_corrupt, is_finite

LOSS_ALONE = "the loss is non-finite, all outputs are finite"
"""Of a rank: the job's loss made the bad number."""
_NAMED = 3
"""Number of names that an error lists before it counts the rest."""


@dataclass(frozen=True, slots=True)
class NonFiniteReport:
    """The explanation of a non-finite step."""

    step: int
    what: str
    where: str
    ranks: tuple[int, ...]
    """Ranks at fault; empty if unknown."""
    names: tuple[str, ...]
    """Parameters with a non-finite weight or gradient, in order; empty if only the loss is bad."""
    samples: tuple[int, ...]
    """Indices of the ranks' samples, or of those with a non-finite input; empty if not from the job's data."""

    def __str__(self) -> str:
        return f"{self.what}; {self.where}"


@dataclass(frozen=True, slots=True)
class RankObservation:
    """One rank's observations of its own values."""

    rank: int
    weights: tuple[str, ...] = ()
    """Parameters and buffers that were non-finite before the step."""
    inputs: tuple[int, ...] = ()
    """Indices in this rank's slice of the batch with a non-finite input."""
    output: str | None = None
    """The first module with a non-finite output; the model itself is ''."""
    order: int = 0
    """Position of that output in the forward, over all micro-batches."""
    loss: bool = False
    """Whether the loss was non-finite in the second run."""
    first_loss: bool = False
    """Whether the loss was non-finite in the first run."""
    gradients: tuple[str, ...] = ()
    """Parameters whose local gradient was non-finite, in backward order."""
    gradient_order: int = 0
    """Position of the first of them in the backward."""
    reduced: tuple[str, ...] = ()
    """Parameters whose gradient was non-finite after the sum over ranks."""
    samples: tuple[int, ...] = ()

    @property
    def is_bad(self) -> bool:
        """Whether this rank's own results were bad: a model may handle non-finite inputs."""
        return self.loss or bool(self.gradients) or self.output is not None


def diagnose(engine: EngineCore, batch: RankBatch, loss: float, norm: float) -> NonFiniteReport:
    """Run the step again and observe it. Called on all ranks that step together; discards the gradients."""
    reduced = tuple(dict.fromkeys(p.name for p, g in engine.update.gradients() if not is_finite(g)))
    first_loss = not is_finite(engine.local_loss)
    _discard_step(engine)
    weights = tuple(map(engine.user_name, _bad_weights(engine.model)))
    observer = StepObserver(engine)
    with observer, torch.compiler.set_stance("force_eager"):  # compiled code does not call hooks added later
        engine.gradients_of(batch)
    _discard_step(engine)
    output, order = observer.output(loss) or (None, 0)
    gradients, gradient_order = observer.gradients
    mine = dataclasses.replace(
        RankObservation(engine.rank, output=output, order=order, loss=observer.loss),
        gradients=gradients,
        gradient_order=gradient_order,
        weights=weights,
        inputs=_bad_inputs(batch) if engine.strategy.reads_input else (),
        first_loss=first_loss,
        reduced=reduced,
        samples=_samples(engine, batch),
    )
    if engine.strategy.steps_alone:  # the other replicas run other steps
        return explain([mine], batch.step, loss, norm, communicates=False)
    gathered = gather_json(dataclasses.asdict(mine), engine.group, engine.device)
    return explain(
        [_from_json(fields) for fields in gathered], batch.step, loss, norm, communicates=engine.meets_in_forward
    )


def _discard_step(engine: EngineCore) -> None:
    """Discard the gradients and buffer changes of the step."""
    engine.strategy.drop_gradients()
    engine.buffer_snapshot.restore()


def explain(
    observations: list[RankObservation], step: int, loss: float, norm: float, *, communicates: bool
) -> NonFiniteReport:
    """Explain a bad step from the observations of all ranks."""
    what = f"the loss is {loss} at step {step}"
    if math.isfinite(loss):
        what = f"non-finite gradients at step {step} (norm {norm}, loss {loss:.4g})"
    origin = originating_ranks(observations, communicates=communicates)
    names = tuple(dict.fromkeys(n for f in origin for n in (*f.weights, *f.gradients)))
    names = names or tuple(dict.fromkeys(n for f in observations for n in f.reduced))
    parts = [_sentence(f) for f in origin] or [_unknown(names, norm)]
    shown = origin or observations
    samples = tuple(dict.fromkeys(s for f in shown for s in (_bad_samples(f) or f.samples)))
    if samples:
        parts.append(f"samples {_listed(samples, 8)}")
    return NonFiniteReport(step, what, "; ".join(parts), tuple(f.rank for f in origin), names, samples)


def originating_ranks(observations: list[RankObservation], *, communicates: bool) -> list[RankObservation]:
    """The ranks where the bad numbers originated, not those that received them during the forward."""
    own = [f for f in observations if f.is_bad and (f.weights or f.inputs)]
    if own:
        return own
    outputs = [f for f in observations if f.output is not None]
    if outputs and communicates:
        # ranks exchange values in the forward: the rank with the first bad output produced it; the same in the backward
        first = min(f.order for f in outputs)
        return [f for f in outputs if f.order == first]
    bad = [f for f in observations if f.is_bad]
    if bad and communicates:
        first = min(f.gradient_order for f in bad)
        return [f for f in bad if f.loss] or [f for f in bad if f.gradient_order == first]
    return bad or [f for f in observations if f.first_loss]


def _sentence(f: RankObservation) -> str:
    parts = []
    if f.weights:
        parts.append(f"{_names(f.weights)} was non-finite before the step")
    if f.inputs:
        known = _bad_samples(f)
        which = f"sample {_listed(known, 4)}" if known else f"{len(f.inputs)} of its samples"
        parts.append(f"the input of {which} is non-finite")
    if f.output is not None and not f.weights:
        parts.append(f"the first non-finite output is that of {f.output or 'the model'!r}")
    elif f.loss and not f.weights:
        parts.append(LOSS_ALONE)
    if f.gradients and not f.loss and f.output is None:
        parts.append(f"the gradient of {_names(f.gradients)} is non-finite, outputs and loss are finite")
    if f.first_loss and not f.is_bad:
        parts.append("its loss was non-finite, but finite when the step was repeated: a transient fault")
    return f"rank {f.rank}: " + ", ".join(parts)


def _unknown(names: tuple[str, ...], norm: float) -> str:
    if not names and norm == math.inf:
        return "every gradient is finite, but their norm overflows its dtype"
    which = f"the gradient of {_names(names)}" if names else "the step"
    return (
        f"rank unknown: {which} was non-finite, but finite on every rank when the step was repeated: a transient fault"
    )


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(repr(n) for n in names[:_NAMED]) + more


def _listed(numbers: tuple[int, ...], limit: int) -> str:
    more = f" and {len(numbers) - limit} more" if len(numbers) > limit else ""
    return ", ".join(map(str, numbers[:limit])) + more


def _bad_samples(f: RankObservation) -> tuple[int, ...]:
    return tuple(f.samples[i] for i in f.inputs if i < len(f.samples))


def _bad_weights(model: nn.Module) -> Iterator[str]:
    """Non-finite parameters, and buffers that are not masks, of this rank."""
    for name, p in model.named_parameters():
        if not is_finite(p.to_local() if isinstance(p, DTensor) else p):
            yield name
    for name, b in model.named_buffers():
        if not is_finite(b) and is_corrupt(b):
            yield name


def _bad_inputs(batch: RankBatch) -> tuple[int, ...]:
    """Indices in this rank's slice, over all micro-batches, of samples with a non-finite input."""
    bad, start = [], 0
    for micro in batch.micros:
        for t in tensors(micro.input):
            if micro.samples and t.is_floating_point() and t.dim() and t.shape[0] == micro.samples and not is_finite(t):
                rows = torch.isfinite(t).reshape(micro.samples, -1).all(1)
                bad += [start + i for i, good in enumerate(rows.tolist()) if not good]
        start += micro.samples
    return tuple(sorted(set(bad)))


def _samples(engine: EngineCore, batch: RankBatch) -> tuple[int, ...]:
    """The dataset indices of this rank's slice; empty if the batch is not from the job's data."""
    if any(micro.total == 0 for micro in batch.micros):
        return ()
    numbers = engine.stream.samples(batch.step)
    mine: list[int] = []
    for part in split_range(len(numbers), engine.plan.micro):
        mine += (
            [numbers[part[i]] for i in split_range(len(part), engine.stream.dp)[engine.stream.index]] if part else []
        )
    return tuple(mine)


def _from_json(fields: dict[str, Any]) -> RankObservation:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return RankObservation(**values)
