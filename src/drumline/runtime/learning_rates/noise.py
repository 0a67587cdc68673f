"""The gradient noise scale: up to which batch size a larger batch still pays, from the gradients themselves.

McCandlish et al. 2018: the simple noise scale is B = tr(Sigma) / |G|^2, with G the true gradient and Sigma the
covariance of the gradients of single samples. The mean gradient of b samples has the expected squared norm
|G|^2 + tr(Sigma) / b. So the norms of the parts of a batch, and of the whole, tell both, without bias. Each is averaged
over many batches, and then one is divided by the other, because the mean of quotients would be biased.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...core.errors import GaveUp, JobError, PlanError
from ...datasets.stream import split

if TYPE_CHECKING:
    from ..engine import Engine


@dataclass(frozen=True, slots=True)
class Norms:
    """Squared norms of the mean gradients of one batch, by part and of all of it."""

    sizes: tuple[int, ...]
    """Samples of each part."""
    parts: tuple[float, ...]
    whole: float

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or len(self.sizes) != len(self.parts) or min(self.sizes) < 1:
            raise JobError(
                f"{len(self.parts)} norms of parts of {list(self.sizes)} samples",
                rule="noise shows in the differences of at least two parts, each of at least one sample",
            )

    @property
    def variance(self) -> float:
        """tr(Sigma), without bias; a single estimate may be below zero."""
        few = math.fsum(1.0 / n for n in self.sizes) / len(self.sizes)
        return (self._small - self.whole) / (few - 1.0 / sum(self.sizes))

    @property
    def square(self) -> float:
        """|G|^2, without bias; a single estimate may be below zero."""
        return self.whole - self.variance / sum(self.sizes)

    @property
    def _small(self) -> float:
        return math.fsum(self.parts) / len(self.parts)


class NoiseAverage:
    """The moving averages of tr(Sigma) and of |G|^2, apart. With `decay` = 1 they are plain means."""

    def __init__(self, decay: float = 0.99) -> None:
        if not 0.0 < decay <= 1.0:
            raise JobError(f"decay={decay}", rule="0 < decay <= 1")
        self.decay = decay
        self._sums = [0.0, 0.0, 0.0]
        self.count = 0

    def add(self, norms: Norms) -> None:
        """Take the norms of one more batch in."""
        for i, value in enumerate((norms.variance, norms.square, 1.0)):
            self._sums[i] = self.decay * self._sums[i] + value
        self.count += 1

    @property
    def scale(self) -> float:
        """The noise scale in samples; infinite while the noise hides the gradient."""
        return _quotient(self._sums[0], self._sums[1])

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, for a checkpoint."""
        return {"variance": self._sums[0], "square": self._sums[1], "weight": self._sums[2], "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from there."""
        self._sums = [state["variance"], state["square"], state["weight"]]
        self.count = int(state["count"])


@dataclass(frozen=True, slots=True)
class Noise:
    """What was measured, and what it means."""

    scale: float
    """Samples; infinite where the noise hid the gradient."""
    low: float
    high: float
    """One standard error on either side, from leaving out each batch in turn."""
    batches: int
    batch_size: int
    """Of the job."""

    @property
    def more_samples(self) -> float:
        """Samples that training with the job's batch needs, over the least possible: 1 + batch / scale."""
        return 1.0 + self.batch_size / self.scale if self.scale > 0 else math.inf

    @property
    def more_steps(self) -> float:
        """Steps that training with the job's batch needs, over the least possible: 1 + scale / batch."""
        return 1.0 + self.scale / self.batch_size

    def __str__(self) -> str:
        measured = f"({self.batches} batches measured)"
        if math.isinf(self.scale):
            return f"gradient noise scale: the noise hides the gradient {measured}. Larger batches pay"
        spread = f"{_round(self.low)} to {_round(self.high)}"
        return (
            f"gradient noise scale: about {_round(self.scale)} samples, {spread} {measured}. Batches up to about"
            f" {_round(self.scale)} still pay. With {self.batch_size} samples a batch, training takes about"
            f" {self.more_samples:.1f} x the fewest samples and {self.more_steps:.1f} x the fewest steps. It grows as"
            " the loss falls: measure again later"
        )


def noise_scale(engine: Engine, batches: int = 16, parts: int = 4) -> Noise:
    """Measure it on the coming batches of the job, under the engine's plan, without an update. All ranks call it.

    Every batch is cut into `parts`; each is run as a batch of its own, so that its gradient is summed over the ranks as
    in training, and costs as much. Weights, buffers, optimizer and position stay as they are. The samples of a dataset
    are not drawn independently; that shows only where the batches measured are a large share of it.
    """
    if engine.plan.compress != "none":
        raise PlanError(
            f"the noise of gradients with compress={engine.plan.compress}",
            rule="compressed gradients carry an error of their own from step to step",
            fix="compress=none",
        )
    buffers = [(b, b.clone()) for b in engine.model.buffers()]
    position, norm = engine.position, engine.grad_norm
    try:
        found = [_measure(engine, position + i, parts) for i in range(batches)]
    finally:
        engine.strategy.forget()
        engine.position, engine.grad_norm = position, norm
        for b, before in buffers:
            b.copy_(before)
    return judge(found, engine.job.batch_size)


def _measure(engine: Engine, step: int, parts: int) -> Norms:
    """The norms of the parts of one batch, and of their mean."""
    samples = engine.stream.samples(step)
    cuts = [part for part in split(len(samples), parts) if part]
    sums: dict[tuple[str, int], torch.Tensor] = {}
    squares = []
    for i, part in enumerate(cuts):
        engine.position = (step + 1) * 1_000_003 + i  # dropout is part of the noise: masks differ between the parts
        factor = _gradients(engine, [samples[j] for j in part], step)
        squares.append(engine.grad_norm**2)
        for piece, gradient in engine.update.gradients():
            if not piece.counts:
                continue  # another rank has the same numbers, and adds them up
            mine, key = gradient.detach().double() * (factor * len(part) / len(samples)), (piece.name, piece.start)
            sums[key] = sums[key] + mine if key in sums else mine
        engine.strategy.forget()
    total = torch.zeros(1, dtype=torch.float64, device=engine.device)
    for gradient in sums.values():
        total += gradient.square().sum().to(engine.device)
    return Norms(tuple(map(len, cuts)), tuple(squares), float(engine.strategy.add_up(total)))


def _gradients(engine: Engine, samples: list[int], step: int) -> float:
    """Forward and backward of some samples; what the gradients are to be multiplied by."""
    while True:
        _, factor = engine.gradients_of(engine.stream.cut(samples, step))
        if math.isfinite(engine.grad_norm):
            return factor
        engine.strategy.forget()
        if engine.scaler is None:
            raise GaveUp(f"the norm of the gradients is {engine.grad_norm}", rule="noise is measured on finite ones")
        engine.scaler.overflowed()


def judge(found: Sequence[Norms], batch_size: int) -> Noise:
    """The noise scale from several batches, with its error by the jackknife."""
    variances, squares = [n.variance for n in found], [n.square for n in found]
    variance, square = math.fsum(variances), math.fsum(squares)
    scale, n = _quotient(variance, square), len(found)
    without = [_quotient(variance - v, square - s) for v, s in zip(variances, squares, strict=True)]
    if n < 2 or math.isinf(max(scale, *without)):
        return Noise(scale, 0.0, math.inf, n, batch_size)
    mean = math.fsum(without) / n
    error = math.sqrt(math.fsum((w - mean) ** 2 for w in without) * (n - 1) / n)
    return Noise(scale, max(0.0, scale - error), scale + error, n, batch_size)


def _quotient(variance: float, square: float) -> float:
    return max(0.0, variance / square) if square > 0.0 else math.inf


def _round(n: float) -> str:
    """Two digits: more are not known."""
    if math.isinf(n):
        return "infinity"
    return f"{float(f'{n:.2g}'):g}" if n < 1e6 else f"{n:.2g}"
