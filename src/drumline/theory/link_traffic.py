"""Tensor against pipeline parallelism, in the bytes that one link carries for the same activations.

Both hand on m bytes of activations between layers. A pipeline sends them once over a boundary, and gradients back.
Tensor parallelism sums them over its p ranks in every block, in both directions: 2(p-1)/p m bytes each time.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..clusters import Cluster
from ..core.errors import InputError
from .alpha_beta import message_seconds


@dataclass(frozen=True, slots=True)
class PerLink:
    """The bytes on the busiest link of one micro-batch, forward and backward together."""

    tensor: float
    """Each rank of tensor parallelism sends so many."""
    pipeline: float
    """Each boundary of a pipeline carries so many, both directions together."""

    @property
    def ratio(self) -> float:
        """How many times as many bytes tensor parallelism sends."""
        return self.tensor / self.pipeline


def all_reduce_share(p: int) -> float:
    """2(p-1)/p: what an all-reduce sends per rank, in buffers."""
    if p < 1:
        raise InputError(f"an all-reduce over {p} ranks", rule="at least one rank")
    return 2 * (p - 1) / p


def per_link(m: float, p: int, *, blocks: int = 1, sums: int = 2) -> PerLink:
    """For activations of m bytes over p ranks: `blocks` blocks, each summed `sums` times forward and as often backward.

    A transformer block has two sums: after attention and after its MLP.
    """
    if m <= 0 or blocks < 1 or sums < 1:
        raise InputError(f"{m:g} bytes, {blocks} blocks of {sums} sums", rule="m > 0, at least one block and one sum")
    return PerLink(2 * blocks * sums * all_reduce_share(p) * m, 2 * m)


def needed_inside(p: int, across: float) -> float:
    """The bandwidth inside a node at which one all-reduce over its p ranks keeps up with one message between nodes.

    The all-reduce of a stage's last block and the message to the next stage carry the same m bytes, so the node's link
    must be 2(p-1)/p times as fast as what `across` gives between nodes.
    """
    if across <= 0:
        raise InputError(f"{across:g} bytes per second between nodes", rule="bandwidth > 0")
    return all_reduce_share(p) * across


def seconds_per_block(m: float, cluster: Cluster, p: int) -> tuple[float, float]:
    """(tensor, pipeline): seconds of one block's sums inside a node, and of one boundary's message between nodes."""
    if cluster.network is None:
        raise InputError(f"{cluster.name} is one node", rule="a pipeline between nodes needs [network]")
    inside, across = cluster.node.link, cluster.network.link
    return 4 * 2 * (p - 1) * message_seconds(m / p, inside), 2 * message_seconds(m, across)
