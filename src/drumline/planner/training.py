"""A whole training run under a plan: duration, price, checkpoint interval, and how the learning rate scales."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..clusters import Cluster
from ..core.errors import InputError
from ..costs import Estimate
from ..costs.rank_model import tokens_of
from ..models.op_shapes import ConvolutionShape, shape_of
from ..models.profile import Profile
from ..plans import Plan
from ..theory.batch_scaling import WARM_EPOCHS, batch_warning, scale_rate, token_warning
from ..theory.checkpoint_interval import FailureRate, save_interval
from ..theory.roofline import MEMORY_EFFICIENCY

USUAL_LOSS = 3.0
"""Nats per token of a half-trained language model, at which its critical batch size is evaluated."""


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Duration and price of a training run."""

    steps: int
    seconds: float
    device_hours: float
    price: float
    """0 without a price per device hour."""
    tokens: float
    """0 where samples are not tokens."""
    epochs: float
    """0 where the size of the dataset is unknown."""
    currency: str = ""
    """Currency of the price; empty if the user named none."""


def training_cost(
    profile: Profile,
    plan: Plan,
    e: Estimate,
    *,
    tokens: float = 0.0,
    epochs: float = 0.0,
    samples: int = 0,
    price: float = 0.0,
    currency: str = "",
) -> TrainingCost:
    """Cost of a number of tokens, or of epochs over `samples`. Idle devices are not paid for."""
    tokens_per_sample = tokens_of(profile)
    if tokens:
        if not tokens_per_sample:
            raise InputError(
                f"--tokens for {profile.name}",
                rule="its samples are not sequences of tokens",
                fix="--epochs, with --samples for the size of the dataset",
            )
        count = tokens / tokens_per_sample
    else:
        if not samples:
            raise InputError(
                f"--epochs {epochs:g} for {profile.name}",
                rule="the number of samples in the dataset is unknown",
                fix="--samples, such as 1281167",
            )
        count = epochs * samples
    steps = max(1, math.ceil(count / profile.batch_size))
    seconds = steps * e.step_seconds
    hours = seconds * plan.ranks / 3600
    epochs = count / samples if samples else 0.0
    return TrainingCost(steps, seconds, hours, hours * price, float(count * tokens_per_sample), epochs, currency)


@dataclass(frozen=True, slots=True)
class CheckpointInterval:
    """How often to save a checkpoint."""

    bytes: float
    """Size of one checkpoint over all ranks."""
    stall: float
    """Seconds that training waits for a save: until the states are copied to host memory."""
    mtbf: float
    """Mean seconds between failures of the whole run."""
    write: float
    """Seconds until the storage has a checkpoint, while training goes on."""
    interval: float
    """Seconds between two saves that lose the least time (Young/Daly), or as many as the storage needs."""
    every: int
    """The same in steps."""
    lost: float
    """Fraction of the time spent on saves and repeated steps."""
    failures: str = ""
    """How often something fails, in words."""

    @property
    def storage_rate(self) -> float:
        """Bytes per second that the storage must take, so that a checkpoint is written before the next one."""
        return self.bytes / self.interval

    @property
    def waits_for_storage(self) -> bool:
        """Whether saves would be closer together if the storage were faster."""
        return self.interval <= self.write


def checkpoint_interval(
    profile: Profile, plan: Plan, e: Estimate, cluster: Cluster, rate: FailureRate
) -> CheckpointInterval:
    """The Young/Daly interval: a save waits until a rank's states are on the host; the storage is written later.

    A save does not begin before the one before is written.
    """
    width = profile.parameter_bytes
    whole = profile.parameters * width + profile.trained * profile.state_per_parameter
    # replicas share the work of saving: every value is written once
    share = whole / plan.ranks
    host = cluster.device.host
    copies = (
        host.copy
        if host is not None and cluster.device.kind == "cuda"
        else MEMORY_EFFICIENCY * cluster.device.bandwidth / 2
    )
    stall = share / copies
    mtbf = rate.of_run(plan.ranks)
    nodes = -(-plan.ranks // cluster.node.devices)
    write = whole / (nodes * cluster.node.storage)
    interval = max(write, save_interval(stall, mtbf))
    every = max(1, round(interval / e.step_seconds), math.ceil(write / e.step_seconds))
    lost = stall / interval + interval / (2 * mtbf)
    return CheckpointInterval(whole, stall, mtbf, write, interval, every, lost, rate.in_words(plan.ranks))


@dataclass(frozen=True, slots=True)
class LearningRateScaling:
    """Learning rate for a batch size that differs from the one that it was tuned with."""

    base_batch: int
    batch: int
    linear: float
    """Factor of the rate for SGD (with a warm-up of some epochs)."""
    root: float
    """Factor of the rate for Adam and similar optimizers."""
    warmup: int
    """Warm-up steps of the linear rule; 0 where the size of the dataset is unknown."""
    warnings: tuple[str, ...]
    """Where the batch exceeds what published runs used successfully."""

    def __str__(self) -> str:
        k = self.batch / self.base_batch
        warm = f"{self.warmup} steps" if self.warmup else f"{WARM_EPOCHS} epochs"
        linear = f"linear, warm-up over {warm}" if k > 1 else "linear"
        scaled = (
            [
                f"a batch of {self.batch} instead of {self.base_batch} (k = {k:g}): rate x {self.linear:.3g} with SGD "
                f"({linear}), x {self.root:.3g} with Adam (square root, warm-up as before)"
            ]
            if k != 1
            else []
        )
        return "; ".join([*scaled, *self.warnings])


def scale_learning_rate(profile: Profile, base_batch: int, samples: int = 0) -> LearningRateScaling:
    """Scale a rate that was tuned with `base_batch` samples to the batch size of the profile."""
    batch = profile.batch_size
    linear = scale_rate(1.0, base_batch=base_batch, batch=batch, samples=samples or None)
    root = scale_rate(1.0, base_batch=base_batch, batch=batch, rule="sqrt")
    return LearningRateScaling(base_batch, batch, linear.rate, root.rate, linear.warmup, _warnings(profile))


def _warnings(profile: Profile) -> tuple[str, ...]:
    """Warnings from published runs about large batches, by kind of model."""
    tokens = tokens_of(profile)
    if profile.name.startswith("bert"):
        warning = batch_warning(profile.batch_size, kind="bert")
    elif tokens:
        warning = token_warning(profile.batch_size * tokens, USUAL_LOSS)
    elif any(isinstance(shape_of(op), ConvolutionShape) for x in profile.layers for op in x.ops):
        warning = batch_warning(profile.batch_size, kind="image")
    else:
        warning = ""
    return (warning,) if warning else ()
