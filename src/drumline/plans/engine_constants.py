"""Constants of the training engine that its price depends on. The engine and the cost model both read them here."""

from __future__ import annotations

from ..schedules import SEGMENTED_ALL_REDUCES

FIRST_BUCKET_BYTES = 2**20
"""Bytes of the gradient bucket that is filled first: small, so that reduction begins early in the backward."""

REDUCE_BUCKETS_IN_FLIGHT = 2
"""Buckets of zero=2 whose gradients may be reduced at once. More take more memory and hide longer messages."""

ROUNDED_AT_ONCE = 2**24
"""Weights that `precision=bf16-pure` updates at once, at least one parameter: they, their gradients and states are in
float32 for a moment. More take more memory and fewer kernels."""

POWERSGD_RANK = 4
"""Columns of the two factors that compress=powersgd sends of every matrix. Messages grow in proportion."""

LOSS_MESSAGE_BYTES = 24
"""Bytes of the all-reduce that ends every step: loss, its weight and the count of unused parameters, in float64."""

UNPAIRED_MATMUL_SHARE = 50
"""tp splits a weight without a matching row-parallel one if it has at least 1 / this of the model's parameters; its
output is then gathered. A larger number splits more of them."""

LEAST_TABLE_ROWS = 16
"""tp splits an embedding table by rows if every rank gets at least this many; smaller tables stay whole."""

TREE_SEGMENT_BYTES = 256 * 2**10
"""Bytes of a segment of the all-reduce algorithms whose ranks idle in most rounds unless segments fill them. Shorter
segments fill them sooner and start more messages."""

MOST_TREE_SEGMENTS = 64
"""The most segments of such an all-reduce."""

HOST_SEGMENT_BYTES = 2 * 2**20
"""Bytes of a segment of the hierarchical all-reduce between hosts: long enough to hide the start of a message, short
enough that the network and the memory of a host overlap well."""


def tree_segments(algorithm: str, size: int) -> int:
    """Segments in which the engine runs an all-reduce of `size` bytes."""
    if algorithm not in SEGMENTED_ALL_REDUCES:
        return 1
    return min(MOST_TREE_SEGMENTS, max(1, round(size / TREE_SEGMENT_BYTES)))
