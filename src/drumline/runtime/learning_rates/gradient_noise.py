"""The gradient noise scale: the batch size up to which a larger batch still pays off, measured from gradients.

McCandlish et al. 2018: the simple noise scale is B = tr(Sigma) / |G|^2, with G the true gradient and Sigma the
covariance of the gradients of single samples. The mean gradient of b samples has the expected squared norm
|G|^2 + tr(Sigma) / b. So the norms of the parts of a batch and of the whole give both, without bias. Each is averaged
over many batches before the division, because a mean of quotients would be biased.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...core.errors import GaveUp, JobError, PlanError
from ...datasets.stream import split_range

if TYPE_CHECKING:
    from ..engine import Engine


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Squared norms of the mean gradients of one batch: of its parts and of the whole."""

    sizes: tuple[int, ...]
    """Samples in each part."""
    parts: tuple[float, ...]
    whole: float

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or len(self.sizes) != len(self.parts) or min(self.sizes) < 1:
            raise JobError(
                f"{len(self.parts)} norms of parts of {list(self.sizes)} samples",
                rule="noise is measured between at least two parts, each of at least one sample",
            )

    @property
    def variance(self) -> float:
        """Unbiased tr(Sigma); a single estimate may be negative."""
        inverse = math.fsum(1.0 / n for n in self.sizes) / len(self.sizes)
        return (math.fsum(self.parts) / len(self.parts) - self.whole) / (inverse - 1.0 / sum(self.sizes))

    @property
    def square(self) -> float:
        """Unbiased |G|^2; a single estimate may be negative."""
        return self.whole - self.variance / sum(self.sizes)


class NoiseScaleAverage:
    """Moving averages of tr(Sigma) and of |G|^2. With `decay` = 1 they are plain means."""

    def __init__(self, decay: float = 0.99) -> None:
        if not 0.0 < decay <= 1.0:
            raise JobError(f"decay={decay}", rule="0 < decay <= 1")
        self.decay = decay
        self._sums = [0.0, 0.0, 0.0]
        self.count = 0

    def add(self, norms: GradientNorms) -> None:
        """Add the norms of one batch."""
        for i, value in enumerate((norms.variance, norms.square, 1.0)):
            self._sums[i] = self.decay * self._sums[i] + value
        self.count += 1

    @property
    def scale(self) -> float:
        """The noise scale in samples; infinite while the noise drowns the gradient."""
        return _quotient(self._sums[0], self._sums[1])

    def state_dict(self) -> dict[str, float]:
        """State for a checkpoint: plain numbers."""
        return {"variance": self._sums[0], "square": self._sums[1], "weight": self._sums[2], "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved state."""
        self._sums = [state["variance"], state["square"], state["weight"]]
        self.count = int(state["count"])


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """A measured noise scale and what it implies for the job's batch size."""

    scale: float
    """Samples; infinite if the noise drowned the gradient."""
    low: float
    high: float
    """One standard error on either side, by the jackknife over batches."""
    batches: int
    batch_size: int
    """The job's batch size."""

    @property
    def sample_factor(self) -> float:
        """Samples needed with the job's batch size, relative to the minimum: 1 + batch / scale."""
        return 1.0 + self.batch_size / self.scale if self.scale > 0 else math.inf

    @property
    def step_factor(self) -> float:
        """Steps needed with the job's batch size, relative to the minimum: 1 + scale / batch."""
        return 1.0 + self.scale / self.batch_size

    def __str__(self) -> str:
        measured = f"({self.batches} batches measured)"
        if math.isinf(self.scale):
            return f"gradient noise scale: the noise drowns the gradient {measured}. Larger batches pay off"
        spread = f"{_round(self.low)} to {_round(self.high)}"
        return (
            f"gradient noise scale: about {_round(self.scale)} samples, {spread} {measured}. Batches up to about"
            f" {_round(self.scale)} still pay off. With {self.batch_size} samples per batch, training takes about"
            f" {self.sample_factor:.1f}x the minimum number of samples and {self.step_factor:.1f}x the minimum number"
            " of steps. The noise scale grows as the loss falls: measure again later"
        )


def noise_scale(engine: Engine, batches: int = 16, parts: int = 4) -> NoiseScale:
    """Measure it on the next batches of the job, under the engine's plan, without updates. All ranks call it.

    Every batch is cut into `parts`; each runs as a batch of its own, so that its gradient is summed over the ranks
    as in training, at the same cost. Weights, buffers, optimizer and position are unchanged. Samples of a dataset
    are not drawn independently; this matters only if the measured batches are a large share of it.
    """
    if engine.plan.compress != "none":
        raise PlanError(
            f"gradient noise with compress={engine.plan.compress}",
            rule="compression adds an error that carries over from step to step",
            fix="compress=none",
        )
    buffers = [(b, b.clone()) for b in engine.model.buffers()]
    position, grad_norm = engine.position, engine.grad_norm
    try:
        norms = [_measure(engine, position + i, parts) for i in range(batches)]
    finally:
        engine.strategy.drop_gradients()
        engine.position, engine.grad_norm = position, grad_norm
        for b, before in buffers:
            b.copy_(before)
    return estimate_scale(norms, engine.job.batch_size)


def _measure(engine: Engine, step: int, parts: int) -> GradientNorms:
    """The norms of the parts of one batch and of their mean."""
    samples = engine.stream.samples(step)
    cuts = [part for part in split_range(len(samples), parts) if part]
    sums: dict[tuple[str, int], torch.Tensor] = {}
    squares = []
    for i, part in enumerate(cuts):
        engine.position = (step + 1) * 1_000_003 + i  # dropout is part of the noise: each part has its own masks
        factor = _gradients(engine, [samples[j] for j in part], step)
        squares.append(engine.grad_norm**2)
        for piece, gradient in engine.update.gradients():
            if not piece.owned:
                continue  # another rank counts this shard
            mine, key = gradient.detach().double() * (factor * len(part) / len(samples)), (piece.name, piece.start)
            sums[key] = sums[key] + mine if key in sums else mine
        engine.strategy.drop_gradients()
    total = torch.zeros(1, dtype=torch.float64, device=engine.device)
    for gradient in sums.values():
        total += gradient.square().sum().to(engine.device)
    return GradientNorms(tuple(map(len, cuts)), tuple(squares), float(engine.strategy.sum_over_ranks(total)))


def _gradients(engine: Engine, samples: list[int], step: int) -> float:
    """Forward and backward of some samples; the factor to multiply the gradients by."""
    while True:
        _, factor = engine.gradients_of(engine.stream.cut(samples, step))
        if math.isfinite(engine.grad_norm):
            return factor
        engine.strategy.drop_gradients()
        if engine.scaler is None:
            raise GaveUp(f"the gradient norm is {engine.grad_norm}", rule="noise is measured on finite gradients")
        engine.scaler.on_overflow()


def estimate_scale(norms: Sequence[GradientNorms], batch_size: int) -> NoiseScale:
    """The noise scale from several batches, with its standard error by the jackknife."""
    variances, squares = [n.variance for n in norms], [n.square for n in norms]
    variance, square = math.fsum(variances), math.fsum(squares)
    scale, n = _quotient(variance, square), len(norms)
    without = [_quotient(variance - v, square - s) for v, s in zip(variances, squares, strict=True)]
    if n < 2 or math.isinf(max(scale, *without)):
        return NoiseScale(scale, 0.0, math.inf, n, batch_size)
    mean = math.fsum(without) / n
    error = math.sqrt(math.fsum((w - mean) ** 2 for w in without) * (n - 1) / n)
    return NoiseScale(scale, max(0.0, scale - error), scale + error, n, batch_size)


def _quotient(variance: float, square: float) -> float:
    return max(0.0, variance / square) if square > 0.0 else math.inf


def _round(n: float) -> str:
    """Two significant digits: the precision of the estimate."""
    if math.isinf(n):
        return "infinity"
    return f"{float(f'{n:.2g}'):g}" if n < 1e6 else f"{n:.2g}"
