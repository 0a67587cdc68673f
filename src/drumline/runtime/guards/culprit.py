"""Where a number that is not finite came from: rank, samples, module, parameter.

After the ranks have summed their gradients, every rank holds the same bad numbers. So the step is run once more, with
hooks that see each rank's own values before they are summed: weights, inputs, outputs of modules, loss, gradients.
A fault that does not come again is a passing one, and it is said that nobody can tell whose it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...datasets.stream import Batch, split
from ...tracing.kinds import tensors
from .digest import tell_all
from .finite import finite, spoiled
from .split import SplitWatch

if TYPE_CHECKING:
    from ..engine import Engine

_NAMED = 3
"""How many names an error lists before it counts the rest."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """A bad step explained."""

    step: int
    what: str
    where: str
    ranks: tuple[int, ...]
    """Empty: unknown."""
    names: tuple[str, ...]
    """Parameters whose weight or gradient is not finite, the first one first; empty where only the loss is bad."""
    samples: tuple[int, ...]
    """Numbers of the ranks' samples, or of those whose input is not finite; empty: not from the job's data."""

    def __str__(self) -> str:
        return f"{self.what}; {self.where}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rank saw in its own numbers."""

    rank: int
    weights: tuple[str, ...] = ()
    """Parameters and buffers that were not finite before the step."""
    inputs: tuple[int, ...] = ()
    """Places in this rank's slice of the batch whose input is not finite."""
    output: str | None = None
    """The first module whose output was not finite; the model itself is ''."""
    order: int = 0
    """How many modules had finished before it, over all micro-batches."""
    loss: bool = False
    """The loss was not finite in the second run."""
    first_loss: bool = False
    """The loss was not finite when the step was run first."""
    gradients: tuple[str, ...] = ()
    """Parameters whose own gradient was not finite, in the order of the backward."""
    gradient_order: int = 0
    """How many gradients had come before the first of them."""
    reduced: tuple[str, ...] = ()
    """Parameters whose gradient was not finite after the ranks' were summed."""
    samples: tuple[int, ...] = ()

    @property
    def guilty(self) -> bool:
        """Whether this rank's own numbers were bad: a model may be right in spite of inputs that are not finite."""
        return self.loss or bool(self.gradients) or self.output is not None


def investigate(engine: Engine, batch: Batch, loss: float, norm: float) -> Culprit:
    """Run the step again and look. Called on all ranks together; the gradients are gone afterwards."""
    reduced = tuple(dict.fromkeys(p.name for p, g in engine.update.gradients() if not finite(g)))
    first_loss = not finite(engine.local_loss)
    _drop(engine)
    weights = tuple(map(engine.own_name, _bad_weights(engine.model)))
    seen = _again(engine, batch) if engine.split is None else _again_in_parts(engine, batch, loss)
    _drop(engine)
    # every stage has the batch, but the first one reads its input
    reads = engine.split is None or not engine.split.places.pipelined or 0 in engine.split.places.mine
    mine = dataclasses.replace(
        seen,
        weights=weights,
        inputs=_bad_inputs(batch) if reads else (),
        first_loss=first_loss,
        reduced=reduced,
        samples=_samples(engine, batch),
    )
    told = tell_all(dataclasses.asdict(mine), engine.group, engine.device)
    communicates = engine.spans or engine.split is not None
    return explain([_read(t) for t in told], batch.step, loss, norm, communicates=communicates)


def _again(engine: Engine, batch: Batch) -> Finding:
    """Run the step again, with hooks on the modules."""
    watch = _Watch(engine)
    with watch, torch.compiler.set_stance("force_eager"):  # compiled code does not call hooks that came later
        engine.gradients_of(batch)
    return watch.finding()


def _again_in_parts(engine: Engine, batch: Batch, loss: float) -> Finding:
    """Run the step of a split model again, and look at the values of its operators."""
    watch = SplitWatch(engine)
    with watch:
        engine.gradients_of(batch)
    names, came = watch.gradients
    # infinities may be made good further on: they count where the loss is bad
    order, output = (0, None) if watch.output is None or math.isfinite(loss) else watch.output
    return Finding(engine.rank, output=output, order=order, loss=watch.loss, gradients=names, gradient_order=came)


def _drop(engine: Engine) -> None:
    """Leave nothing of the step behind."""
    engine.strategy.forget()
    engine.moving.undo()


def explain(findings: list[Finding], step: int, loss: float, norm: float, *, communicates: bool) -> Culprit:
    """From what each rank saw to whom and what to name."""
    what = f"the loss is {loss} at step {step}"
    if math.isfinite(loss):
        what = f"the gradients are not finite at step {step} (norm {norm}, loss {loss:.4g})"
    guilty = blamed(findings, communicates=communicates)
    names = tuple(dict.fromkeys(n for f in guilty for n in (*f.weights, *f.gradients)))
    names = names or tuple(dict.fromkeys(n for f in findings for n in f.reduced))
    parts = [_sentence(f) for f in guilty] or [_unknown(findings, names, norm)]
    shown = guilty or findings
    samples = tuple(dict.fromkeys(s for f in shown for s in (_bad_samples(f) or f.samples)))
    if samples:
        parts.append(f"samples {_some(samples, 8)}")
    return Culprit(step, what, "; ".join(parts), tuple(f.rank for f in guilty), names, samples)


def blamed(findings: list[Finding], *, communicates: bool) -> list[Finding]:
    """The ranks that made the bad numbers, and not those to which they spread within the forward."""
    own = [f for f in findings if f.guilty and (f.weights or f.inputs)]
    if own:
        return own
    outputs = [f for f in findings if f.output is not None]
    if outputs and communicates:
        # statistics span the ranks: who has the first bad output has it from itself, and so in the backward
        first = min(f.order for f in outputs)
        return [f for f in outputs if f.order == first]
    guilty = [f for f in findings if f.guilty]
    if guilty and communicates:
        first = min(f.gradient_order for f in guilty)
        return [f for f in guilty if f.loss] or [f for f in guilty if f.gradient_order == first]
    return guilty or [f for f in findings if f.first_loss]


def _sentence(f: Finding) -> str:
    said = []
    if f.weights:
        said.append(f"{_names(f.weights)} was not finite before the step")
    if f.inputs:
        known = _bad_samples(f)
        which = f"sample {_some(known, 4)}" if known else f"{len(f.inputs)} of its samples"
        said.append(f"the input of {which} is not finite")
    if f.output is not None and not f.weights:
        said.append(f"the first output that is not finite is that of {f.output or 'the model'!r}")
    elif f.loss and not f.weights:
        said.append("the loss is not finite, the outputs are")
    if f.gradients and not f.loss and f.output is None:
        said.append(f"the gradient of {_names(f.gradients)} is not finite, outputs and loss are")
    if f.first_loss and not f.guilty:
        said.append("its loss was not finite, but a second run of the step was: a fault that passed")
    return f"rank {f.rank}: " + ", ".join(said)


def _unknown(findings: list[Finding], names: tuple[str, ...], norm: float) -> str:
    if not names and norm == math.inf:
        return "every gradient is finite, but their norm is too large for its type"
    which = f"the gradient of {_names(names)}" if names else "the step"
    return f"rank unknown: {which} was not finite, but in a second run every rank's numbers are: a fault that passed"


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(repr(n) for n in names[:_NAMED]) + more


def _some(numbers: tuple[int, ...], most: int) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


def _bad_samples(f: Finding) -> tuple[int, ...]:
    return tuple(f.samples[i] for i in f.inputs if i < len(f.samples))


class _Watch:
    """Looks at a rank's own numbers while a step runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._count = 0
        self._output: tuple[str, int] | None = None
        self._mask: tuple[str, int] | None = None
        """The first output with -inf alone, as masks of attention have it: bad only where the model's own is."""
        self._last_bad = False
        self._came = 0
        self._first_gradient = 0
        self._loss = False
        self._gradients: dict[str, None] = {}
        self._seen: set[int] = set()
        self._hooks: list[Any] = []
        self._before: Any = None

    def __enter__(self) -> _Watch:
        for name, module in self._engine.model.named_modules():
            # a sharded parameter is whole only while its module runs, so it is hooked there
            self._hooks.append(module.register_forward_pre_hook(self._begins(name)))
            self._hooks.append(module.register_forward_hook(self._ends(name)))
        plain = self._engine.loss_of
        self._before = vars(self._engine).get("loss_of")

        def looked(micro: Any) -> Any:
            total, weight, own = plain(micro)
            self._loss |= not finite(total)
            return total, weight, own

        self._engine.loss_of = looked  # type: ignore[method-assign]  # observed, not changed
        return self

    def __exit__(self, *_: object) -> None:
        del self._engine.loss_of
        if self._before is not None:  # somebody else looks too
            self._engine.loss_of = self._before  # type: ignore[method-assign]  # put back
        for hook in self._hooks:
            hook.remove()

    def finding(self) -> Finding:
        """What was seen."""
        output, order = self._output or (self._mask if self._last_bad else None) or (None, 0)
        return Finding(
            self._engine.rank,
            output=output,
            order=order,
            loss=self._loss,
            gradients=tuple(self._gradients),
            gradient_order=self._first_gradient,
        )

    def _begins(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            for key, p in module._parameters.items():
                if p is None or not p.requires_grad or isinstance(p, DTensor) or id(p) in self._seen:
                    continue
                self._seen.add(id(p))
                self._hooks.append(p.register_hook(self._gradient(f"{name}.{key}" if name else key)))

        return hook

    def _ends(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._count += 1
            bad = [t for t in tensors(output) if not finite(t)]
            if self._output is None and any(spoiled(t) for t in bad):
                self._output = (name, self._count)
            elif self._mask is None and bad:
                self._mask = (name, self._count)
            if not name:
                self._last_bad |= bool(bad)

        return hook

    def _gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            self._came += 1
            if not finite(gradient):
                self._first_gradient = self._first_gradient or self._came
                self._gradients[self._engine.own_name(name)] = None

        return hook


def _bad_weights(model: nn.Module) -> Iterator[str]:
    """Parameters that are not finite and buffers that are no masks, as far as this rank has them."""
    for name, p in model.named_parameters():
        if not finite(p.to_local() if isinstance(p, DTensor) else p):
            yield name
    for name, b in model.named_buffers():
        if not finite(b) and spoiled(b):
            yield name


def _bad_inputs(batch: Batch) -> tuple[int, ...]:
    """Places in this rank's slice, over all micro-batches, of samples with a number that is not finite."""
    bad, start = [], 0
    for micro in batch.micros:
        for t in tensors(micro.input):
            if micro.samples and t.is_floating_point() and t.dim() and t.shape[0] == micro.samples and not finite(t):
                rows = torch.isfinite(t).reshape(micro.samples, -1).all(1)
                bad += [start + i for i, good in enumerate(rows.tolist()) if not good]
        start += micro.samples
    return tuple(sorted(set(bad)))


def _samples(engine: Engine, batch: Batch) -> tuple[int, ...]:
    """The sample numbers of this rank's slice; none where the batch is not from the job's data."""
    if any(micro.total == 0 for micro in batch.micros):
        return ()
    numbers = engine.stream.samples(batch.step)
    mine: list[int] = []
    for part in split(len(numbers), engine.plan.micro):
        mine += [numbers[part[i]] for i in split(len(part), engine.stream.dp)[engine.stream.index]] if part else []
    return tuple(mine)


def _read(told: object) -> Finding:
    assert isinstance(told, dict)
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}
    return Finding(**fields)
