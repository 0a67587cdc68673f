"""The constants of a device profile: shares of the data sheet, saturation points and overheads, with shared priors."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .inputs import Array

Number = float | Array


@dataclass(frozen=True, slots=True)
class Constants:
    """One profile; each number may be an array with one entry per candidate."""

    products: Number = 0.80
    """Share of peak that large products reach in 16 bits."""
    products8: Number = 0.62
    """The same in fp8."""
    depth: Number = 120.0
    """Inner size of a product at which a device of 300 TFLOP/s loses half of that; grows with the peak."""
    wave: Number = 0.8e6
    """Numbers of the result at which a device of 100 TFLOP/s would do half of that; grows with the peak."""
    stream: Number = 0.75
    """Share of the memory's rate that passes reach."""
    attention: Number = 0.60
    """Share of peak that fused attention reaches, forward."""
    attention_back: Number = 0.50
    """The same, backward."""
    scores: Number = 0.45
    """Share of peak of the batched products of unfused attention."""
    head: Number = 16.0
    """Width of a head at which fused attention loses half."""
    head_scores: Number = 24.0
    """The same of the batched products."""
    misaligned: Number = 10.0
    """Factor on batched products whose head is no multiple of 8 numbers."""
    passes: Number = 1.0
    """Memory-bound bytes of hand-fused kernels, as a factor on what must move."""
    passes_eager: Number = 1.4
    """The same operator by operator."""
    passes_rotary: Number = 1.4
    """A further factor operator by operator, where norms are root mean squares and positions are rotations."""
    passes_compiled: Number = 0.7
    casts: Number = 5.0
    """Bytes moved per number that enters or leaves a product in fp8: scales, copies, transposed copies."""
    score_passes: Number = 1.0
    """Bytes moved for written scores, as a factor on what must move."""
    layer: Number = 7.0e-4
    """Seconds that a layer's forward takes to start, however small."""
    link: Number = 0.72
    """Share of the node's links that collectives reach."""
    link_half: Number = 1.2e7
    """Bytes of a collective at which half of that is reached."""
    network: Number = 0.65
    """Share of the node's ports that collectives reach."""
    message: Number = 1.0e-5
    """Seconds to start a collective."""
    hop: Number = 2.0e-6
    """Seconds that each rank of a ring through several nodes adds to a collective."""
    pipe: Number = 0.5
    """Share of its part of the ports (or links) that a message between stages reaches."""
    exposed_tp: Number = 0.35
    """Share of tensor-parallel messages that is waited for, where products are cut to hide them."""
    exposed_pp: Number = 0.15
    """The same of messages between stages that travel beside computation."""
    exposed_dp: Number = 0.15
    """Share of overlapped data-parallel messages that costs time all the same: kernels share the device."""
    exposed_cp: Number = 0.5
    hooks: Number = 4.0e-3
    """Seconds per layer and micro-batch in which the host hands gradients over, one parameter after the other."""
    add: Number = 1.0
    """Bytes moved to add one micro-batch's gradients to the others', as a factor on what must move."""
    update: Number = 1.0
    """Bytes moved by an update, as a factor on what must move."""
    step: Number = 0.01
    """Seconds of a step that belong to no layer."""
    straggle: Number = 0.006
    """Slower by this share for each doubling of the nodes."""
    power: Number = 0.5
    """Rates of products fall with this power of the power limit."""
    logit: Number = 5.5
    """Bytes per logit that are alive at once."""
    spare: Number = 0.12
    """What the allocator holds beyond what is alive, as a share of all but the states."""
    spare_eager: Number = 0.05
    """The same where passes run operator by operator."""
    communicator: Number = 1.5e9
    """Bytes of the device that the communicators of one kind of group take."""


MEMORY = ("logit", "spare", "spare_eager", "communicator")
"""The constants that only memory reads."""
NAMES = tuple(f.name for f in fields(Constants) if f.name not in MEMORY)
"""The constants that time reads."""
PRIOR = {f.name: float(f.default) for f in fields(Constants)}  # type: ignore[arg-type]  # every field has a number
WIDTH = dict.fromkeys((*NAMES, *MEMORY), 0.35) | {
    "spare": 0.6,
    "spare_eager": 0.6,
    "communicator": 0.6,
    "products": 0.08,
    "products8": 0.12,
    "stream": 0.15,
    "attention": 0.2,
    "attention_back": 0.2,
    "link": 0.15,
    "network": 0.2,
    "depth": 0.5,
    "wave": 0.7,
    "layer": 0.25,
    "link_half": 0.4,
    "head": 0.8,
    "message": 0.7,
    "exposed_dp": 0.6,
    "exposed_tp": 0.5,
    "exposed_pp": 0.6,
    "hop": 0.7,
    "step": 0.5,
    "straggle": 0.7,
    "passes": 0.2,
    "hooks": 0.7,
    "power": 0.5,
    "misaligned": 0.5,
}
"""How far a constant may be from its prior, as a standard deviation of its logarithm."""
