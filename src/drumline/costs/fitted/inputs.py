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
    """Routed experts of a mixture layer; 1 in a dense model."""
    active_experts: Array
    """Routed experts per token; 1 of 1 is a dense layer."""
    expert_ffn: Array
    """Width of one expert; `ffn` is that of the layers without experts."""
    shared_experts: Array
    """Experts that every token visits, besides the routed ones."""
    routed_nodes: Array
    """Nodes that the experts of one token are on, at most; some models route by this limit."""
    dense_layers: Array
    """Layers without experts; all layers of a dense model."""
    head_width: Array
    """Width of a head's queries and keys."""
    value_width: Array
    """Width of a head's values; less than that of its keys under latent attention, by the rotated part."""
    query_latent: Array
    """Width from which queries are expanded; 0 where they are projected directly."""
    kv_latent: Array
    """Width from which keys and values are expanded; 0 where they are projected directly."""

    @classmethod
    def complete(cls, columns: dict[str, object]) -> dict[str, object]:
        """Those of mixtures and of unusual attention may be left out."""
        own = {k: np.asarray(v, dtype=np.float64) for k, v in columns.items()}
        own.setdefault("head_width", own["hidden"] / own["heads"])
        own.setdefault("value_width", own["head_width"])
        own.setdefault("expert_ffn", own["ffn"])
        own.setdefault("routed_nodes", own["active_experts"])
        own.setdefault("dense_layers", np.where(own["experts"] > 1, 0.0, own["layers"]))
        for key in ("shared_experts", "query_latent", "kv_latent"):
            own.setdefault(key, np.zeros(1))
        return dict(own)

    @property
    def mixture_fraction(self) -> Array:
        """Fraction of the layers that are mixtures of experts."""
        return np.where(self.experts > 1, 1.0 - self.dense_layers / self.layers, 0.0)

    @property
    def has_mixtures(self) -> bool:
        """Whether any of the models has experts."""
        return bool(np.any(self.experts > 1))

    @property
    def projected_heads(self) -> Array:
        """Width of queries, keys and values together."""
        return self.heads * self.head_width + self.kv_heads * (self.head_width + self.value_width)

    @property
    def attention_weights(self) -> Array:
        """Parameters of the attention projections of one layer."""
        h, out = self.hidden, self.heads * self.value_width * self.hidden
        direct = h * self.projected_heads + out
        queries = h * self.query_latent + self.query_latent * self.heads * self.head_width
        rotated = self.head_width - self.value_width
        expanded = self.kv_latent * self.heads * 2.0 * self.value_width
        latent = queries + h * (self.kv_latent + rotated) + expanded + out
        return np.where(self.kv_latent > 0, latent, direct)

    @property
    def ffn_weights(self) -> Array:
        """Parameters of the feed-forward network of a layer without experts."""
        return (2.0 + self.gated) * self.hidden * self.ffn

    @property
    def one_expert(self) -> Array:
        """Parameters of one expert."""
        return (2.0 + self.gated) * self.hidden * self.expert_ffn

    @property
    def mixture_weights(self) -> Array:
        """Parameters of the routed experts of one mixture layer."""
        return np.where(self.experts > 1, self.experts * self.one_expert, 0.0)

    @property
    def routed_weights(self) -> Array:
        """The same, per layer on average over all layers."""
        return self.mixture_fraction * self.mixture_weights

    @property
    def mixture_extra(self) -> Array:
        """Parameters of a mixture layer besides routed experts, less those of a layer without experts."""
        always = self.shared_experts * self.one_expert + self.hidden * self.experts
        return np.where(self.experts > 1, always - self.ffn_weights, 0.0)

    @property
    def layer_weights(self) -> Array:
        """Parameters of a layer with all its experts, on average over all layers; biases and norms are ignored."""
        dense = self.attention_weights + self.ffn_weights
        return dense + self.mixture_fraction * self.mixture_extra + self.routed_weights

    @property
    def active_weights(self) -> Array:
        """Parameters of a layer that one token meets, on average over all layers."""
        idle = np.where(self.experts > 1, 1.0 - self.active_experts / self.experts, 0.0)
        return self.layer_weights - idle * self.routed_weights

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
    portable_attention: Array
    """1 where that kernel uses no instructions of Hopper and later, as FlashAttention-2, which torch ships."""
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
    overlap_ep: Array
    """1 where tokens are sent to experts while other micro-batches compute."""
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
    host_waits: Array
    """1 where the thread that launches kernels also waits for messages; 0 unless given."""

    @classmethod
    def complete(cls, columns: dict[str, object]) -> dict[str, object]:
        """Hosts that wait are the exception."""
        return {"host_waits": 0.0, **columns}

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
