"""Scales the learning rate with the batch size, and warns beyond published batch sizes.

A rule is not specific to a job; its measured gradient noise scale is. The sizes here are published ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.errors import JobError, nearest

RULES = {
    "linear": "rate x k for a batch x k (Goyal et al. 2017), for SGD; warm-up over 5 epochs",
    "sqrt": "rate x sqrt(k) for a batch x k (Malladi et al. 2022), for Adam and its kin; warm-up steps as before",
    "none": "the rate as it was",
}
"""Each rule, the optimizers it is for, and its source."""

WARM_EPOCHS = 5
"""Epochs of warm-up of the linear rule (Goyal et al. 2017, section 2.2)."""

LIMITS = {
    "image": (
        8192,
        "samples",
        "Goyal et al. 2017: ResNet-50 on ImageNet with SGD keeps its accuracy to 8192 samples, not beyond",
    ),
    "bert": (
        32768,
        "samples",
        "You et al. 2020: BERT with LAMB keeps its quality to 32768 sequences; larger batches are not published",
    ),
}
"""The largest batches of published runs that kept their quality, by kind of model."""


@dataclass(frozen=True, slots=True)
class ScaledLearningRate:
    """A learning rate for another batch size."""

    rate: float
    warmup: int
    """Recommended steps of warm-up."""
    rule: str
    notes: tuple[str, ...]
    """The source of the rule, and a warning if the batch is larger than published ones."""

    def __str__(self) -> str:
        return "\n".join([f"rate {self.rate:.4g}, warm-up {self.warmup} steps", *(f"  {note}" for note in self.notes)])


def scale_rate(
    rate: float,
    *,
    base_batch: int,
    batch: int,
    rule: str = "linear",
    samples: int | None = None,
    base_warmup: int = 0,
    kind: str | None = None,
) -> ScaledLearningRate:
    """The rate for `batch`, from one that was tuned for `base_batch`.

    `samples` is the size of the dataset: the linear rule's warm-up is counted in epochs. `base_warmup` is the warm-up,
    in steps, that the rate was tuned with. `kind` (image, bert) adds a warning from published runs of such models.
    """
    if rule not in RULES:
        raise JobError(f"unknown rule {rule!r}", rule=f"a rule is {', '.join(RULES)}", fix=nearest(rule, RULES))
    if min(base_batch, batch) < 1 or not 0.0 < rate < math.inf or base_warmup < 0:
        raise JobError(
            f"rate {rate}, batches of {base_batch} and {batch}, {base_warmup} steps of warm-up",
            rule="rates and batches are positive, a warm-up is not negative",
        )
    k = batch / base_batch
    factor = {"linear": k, "sqrt": math.sqrt(k), "none": 1.0}[rule]
    notes = [f"{rule}: {RULES[rule]}; k = {batch} / {base_batch} = {k:g}"]
    warmup = base_warmup
    if rule == "linear" and k > 1:
        if samples is None:
            notes.append(f"the warm-up of {WARM_EPOCHS} epochs cannot be counted: give samples=len(dataset)")
        else:
            warmup = max(warmup, math.ceil(WARM_EPOCHS * samples / batch))
    if warned := batch_warning(batch, kind=kind):
        notes.append(warned)
    return ScaledLearningRate(rate * factor, warmup, rule, tuple(notes))


def batch_warning(batch: int, *, kind: str | None = None) -> str:
    """A sentence if a batch exceeds the published size for its kind of model, with its source; else empty."""
    if kind is None:
        return ""
    if kind not in LIMITS:
        raise JobError(f"unknown kind {kind!r}", rule=f"a kind is {', '.join(LIMITS)}", fix=nearest(kind, LIMITS))
    limit, unit, origin = LIMITS[kind]
    return f"{batch} {unit} is beyond {limit} ({origin})" if batch > limit else ""


def critical_tokens(loss: float) -> float:
    """Tokens per batch beyond which a transformer language model gains little, at a loss in nats per token.

    Kaplan et al. 2020, equation 1.4: B = 2e8 tokens / L^(1 / 0.21), fitted on their data and tokens. It grows as the
    loss falls, so a batch that is too large at the beginning may be right later.
    """
    if not 0.0 < loss < math.inf:
        raise JobError(f"a loss of {loss}", rule="nats per token, more than 0")
    return float(2e8 / loss ** (1.0 / 0.21))


def token_warning(tokens: int, loss: float) -> str:
    """A sentence if a batch of `tokens` exceeds the critical size at this loss; else empty."""
    limit = critical_tokens(loss)
    if tokens <= limit:
        return ""
    return (
        f"{tokens} tokens a batch is beyond about {limit:.2g} at a loss of {loss:g}"
        " (Kaplan et al. 2020: 2e8 / L^4.76, fitted on their data)"
    )
