"""What the vectorised closed form reads: arrays of models, of layouts and of machines, one number per candidate."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
T = TypeVar("T", bound="Columns")

SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-2p")
"""Pipeline orders by their code; the last one holds twice the activations of the one before, and has no bubble."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of equal length; a number stands for a column of it."""

    @classmethod
    def of(cls: type[T], **columns: object) -> T:
        """From anything that numpy makes arrays of; columns of one length, or numbers."""
        arrays = {k: np.atleast_1d(np.asarray(v, dtype=np.float64)) for k, v in columns.items()}
        n = max(len(a) for a in arrays.values())
        return cls(**{k: np.broadcast_to(a, (n,)) for k, a in arrays.items()})

    def take(self: T, rows: npt.NDArray[np.intp]) -> T:
        """Some of the candidates."""
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True, slots=True)
class Models(Columns):
    """Transformers by their numbers."""

    layers: Array
    hidden: Array
    heads: Array
    kv_heads: Array
    inner: Array
    """Width between the two maps of the feed-forward part."""
    gated: Array
    """1 where the feed-forward part has a gate beside its first map."""
    vocabulary: Array
    tied: Array
    """1 where the logits use the embedding."""
    sequence: Array
    causal: Array
    predicted: Array
    """The share of places whose logits are computed: 1, or less for masked language models."""
    experts: Array
    active: Array
    """Experts that a token goes through; 1 of 1 is a dense layer."""

    @property
    def head(self) -> Array:
        """Width of one head."""
        return self.hidden / self.heads

    @property
    def attention_weights(self) -> Array:
        """Parameters of the maps around the attention of one layer."""
        return 2.0 * self.hidden**2 + 2.0 * self.hidden * self.kv_heads * self.head

    @property
    def inner_weights(self) -> Array:
        """Parameters of one feed-forward part."""
        return (2.0 + self.gated) * self.hidden * self.inner

    @property
    def layer_weights(self) -> Array:
        """Parameters of one layer, all experts of it; biases and norms are left out."""
        router = np.where(self.experts > 1, self.hidden * self.experts, 0.0)
        return self.attention_weights + self.experts * self.inner_weights + router

    @property
    def table_weights(self) -> Array:
        """Parameters of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> Array:
        """All parameters that are matrices."""
        return self.layers * self.layer_weights + (2.0 - self.tied) * self.table_weights


@dataclass(frozen=True, slots=True)
class Layouts(Columns):
    """How the step is split and run."""

    tp: Array
    pp: Array
    virtual: Array
    dp: Array
    zero: Array
    shard: Array
    """Replicas that share one sharded copy."""
    cp: Array
    ep: Array
    sequence_split: Array
    """1 where what tensor parallelism leaves whole is split along the sequence."""
    slice: Array
    """Samples of one micro-batch on one rank."""
    micro: Array
    """Micro-batches of a step."""
    again_products: Array
    again_attention: Array
    again_passes: Array
    """Shares of a layer's forward that the backward computes again: products, attention, memory-bound passes."""
    order: Array
    """Index into SCHEDULES."""
    fused: Array
    """1 where attention is one kernel that never writes its scores."""
    fusion: Array
    """Memory-bound passes: 0 hand-fused kernels, 1 operator by operator, 2 fused by a compiler."""
    low: Array
    """1 where products are in fp8."""
    gradient: Array
    """Bytes of a gradient that is kept and sent."""
    master: Array
    """1 where fp32 copies of 16-bit parameters are kept."""
    added: Array
    """1 where the product that makes a weight's gradient adds it to the others; 0 where a pass does."""
    copied: Array
    """1 where every micro-batch's gradients are copied to flat buffers and back."""
    overlap_dp: Array
    """How gradients travel: 0 after the backward, 1 beside it."""
    overlap_tp: Array
    """1 where products are cut so that tensor-parallel messages travel beside them."""
    wire: Array
    """Bytes of a gradient as it travels."""
    spread: Array
    """Bytes of an updated parameter as it travels to the ranks that did not update it."""
    ahead: Array
    """1 where these travel beside the next forward, 0 where it waits for them."""
    scattered: Array
    """1 where ranks that share an optimizer's states get their part of the sums; 0 where all of them get all of it."""
    often: Array
    """1 where gradients travel in every micro-batch, 0 where once a step."""

    @property
    def ranks(self) -> Array:
        """All ranks."""
        return self.tp * self.pp * self.dp * self.cp


@dataclass(frozen=True, slots=True)
class Machines(Columns):
    """Data-sheet numbers of the devices and their links."""

    peak: Array
    """Operations per second of the products, in the precision of the layout."""
    peak16: Array
    """The same in bf16 or fp16: attention stays there."""
    bandwidth: Array
    memory: Array
    link: Array
    """Bytes per second of one device to the others of its node, one direction."""
    node: Array
    """Devices that such links join."""
    network: Array
    """Bytes per second of one node's ports, one direction."""
    start: Array
    """Seconds before the first byte of a message inside a node; counts where it is more than the fitted constants."""
    start_network: Array
    """The same between nodes."""
    power: Array
    """The device's power limit as a share of its type's own."""


def recomputed(kind: str) -> tuple[float, float, float]:
    """Shares of (products, attention, passes) that are computed again, for a recomputation by name."""
    return {
        "none": (0.0, 0.0, 0.0),
        "selective": (0.0, 1.0, 0.0),
        "passes": (0.0, 0.0, 1.0),
        "operators": (0.5, 0.0, 1.0),
        "half": (0.5, 0.5, 0.5),
        "full": (1.0, 1.0, 1.0),
    }[kind]
