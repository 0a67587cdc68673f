"""A whole training under a plan: how long, at what price, how often to save, and how the rate follows the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..clusters import Cluster
from ..core.errors import InputError
from ..costs import Estimate
from ..costs.batch import WARM_EPOCHS, batch_warning, scale_rate, token_warning
from ..costs.interval import save_interval
from ..costs.tensor import tokens_of
from ..models.profile import Profile
from ..models.shapes import Convolution, shape_of
from ..plans import Plan
from ..theory.roofline import MEMORY_EFFICIENCY

USUAL_LOSS = 3.0
"""Nats per token of a language model that is half trained: where its critical batch is told for."""


@dataclass(frozen=True, slots=True)
class Training:
    """A training from its first step to its last."""

    steps: int
    seconds: float
    device_hours: float
    price: float
    """0 where no price of a device hour was given."""
    tokens: float
    """0 where samples are no tokens."""
    epochs: float
    """0 where the size of the dataset is not known."""


def training(
    profile: Profile,
    plan: Plan,
    e: Estimate,
    *,
    tokens: float = 0.0,
    epochs: float = 0.0,
    samples: int = 0,
    price: float = 0.0,
) -> Training:
    """So many tokens, or passes over so many samples. Devices that a plan leaves idle are not paid for."""
    each = tokens_of(profile)
    if tokens:
        if not each:
            raise InputError(
                f"--tokens for {profile.name}",
                rule="its samples are no sequences of tokens",
                fix="--epochs, with --samples for the size of the dataset",
            )
        count = tokens / each
    else:
        if not samples:
            raise InputError(
                f"--epochs {epochs:g} for {profile.name}",
                rule="how many samples are in the dataset is not known",
                fix="--samples, such as 1281167",
            )
        count = epochs * samples
    steps = max(1, math.ceil(count / profile.batch_size))
    seconds = steps * e.step_seconds
    hours = seconds * plan.ranks / 3600
    seen = count * each if each else 0.0
    return Training(steps, seconds, hours, hours * price, seen, count / samples if samples else 0.0)


@dataclass(frozen=True, slots=True)
class Saving:
    """How often to save."""

    bytes: float
    """Of one checkpoint, all ranks together."""
    stall: float
    """Seconds that a save keeps the training waiting: until a copy of the states is in host memory."""
    mtbf: float
    interval: float
    """Seconds between two saves that lose least (Young/Daly)."""
    every: int
    """The same in steps."""
    lost: float
    """The share of the time that saves and repeated steps then take."""


def saving(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster, mtbf: float) -> Saving:
    """The interval by Young and Daly: a save waits for the copy of a rank's states to the host, disks write later."""
    width = profile.parameter_bytes
    whole = profile.parameters * width + profile.trained * profile.state_per_parameter
    # replicas share the work of saving: every number is written once
    share = whole / plan.ranks
    host = cluster.device.host
    rate = (
        host.copy
        if host is not None and cluster.device.kind == "cuda"
        else MEMORY_EFFICIENCY * cluster.device.bandwidth / 2
    )
    stall = share / rate
    interval = save_interval(stall, mtbf)
    every = max(1, round(interval / e.step_seconds))
    return Saving(whole, stall, mtbf, interval, every, stall / interval + interval / (2 * mtbf))


@dataclass(frozen=True, slots=True)
class Rates:
    """How the learning rate follows the batch, for a batch that differs from the one that it was tuned with."""

    base_batch: int
    batch: int
    linear: float
    """The factor of the rate for SGD (with a warm-up of some epochs)."""
    root: float
    """The factor for Adam and its kin."""
    warmup: int
    """Steps of warm-up of the linear rule; 0 where the dataset's size is not known."""
    warnings: tuple[str, ...]
    """Where the batch passes what has been seen to work."""

    def __str__(self) -> str:
        k = self.batch / self.base_batch
        warm = f"{self.warmup} steps" if self.warmup else f"{WARM_EPOCHS} epochs"
        linear = f"linear, warm-up over {warm}" if k > 1 else "linear"
        told = (
            [
                f"a batch of {self.batch} instead of {self.base_batch} (k = {k:g}): rate x {self.linear:.3g} with SGD "
                f"({linear}), x {self.root:.3g} with Adam (square root, warm-up as before)"
            ]
            if k != 1
            else []
        )
        return "; ".join([*told, *self.warnings])


def rates(profile: Profile, base_batch: int, samples: int = 0) -> Rates:
    """For the profile's batch, from a rate that was tuned with `base_batch` samples."""
    batch = profile.batch_size
    linear = scale_rate(1.0, base_batch=base_batch, batch=batch, samples=samples or None)
    root = scale_rate(1.0, base_batch=base_batch, batch=batch, rule="sqrt")
    return Rates(base_batch, batch, linear.rate, root.rate, linear.warmup, _warnings(profile))


def _warnings(profile: Profile) -> tuple[str, ...]:
    """What published runs say of so large a batch, by kind of model."""
    tokens = tokens_of(profile)
    if profile.name.startswith("bert"):
        told = batch_warning(profile.batch_size, kind="bert")
    elif tokens:
        told = token_warning(profile.batch_size * tokens, USUAL_LOSS)
    elif any(isinstance(shape_of(op), Convolution) for x in profile.layers for op in x.ops):
        told = batch_warning(profile.batch_size, kind="image")
    else:
        told = ""
    return (told,) if told else ()
