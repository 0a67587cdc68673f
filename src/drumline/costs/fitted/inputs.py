"""Inputs of the vectorised cost model: columns of models, layouts and machines, one row per candidate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan_columns import Array, Columns


@dataclass(frozen=True, slots=True)
class ModelColumns(Columns):
    """Transformers, one per row."""

    layers: Array
    hidden: Array
    heads: Array
    kv_heads: Array
    ffn: Array
    """Width of the feed-forward network."""
    gated: Array
    """1 where the feed-forward network has a gate, as SwiGLU has."""
    vocabulary: Array
    tied: Array
    """1 where the output layer shares the embedding table."""
    sequence: Array
    causal: Array
    predicted_fraction: Array
    """Fraction of positions whose logits are computed: 1, or less for masked language models."""
    experts: Array
    active_experts: Array
    """Experts per token; 1 of 1 is a dense layer."""

    @property
    def head_width(self) -> Array:
        """Width of one head."""
        return self.hidden / self.heads

    @property
    def attention_weights(self) -> Array:
        """Parameters of the attention projections of one layer."""
        return 2.0 * self.hidden**2 + 2.0 * self.hidden * self.kv_heads * self.head_width

    @property
    def ffn_weights(self) -> Array:
        """Parameters of one feed-forward network."""
        return (2.0 + self.gated) * self.hidden * self.ffn

    @property
    def layer_weights(self) -> Array:
        """Parameters of one layer with all its experts; biases and norms are ignored."""
        router = np.where(self.experts > 1, self.hidden * self.experts, 0.0)
        return self.attention_weights + self.experts * self.ffn_weights + router

    @property
    def embedding_weights(self) -> Array:
        """Parameters of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> Array:
        """Parameters of all weight matrices."""
        return self.layers * self.layer_weights + (2.0 - self.tied) * self.embedding_weights


@dataclass(frozen=True, slots=True)
class LayoutColumns(Columns):
    """How a step is split and run, one layout per row."""

    tp: Array
    pp: Array
    virtual: Array
    dp: Array
    zero: Array
    shard: Array
    """Replicas that share one sharded copy."""
    cp: Array
    ep: Array
    sequence_parallel: Array
    """1 where norms and residuals are split along the sequence over the tensor-parallel ranks."""
    micro_batch_size: Array
    """Samples per micro-batch and rank."""
    micro: Array
    """Micro-batches per step."""
    recompute_matmuls: Array
    recompute_attention: Array
    recompute_elementwise: Array
    """Fractions of a layer's forward that the backward recomputes: matmuls, attention, elementwise kernels."""
    schedule: Array
    """Index into SCHEDULES."""
    fused_attention: Array
    """1 where attention is one kernel that never materialises its scores."""
    elementwise_fusion: Array
    """Elementwise kernels: 0 fused by hand, 1 one per operator, 2 fused by a compiler."""
    fp8: Array
    """1 where matmuls run in fp8."""
    gradient_bytes: Array
    """Bytes per gradient value, as stored."""
    master_weights: Array
    """1 where 16-bit parameters have fp32 master copies."""
    fused_accumulation: Array
    """1 where the weight-gradient matmul accumulates in place; 0 where a separate kernel does."""
    flat_buffers: Array
    """1 where the gradients of every micro-batch are copied to flat buffers and back."""
    overlap_dp: Array
    """1 where gradients are reduced during the backward, 0 after it."""
    overlap_tp: Array
    """1 where matmuls are split to overlap tensor-parallel communication."""
    gradient_message_bytes: Array
    """Bytes per gradient value, as sent."""
    parameter_message_bytes: Array
    """Bytes per updated parameter, as sent to the ranks that did not update it."""
    overlap_parameters: Array
    """1 where updated parameters are gathered during the next forward, 0 where it waits for them."""
    reduce_scatter: Array
    """1 where a sharded optimizer reduce-scatters gradients, 0 where it all-reduces them."""
    reduce_every_micro_batch: Array
    """1 where gradients are reduced in every micro-batch, 0 where once per step."""

    @property
    def ranks(self) -> Array:
        """Ranks of each layout."""
        return self.tp * self.pp * self.dp * self.cp


@dataclass(frozen=True, slots=True)
class MachineColumns(Columns):
    """Devices and their links by data sheet, one machine per row."""

    peak: Array
    """Matmul operations per second, in the precision of the layout."""
    peak16: Array
    """The same in bf16 or fp16, which attention keeps."""
    bandwidth: Array
    memory: Array
    link: Array
    """Bytes per second of one device to the others of its node, one direction."""
    devices_per_node: Array
    """Devices that these links connect."""
    network: Array
    """Bytes per second of one node's ports, one direction."""
    link_startup: Array
    """Latency of a message inside a node; used where it exceeds the fitted constants."""
    network_startup: Array
    """The same between nodes."""
    power_fraction: Array
    """Power limit as a fraction of the usual one of the device type."""


def recompute_fractions(kind: str) -> tuple[float, float, float]:
    """Fractions of (matmuls, attention, elementwise kernels) that a kind of recomputation repeats."""
    return {
        "none": (0.0, 0.0, 0.0),
        "selective": (0.0, 1.0, 0.0),
        "elementwise": (0.0, 0.0, 1.0),
        "operators": (0.5, 0.0, 1.0),
        "half": (0.5, 0.5, 0.5),
        "full": (1.0, 1.0, 1.0),
    }[kind]
