"""Tensor and pipeline parallelism compared by the bytes that one link carries for the same activations.

Both pass m bytes of activations between layers. A pipeline sends them once over a stage boundary, and their gradients
back. Tensor parallelism all-reduces them over p ranks in every block, forward and backward: 2(p-1)/p m bytes each time.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..clusters import Cluster
from ..core.errors import InputError
from .alpha_beta import message_seconds


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """Bytes per micro-batch on the busiest link, forward and backward."""

    tensor: float
    """Bytes that each tensor-parallel rank sends."""
    pipeline: float
    """Bytes over each stage boundary, both directions."""

    @property
    def ratio(self) -> float:
        """Bytes of tensor parallelism over those of a pipeline."""
        return self.tensor / self.pipeline


def all_reduce_share(p: int) -> float:
    """2(p-1)/p: bytes that an all-reduce sends per rank, in buffers."""
    if p < 1:
        raise InputError(f"an all-reduce over {p} ranks", rule="at least one rank")
    return 2 * (p - 1) / p


def per_link(m: float, p: int, *, blocks: int = 1, sums: int = 2) -> LinkTraffic:
    """Traffic for m bytes of activations over p ranks: `blocks` blocks with `sums` all-reduces each way.

    A transformer block has two: after attention and after its MLP.
    """
    if m <= 0 or blocks < 1 or sums < 1:
        raise InputError(f"{m:g} bytes, {blocks} blocks of {sums} sums", rule="m > 0, at least one block and one sum")
    return LinkTraffic(2 * blocks * sums * all_reduce_share(p) * m, 2 * m)


def needed_inside(p: int, across: float) -> float:
    """Bandwidth inside a node at which an all-reduce over p ranks keeps up with one message between nodes.

    The all-reduce of the last block of a stage and the message to the next stage carry the same m bytes, so the link
    inside the node must be 2(p-1)/p times as fast as `across`, the bandwidth between nodes.
    """
    if across <= 0:
        raise InputError(f"{across:g} bytes per second between nodes", rule="bandwidth > 0")
    return all_reduce_share(p) * across


def seconds_per_block(m: float, cluster: Cluster, p: int) -> tuple[float, float]:
    """(tensor, pipeline): seconds of the all-reduces of one block inside a node, and of one message between nodes."""
    if cluster.network is None:
        raise InputError(f"{cluster.name} is one node", rule="a pipeline between nodes needs [network]")
    inside, across = cluster.node.link, cluster.network.link
    return 4 * 2 * (p - 1) * message_seconds(m / p, inside), 2 * message_seconds(m, across)
