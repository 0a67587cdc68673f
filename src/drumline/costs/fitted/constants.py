"""Constants of the fitted cost model: efficiencies, saturation points and overheads, with their priors."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..plan_columns import Array

Number = float | Array


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of one device type; each may be an array with one entry per candidate."""

    matmul: Number = 0.80
    """Fraction of peak that large matmuls reach in 16 bits."""
    matmul_fp8: Number = 0.62
    """The same in fp8."""
    matmul_half_depth: Number = 120.0
    """Inner dimension at which a matmul loses half of that on a 300 TFLOP/s device; grows with the peak."""
    matmul_half_output: Number = 0.8e6
    """Output values at which a matmul loses half of that on a 100 TFLOP/s device; grows with the peak."""
    memory_bandwidth: Number = 0.75
    """Fraction of the memory bandwidth that elementwise kernels reach."""
    attention_forward: Number = 0.60
    """Fraction of peak that fused attention reaches, forward."""
    attention_backward: Number = 0.50
    """The same, backward."""
    portable_attention: Number = 0.65
    """Rate of fused attention without the instructions of Hopper and later (FlashAttention-2), over that with them."""
    unfused_attention: Number = 0.45
    """Fraction of peak that the batched matmuls of unfused attention reach."""
    attention_half_head: Number = 16.0
    """Head width at which fused attention loses half."""
    unfused_half_head: Number = 24.0
    """The same for batched matmuls."""
    misaligned_head: Number = 10.0
    """Slowdown of batched matmuls whose head width is not a multiple of 8."""
    elementwise: Number = 1.0
    """Bytes that hand-fused elementwise kernels move, over the minimum."""
    elementwise_eager: Number = 1.4
    """The same for one kernel per operator."""
    elementwise_rotary: Number = 1.4
    """A further factor for one kernel per operator with RMS norms and rotary embeddings."""
    elementwise_compiled: Number = 0.7
    fp8_cast_bytes: Number = 5.0
    """Bytes per value that enters or leaves an fp8 matmul: scales, copies, transposed copies."""
    score_bytes: Number = 1.0
    """Bytes moved for materialised scores, over the minimum."""
    layer_launch: Number = 7.0e-4
    """Seconds to launch the kernels of a layer's forward."""
    link_bandwidth: Number = 0.72
    """Fraction of the bandwidth inside a node that collectives reach."""
    link_half_bytes: Number = 1.2e7
    """Bytes of a collective at which it reaches half of that."""
    network_bandwidth: Number = 0.65
    """Fraction of the bandwidth between nodes that collectives reach."""
    collective_startup: Number = 1.0e-5
    """Seconds to start a collective."""
    ring_hop: Number = 2.0e-6
    """Seconds per rank of a ring through several nodes."""
    stage_bandwidth: Number = 0.5
    """Fraction of its share of ports or links that a message between stages reaches."""
    exposed_tp: Number = 0.35
    """Exposed fraction of tensor-parallel communication where matmuls are split to overlap it."""
    exposed_pp: Number = 0.15
    """The same for overlapped messages between stages."""
    exposed_dp: Number = 0.15
    """The same for overlapped data-parallel communication: its kernels share the device."""
    exposed_cp: Number = 0.5
    exposed_ep: Number = 0.3
    """The same for tokens sent to experts while other micro-batches compute."""
    gradient_hooks: Number = 4.0e-3
    """Seconds per layer and micro-batch for gradient hooks, one parameter at a time."""
    accumulate_bytes: Number = 1.0
    """Bytes moved to accumulate gradients, over the minimum."""
    update_bytes: Number = 1.0
    """Bytes moved by an update, over the minimum."""
    step_overhead: Number = 0.01
    """Seconds per step outside of all layers."""
    straggler: Number = 0.006
    """Relative slowdown for each doubling of the nodes."""
    expert_imbalance: Number = 1.08
    """Tokens of the busiest rank of an expert group, over the mean."""
    routing_bytes: Number = 1.0
    """Bytes moved to sort tokens by expert, over the minimum."""
    mixture_launch: Number = 1.0e-3
    """Seconds to launch what the forward of a mixture adds to that of a layer: routing, counts that the host reads."""
    expert_bandwidth: Number = 0.7
    """Fraction of the bandwidth of other collectives that the all-to-all of experts reaches."""
    power_exponent: Number = 0.5
    """Matmul rates scale with the power limit to this exponent."""
    logit_bytes: Number = 5.5
    """Peak bytes per logit."""
    allocator_slack: Number = 0.12
    """Memory that the allocator reserves beyond live tensors, as a fraction of all but the model states."""
    allocator_slack_eager: Number = 0.05
    """The same with one elementwise kernel per operator."""
    communicator_bytes: Number = 1.5e9
    """Device memory of the communicators of one parallel axis."""


MEMORY_CONSTANTS = ("logit_bytes", "allocator_slack", "allocator_slack_eager", "communicator_bytes")
"""Constants that only memory depends on."""
TIME_CONSTANTS = tuple(f.name for f in fields(Constants) if f.name not in MEMORY_CONSTANTS)
"""Constants that time depends on."""
PRIOR = {f.name: float(f.default) for f in fields(Constants)}  # type: ignore[arg-type]  # every field has a number
PRIOR_WIDTH = dict.fromkeys((*TIME_CONSTANTS, *MEMORY_CONSTANTS), 0.35) | {
    "allocator_slack": 0.6,
    "allocator_slack_eager": 0.6,
    "communicator_bytes": 0.6,
    "matmul": 0.08,
    "matmul_fp8": 0.12,
    "memory_bandwidth": 0.15,
    "attention_forward": 0.2,
    "attention_backward": 0.2,
    "portable_attention": 0.2,
    "link_bandwidth": 0.15,
    "network_bandwidth": 0.2,
    "matmul_half_depth": 0.5,
    "matmul_half_output": 0.7,
    "layer_launch": 0.25,
    "link_half_bytes": 0.4,
    "attention_half_head": 0.8,
    "collective_startup": 0.7,
    "exposed_dp": 0.6,
    "exposed_tp": 0.5,
    "exposed_pp": 0.6,
    "exposed_ep": 0.4,
    "ring_hop": 0.7,
    "step_overhead": 0.5,
    "straggler": 0.7,
    "elementwise": 0.2,
    "expert_imbalance": 0.1,
    "routing_bytes": 0.5,
    "mixture_launch": 0.7,
    "gradient_hooks": 0.7,
    "power_exponent": 0.5,
    "misaligned_head": 0.5,
}
"""Standard deviation of the logarithm of each constant around its prior."""

OLD_NAMES = {
    "products": "matmul",
    "products8": "matmul_fp8",
    "depth": "matmul_half_depth",
    "wave": "matmul_half_output",
    "stream": "memory_bandwidth",
    "attention": "attention_forward",
    "attention_back": "attention_backward",
    "scores": "unfused_attention",
    "head": "attention_half_head",
    "head_scores": "unfused_half_head",
    "misaligned": "misaligned_head",
    "passes": "elementwise",
    "passes_eager": "elementwise_eager",
    "passes_rotary": "elementwise_rotary",
    "passes_compiled": "elementwise_compiled",
    "casts": "fp8_cast_bytes",
    "score_passes": "score_bytes",
    "layer": "layer_launch",
    "link": "link_bandwidth",
    "link_half": "link_half_bytes",
    "network": "network_bandwidth",
    "message": "collective_startup",
    "hop": "ring_hop",
    "pipe": "stage_bandwidth",
    "hooks": "gradient_hooks",
    "add": "accumulate_bytes",
    "update": "update_bytes",
    "step": "step_overhead",
    "straggle": "straggler",
    "power": "power_exponent",
    "logit": "logit_bytes",
    "spare": "allocator_slack",
    "spare_eager": "allocator_slack_eager",
    "communicator": "communicator_bytes",
}
"""Names of earlier releases, which files may still have."""
